"""Sharded checkpoints of a training that can go on at any other mesh, and in one process.

Each rank writes its own shards through torch.distributed.checkpoint (DCP), under the names that the parameters have in
one process, whatever the mesh. A save takes a copy of the state and returns; what follows happens beside the training,
in this order, each line on all ranks before the next:

     1. every rank's shards, and DCP's own index of them, are written and synced
     2. progress.json is written into the checkpoint's folder, with the digest of each file
     3. the marker LATEST is moved to it (fanin.datacenter.checkpoints.progress)
     4. what is older than the last ``keep`` is removed

In it are the parameters, the buffers, the optimizers' state, and the progress. A weight that is tied is in it once,
under the original's name. The optimizer's settings are not: they are the job's, and may differ when it goes on.

A load takes the newest checkpoint whose files have their digests, which the ranks compare together, each some of the
files. A damaged one is skipped, with a line in the log, and all ranks take the same older one.

DCP's index is a pickle. A checkpoint is for its own job's folder and must come from nowhere else; what leaves a job
or enters it is safetensors (fanin.datacenter.checkpoints.weights).
"""

import logging
import pickle
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from fanin.datacenter.checkpoints.intact import Found, digests_of, faults_of, find
from fanin.datacenter.checkpoints.named_state import OPTIMIZER, copy_ties, crooked, entries, loaded, saved
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
from fanin.datacenter.checkpoints.slices import is_crooked, slices
from fanin.datacenter.parallel.engine import Engine
from fanin.protos.errors import Corrupted, Diverged, FaninError, InvalidInput, StorageFull, error_named

LOGGER: Final = logging.getLogger(__name__)
KEEP: Final = 2
INDEX_FILE: Final = ".metadata"
"""DCP's index, which the first rank writes."""
WAIT_POLL_S: Final = 0.2
T = TypeVar("T")
Shapes = dict[str, torch.Size | None]
"""Name in a checkpoint to whole shape; None for what is no tensor."""


class Checkpoints:
    """The checkpoints of one job; all ranks make one, and call the same in the same order::

    with Checkpoints(folder, engine) as checkpoints:
        progress = checkpoints.load() or Progress(seed=seed)
        ...
        checkpoints.save(progress)
    """

    def __init__(self, folder: Path, engine: Engine, keep: int = KEEP) -> None:
        if keep < 1:
            raise InvalidInput(f"checkpoints: got keep {keep}, expected at least 1")
        self._folder = folder
        self._engine = engine
        self._keep = keep
        # A group of its own: what is said beside the training must not meet what the training says.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        if self._group is None:
            # For this process: it is meant, and said in a thread too.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self.while_waiting: Callable[[], None] = lambda: None
        """Called now and then while a save is waited for."""
        self.skipped: tuple[str, ...] = ()
        """What was wrong with the checkpoints that the last load did not take."""
        self._damaged: set[int] = set()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error the other ranks may never come to the barriers that a save ends with. Diverged all ranks raise.
        agreed = kind is None or issubclass(kind, Diverged)
        if agreed:
            self.finish()
        self._thread.shutdown(wait=agreed, cancel_futures=True)

    def save(self, progress: Progress, failure: StorageFull | None = None) -> None:
        """Take a copy of the state, and write it while training goes on. Raises what an earlier save failed with.

        The step that LATEST names is there already, and stays as it is: until the next there is no other to go on from.
        With a ``failure``, of this rank before it came here, nothing is saved on any, and all ranks raise it. All raise
        Diverged if a trained value of any is not finite.
        """
        self.finish()
        path = self._folder / folder_name(progress.step)
        self._raise_first(failure or _diverged(path, self._engine))
        there = progress.step not in self._damaged and _marked(self._folder) == progress.step
        if self._any(self._is_first and there):
            return
        obstacle = _emptied(path) if self._is_first else None
        self._raise_first(None if obstacle is None else _not_written(path, obstacle))
        # What DCP would cut wrongly is put together; it writes that once.
        state: dict[str, object] = {
            name: value.full_tensor() if isinstance(value, DTensor) and is_crooked(value) else value
            for name, value in saved(self._engine)
        }
        written = async_save(state, checkpoint_id=path, process_group=self._group, no_dist=self._group is None)
        assert isinstance(written, Future)
        self._pending = self._thread.submit(self._commit, written, progress)

    def finish(self) -> None:
        """Wait until the last save is marked. Raises what it failed with."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        while not wait((pending,), WAIT_POLL_S).done:
            self.while_waiting()
        pending.result()

    def load(self) -> Progress | None:
        """Go on from the newest checkpoint that is whole; None if there is none yet.

        Damaged ones are skipped: ``skipped`` says why. Raises Corrupted if no other is left, or InvalidInput, with
        nothing changed, if it is another model's or another optimizer's.
        """
        self.finish()
        found = self._found()
        faults = list(found.faults)
        for progress in found.whole:
            path = self._folder / folder_name(progress.step)
            damage = self._damage(path) or self._take(path)
            if not damage:
                self._report(tuple(faults), path)
                return progress
            self._damaged.add(progress.step)
            faults += damage
        if faults:
            raise Corrupted(
                f"{'; '.join(faults)}: no checkpoint in {self._folder} is whole; take another folder, or remove this "
                "one to begin anew"
            )
        return None

    def _report(self, faults: tuple[str, ...], path: Path) -> None:
        self.skipped = faults
        if faults and self._is_first:
            LOGGER.warning("checkpoints: going on from %s, the newest whole one: %s", path, "; ".join(faults))

    def _found(self) -> Found:
        """The folder's checkpoints, as all ranks see them. Raises Corrupted, on all ranks, if they see others."""
        found = self._gathered(find(self._folder))
        seen = [[each.step for each in rank.whole] for rank in found]
        if any(steps != seen[0] for steps in seen):
            raise Corrupted(
                f"{self._folder}: got the checkpoints after {seen} steps, as ranks see them in their order, expected "
                "the same ones; take a folder that all machines share"
                + "".join(f"; {fault}" for rank in found for fault in rank.faults)
            )
        # The words of the first rank, for all.
        return found[0]

    def _damage(self, path: Path) -> list[str]:
        """What is wrong with a checkpoint's files, on all ranks alike; each rank reads some of them."""
        faults: list[str] = []
        try:
            digests = read_digests(path)
            names = sorted(set(digests) - {INDEX_FILE})
            # Every rank opens the index, which is a pickle: not before it was compared.
            faults = faults_of(
                path, {INDEX_FILE: "a digest", **digests}, [INDEX_FILE, *names[self._rank :: self._world]]
            )
            if not faults:
                _index(path)
        except Corrupted as exc:
            faults = [str(exc)]
        return list(dict.fromkeys(fault for each in self._gathered(faults) for fault in each))

    def _take(self, path: Path) -> list[str]:
        """Load the values of a checkpoint whose files are whole; what kept DCP from it. Raises InvalidInput."""
        found = _index(path)
        resumes = any(name.startswith(f"{OPTIMIZER}.") for name in found)
        state = loaded(self._engine, resumes=resumes)
        mine: Shapes = {name: value.shape for name, value in state.items()}
        _check(path, found, {name: shape for each in self._gathered(mine) for name, shape in each.items()})
        if not resumes:
            for optimizer in self._engine.optimizers:
                optimizer.state.clear()
        bent = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in crooked(state)}
        whole: dict[str, object] = {**state, **bent}
        try:
            load(whole, checkpoint_id=path, process_group=self._group, no_dist=self._group is None)
        except CheckpointException as exc:
            # DCP raises it on all ranks. An older checkpoint takes the place of all values.
            return [f"{path}: cannot be read ({_cause(exc)})"]
        for name, value in crooked(state):
            value.to_local().copy_(bent[name][slices(value)])
        copy_ties(self._engine)
        return []

    @property
    def _rank(self) -> int:
        return 0 if self._group is None else dist.get_rank()

    @property
    def _world(self) -> int:
        return 1 if self._group is None else dist.get_world_size()

    @property
    def _is_first(self) -> bool:
        return self._rank == 0

    def _any(self, mine: bool) -> bool:
        """Whether it is so on any rank."""
        if self._group is None:
            return mine
        told = torch.tensor(int(mine))
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group)
        return bool(told)

    def _raise_first(self, mine: FaninError | None) -> None:
        """Raise on all ranks, in its words, what the first of them has failed with, if one has."""
        for each in self._gathered(None if mine is None else (type(mine).__name__, str(mine))):
            if each is not None:
                error = error_named(*each)
                assert error is not None, "one of our own"
                raise error from (None if mine is None else mine.__cause__)

    def _gathered(self, mine: T) -> list[T]:
        """What each rank has, in their order."""
        found = [mine] * self._world
        if self._group is not None:
            dist.all_gather_object(found, mine, group=self._group)
        return found

    def _commit(self, written: "Future[object]", progress: Progress) -> None:
        """Steps 1 to 4 of a save, beside the training."""
        path = self._folder / folder_name(progress.step)
        failure: BaseException | None = None
        digests: dict[str, str] = {}
        try:
            # Done where the first rank has written the index, and so after all ranks have written their shards.
            written.result()
            mine = [each.name for each in path.glob(f"__{self._rank}_*")]
            digests = digests_of(path, [*mine, *([INDEX_FILE] if self._is_first else [])])
        except (CheckpointException, OSError) as exc:
            failure = exc
        self._raise_first(None if failure is None else _not_written(path, failure))
        files = {name: digest for each in self._gathered(digests) for name, digest in each.items()}
        try:
            if self._is_first:
                write_progress(path, progress, files)
                write_marker(self._folder, progress.step)
                self._remove_older(progress.step)
        except OSError as exc:
            failure = exc
        self._raise_first(None if failure is None else _not_written(path, failure))

    def _remove_older(self, step: int) -> None:
        steps = [each for each in checkpoint_steps(self._folder) if each <= step]
        damaged = self._damaged - {step}
        whole = [each for each in steps if each not in damaged and _is_whole(self._folder / folder_name(each))]
        for each in set(steps) - set(whole[-self._keep :]):
            shutil.rmtree(self._folder / folder_name(each), ignore_errors=True)


def _is_whole(path: Path) -> bool:
    """Whether a checkpoint can be gone on from, as far as its last file tells."""
    try:
        return read_progress(path) is not None
    except Corrupted:
        return False


def _marked(folder: Path) -> int | None:
    """The step that LATEST names; None if what it names cannot be gone on from."""
    try:
        progress = latest(folder)
    except Corrupted:
        return None
    return None if progress is None else progress.step


def _emptied(path: Path) -> OSError | None:
    """Make a checkpoint's folder, without what a save that was interrupted left there; what kept it from being made."""
    try:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    except OSError as exc:
        return exc
    return None


def _not_written(path: Path, failure: BaseException) -> StorageFull:
    error = StorageFull(f"{path}: the checkpoint could not be written ({_cause(failure)}); the last one stays")
    error.__cause__ = failure
    return error


@torch.no_grad()
def _diverged(path: Path, engine: Engine) -> Diverged | None:
    """Why this rank's values must not become the checkpoint that a job resumes from, if one of them is not finite.

    Frozen parameters and buffers may hold infinities on purpose, such as those of a mask.
    """
    trained = (
        entry
        for part in engine.parts.values()
        for name, value in part.named_parameters()
        if value.requires_grad
        for entry in entries(engine, name, value)
    )
    local = ((name, value.to_local() if isinstance(value, DTensor) else value) for name, value in trained)
    finite = [(name, value.isfinite().all()) for name, value in local]
    broken = next((name for name, each in finite if not each), None)
    if broken is None:
        return None
    return Diverged(
        f"{path}: got {broken} with values that are not finite, expected finite ones; nothing is saved, and the last "
        "checkpoint stays; resume from it with a lower learning rate or a clip_norm"
    )


def _index(path: Path) -> Shapes:
    """The names in a checkpoint, and their shapes."""
    try:
        metadata = FileSystemReader(path).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, IndexError, ValueError) as exc:
        raise Corrupted(f"{path}: its index cannot be read ({type(exc).__name__}: {exc})") from exc
    return {
        name: entry.size if isinstance(entry, TensorStorageMetadata) else None
        for name, entry in metadata.state_dict_metadata.items()
    }


def _check(path: Path, found: Shapes, expected: Shapes) -> None:
    """DCP overlooks what a checkpoint has too much; and what it lacks must be told alike on all ranks."""
    missing, unknown = set(expected) - set(found), set(found) - set(expected)
    wrong = {name for name in set(found) & set(expected) if found[name] != expected[name]}
    if missing or unknown or wrong:
        raise InvalidInput(
            f"{path}: got {len(found)} tensors of which {len(unknown)} are unknown to this job and {len(wrong)} have "
            f"another shape, and {len(missing)} are missing, such as {min([*missing, *unknown, *wrong])}; expected a "
            "checkpoint of the same model and optimizer"
        )


def _cause(error: BaseException) -> str:
    """The first rank's own words, without the traceback that DCP puts around them."""
    if isinstance(error, CheckpointException):
        return next((f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items()), "no reason given")
    return str(error)
