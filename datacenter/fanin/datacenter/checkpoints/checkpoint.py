"""Sharded checkpoints of a training job, which can resume on any mesh and in one process.

Each rank writes its own shards with torch.distributed.checkpoint (DCP). On any mesh, the tensors have the names that
they have in one process. ``save`` copies the state and returns. The following steps run in the background while
training continues. All ranks finish a step before any of them begins the next:

     1. every rank writes and syncs its shards, and DCP's index of them
     2. progress.json, with the digest of each file, is written into the checkpoint's folder
     3. the marker LATEST is moved to the checkpoint (fanin.datacenter.checkpoints.progress)
     4. checkpoints older than the last ``keep`` are removed

A checkpoint holds the parameters, the buffers, the optimizers' state and the progress. A tied weight is stored once,
under the original's name. The optimizer's settings are not stored: they belong to the job's config and may change when
it resumes.

``load`` uses the newest checkpoint whose files match their digests. Each rank verifies some of the files. If one is
damaged, all ranks skip the checkpoint, log the reason, and load the same older one.

DCP's index is a pickle. Load a checkpoint only from the job's own folder, never from an untrusted source. Weights enter
and leave a job as safetensors (fanin.datacenter.checkpoints.weights).
"""

import logging
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from fanin.datacenter.checkpoints.agreement import RankGroup
from fanin.datacenter.checkpoints.contents import (
    INDEX_FILE,
    TensorShapes,
    check_finite,
    check_shapes,
    failure_cause,
    prepare_folder,
    read_index,
    storage_error,
)
from fanin.datacenter.checkpoints.integrity import CheckpointScan, digests_of, faults_of, scan
from fanin.datacenter.checkpoints.named_state import (
    OPTIMIZER,
    copy_ties,
    frozen_names,
    misaligned,
    state_to_load,
    state_to_save,
)
from fanin.datacenter.checkpoints.progress import (
    Progress,
    checkpoint_steps,
    folder_name,
    latest,
    read_digests,
    read_progress,
    write_marker,
    write_progress,
)
from fanin.datacenter.parallel.engine import Engine
from fanin.datacenter.parallel.transforms.slices import is_misaligned, slices
from fanin.protos.errors import Corrupted, Diverged, InvalidInput, StorageFull

LOGGER: Final = logging.getLogger(__name__)
KEEP: Final = 2
WAIT_POLL_S: Final = 0.2


class Checkpoints:
    """The checkpoints of one job. All ranks create one, and call the same methods in the same order::

    with Checkpoints(folder, engine) as checkpoints:
        progress = checkpoints.load() or Progress(seed=seed)
        ...
        checkpoints.save(progress)

    Attributes:
        while_waiting: Called repeatedly while ``finish`` waits for a save.
        on_written: Called by ``finish`` with the step of a save that is complete.
        skipped: Faults of the checkpoints that the last ``load`` skipped.
    """

    def __init__(self, folder: Path, engine: Engine, keep: int = KEEP) -> None:
        if keep < 1:
            raise InvalidInput(f"checkpoints: got keep {keep}, expected at least 1", code="FN-1241")
        self._folder = folder
        self._engine = engine
        self._keep = keep
        self._ranks = RankGroup()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._pending_step = 0
        self.while_waiting: Callable[[], None] = lambda: None
        self.on_written: Callable[[int], None] = lambda step: None
        self.skipped: tuple[str, ...] = ()
        self._damaged: set[int] = set()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After most errors the other ranks may never reach the barriers of a save. Diverged is raised on all ranks.
        agreed = kind is None or issubclass(kind, Diverged)
        if agreed:
            self.finish()
        self._thread.shutdown(wait=agreed, cancel_futures=True)

    def save(self, progress: Progress, failure: StorageFull | None = None) -> None:
        """Copy the state, and write it in the background.

        A checkpoint of this step that LATEST already names is not changed. Until the next save it is the only one from
        which the job can resume.

        Args:
            progress: The progress of the job at this state.
            failure: An error that this rank already has. It stops the save on all ranks.

        Raises:
            StorageFull: This save, an earlier one, or any rank's ``failure``.
            Diverged: A trained value of any rank is not finite. Raised on all ranks.
        """
        self.finish()
        path = self._folder / folder_name(progress.step)
        self._ranks.raise_first(failure or check_finite(path, self._engine))
        exists = progress.step not in self._damaged and _marked_step(self._folder) == progress.step
        if self._ranks.any(self._ranks.is_first and exists):
            return
        obstacle = prepare_folder(path) if self._ranks.is_first else None
        self._ranks.raise_first(None if obstacle is None else storage_error(path, obstacle))
        # DCP would slice a misaligned tensor at the wrong bounds. It is assembled, and DCP writes it once.
        state: dict[str, object] = {
            name: value.full_tensor() if isinstance(value, DTensor) and is_misaligned(value) else value
            for name, value in state_to_save(self._engine)
        }
        group = self._ranks.process_group
        future = async_save(state, checkpoint_id=path, process_group=group, no_dist=group is None)
        assert isinstance(future, Future)
        self._pending, self._pending_step = self._thread.submit(self._commit, future, progress), progress.step

    def finish(self) -> None:
        """Wait until the last save is complete. Raises StorageFull if it failed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        while not wait((pending,), WAIT_POLL_S).done:
            self.while_waiting()
        pending.result()
        self.on_written(self._pending_step)

    def load(self) -> Progress | None:
        """Load the newest intact checkpoint; ``skipped`` lists the faults of newer ones.

        Returns:
            The checkpoint's progress, or None if there is no checkpoint yet.

        Raises:
            Corrupted: There are checkpoints, but none is intact.
            InvalidInput: The checkpoint belongs to another model or optimizer, or the ranks see different folders.
                Nothing has changed.
        """
        self.finish()
        scanned = self._scan()
        faults = list(scanned.faults)
        for progress in scanned.complete:
            path = self._folder / folder_name(progress.step)
            damage = self._verify(path) or self._load_values(path)
            if not damage:
                self._report_skipped(tuple(faults), path)
                return progress
            self._damaged.add(progress.step)
            faults += damage
        if faults:
            raise Corrupted(
                f"{'; '.join(faults)}: no checkpoint in {self._folder} is intact; choose another folder, or remove "
                "this one to start again",
                code="FN-1330",
            )
        return None

    def _report_skipped(self, faults: tuple[str, ...], path: Path) -> None:
        self.skipped = faults
        if faults and self._ranks.is_first:
            LOGGER.warning("checkpoints: resuming from %s, the newest complete one: %s", path, "; ".join(faults))

    def _scan(self) -> CheckpointScan:
        """Return the checkpoints in the folder. Raises InvalidInput on all ranks if they see different ones."""
        scans = self._ranks.gather(scan(self._folder))
        steps = [[each.step for each in ranked.complete] for ranked in scans]
        if any(each != steps[0] for each in steps):
            raise InvalidInput(
                f"{self._folder}: got checkpoints after the steps {steps} (one list for each rank), expected the same "
                "ones on all ranks; name a folder that all machines share"
                + "".join(f"; {fault}" for ranked in scans for fault in ranked.faults),
                code="FN-1331",
            )
        # All ranks report the first rank's wording.
        return scans[0]

    def _verify(self, path: Path) -> list[str]:
        """Return the faults of a checkpoint's files, the same on all ranks. Each rank reads some of the files."""
        faults: list[str] = []
        try:
            digests = read_digests(path)
            names = sorted(set(digests) - {INDEX_FILE})
            # Every rank opens the index. It is a pickle, so its digest is compared first.
            mine = [INDEX_FILE, *names[self._ranks.rank :: self._ranks.size]]
            faults = faults_of(path, {INDEX_FILE: "a digest", **digests}, mine)
            if not faults:
                read_index(path)
        except Corrupted as exc:
            faults = [str(exc)]
        return list(dict.fromkeys(fault for each in self._ranks.gather(faults) for fault in each))

    def _load_values(self, path: Path) -> list[str]:
        """Load a verified checkpoint; return the faults that DCP met. Raises InvalidInput."""
        index = read_index(path)
        resumes = any(name.startswith(f"{OPTIMIZER}.") for name in index)
        state = state_to_load(self._engine, index)
        mine: TensorShapes = {name: value.shape for name, value in state.items()}
        expected = {name: shape for each in self._ranks.gather(mine) for name, shape in each.items()}
        frozen = [name for each in self._ranks.gather(frozen_names(self._engine)) for name in each]
        check_shapes(path, index, expected, frozen)
        if not resumes:
            for optimizer in self._engine.optimizers:
                optimizer.state.clear()
        full = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in misaligned(state)}
        targets: dict[str, object] = {**state, **full}
        group = self._ranks.process_group
        try:
            load(targets, checkpoint_id=path, process_group=group, no_dist=group is None)
        except CheckpointException as exc:
            # DCP raises this on all ranks. An older checkpoint then overwrites all values.
            return [f"{path}: cannot be read ({failure_cause(exc)})"]
        for name, value in misaligned(state):
            value.to_local().copy_(full[name][slices(value)])
        copy_ties(self._engine)
        return []

    def _commit(self, future: "Future[object]", progress: Progress) -> None:
        """Run steps 1 to 4 of a save, in the background."""
        path = self._folder / folder_name(progress.step)
        failure: BaseException | None = None
        digests: dict[str, str] = {}
        try:
            # Resolves when the first rank has written the index, and so after all ranks have written their shards.
            future.result()
            mine = [each.name for each in path.glob(f"__{self._ranks.rank}_*")]
            digests = digests_of(path, [*mine, *([INDEX_FILE] if self._ranks.is_first else [])])
        except (CheckpointException, OSError) as exc:
            failure = exc
        self._ranks.raise_first(None if failure is None else storage_error(path, failure))
        files = {name: digest for each in self._ranks.gather(digests) for name, digest in each.items()}
        try:
            if self._ranks.is_first:
                write_progress(path, progress, files)
                write_marker(self._folder, progress.step)
                self._remove_older(progress.step)
        except OSError as exc:
            failure = exc
        self._ranks.raise_first(None if failure is None else storage_error(path, failure))

    def _remove_older(self, step: int) -> None:
        steps = [each for each in checkpoint_steps(self._folder) if each <= step]
        damaged = self._damaged - {step}
        complete = [each for each in steps if each not in damaged and _is_complete(self._folder / folder_name(each))]
        for each in set(steps) - set(complete[-self._keep :]):
            shutil.rmtree(self._folder / folder_name(each), ignore_errors=True)


def _is_complete(path: Path) -> bool:
    """Return whether a checkpoint has a valid progress.json, its last file."""
    try:
        return read_progress(path) is not None
    except Corrupted:
        return False


def _marked_step(folder: Path) -> int | None:
    """Return the step of the checkpoint that LATEST names; None if the job cannot resume from it."""
    try:
        progress = latest(folder)
    except Corrupted:
        return None
    return None if progress is None else progress.step
