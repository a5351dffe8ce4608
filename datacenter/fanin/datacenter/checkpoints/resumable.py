"""Resumable jobs: the checkpoints of a training job, the state that it resumes from, and its trace.

``JobCheckpoints`` is an observer that connects the training loop with ``Checkpoints``. The loop's state that decides
the next steps (cursor, evaluations, patience, AdaScale's noise) is stored as the checkpoint's progress. The history is
written to ``trace``. The trace is synced before the checkpoint that relies on it is marked.
"""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Final

import torch.distributed as dist

from fanin.datacenter.checkpoints.checkpoint import Checkpoints
from fanin.datacenter.checkpoints.progress import Progress
from fanin.datacenter.checkpoints.trace import EarlierHistory, TraceWriter, read_trace
from fanin.datacenter.config.settings import CheckpointSettings
from fanin.datacenter.data.samples import Cursor
from fanin.datacenter.files.folders import check_folder
from fanin.datacenter.observers.events import (
    CheckpointWaited,
    CheckpointWritten,
    Event,
    StepSettled,
    TrainingEnded,
    TrainingFailed,
)
from fanin.datacenter.observers.observer import Observers, Publish
from fanin.datacenter.parallel.engine import Engine
from fanin.datacenter.parallel.steps.replicas import check_replicas
from fanin.datacenter.training.loop import TrainingLoop
from fanin.datacenter.training.rates import Noise
from fanin.datacenter.training.state import LoopStart, LoopState
from fanin.protos.errors import InvalidInput, StorageFull

LOGGER: Final = logging.getLogger(__name__)
MEASURES: Final = ("looks", "best", "loss_sum", "count", "num_samples", "data_digest", "rate_steps")
"""Measures without which a job cannot resume."""


class JobCheckpoints:
    """An observer with the checkpoints of one job on one rank. All ranks create one.

    It saves when a step has settled and when the training has ended. It completes the last save also if all ranks end
    with one error, such as that of an observer. Its own errors are raised on all ranks together.

    Args:
        settings: The folders, and how often to save.
        engine: The engine whose values are saved, and loaded if there is a checkpoint.
        seed: The job's seed, which must equal the checkpoint's.
        writes: Whether this rank writes the trace.

    Attributes:
        state: The state that the training loop starts from.
        history: Losses and evaluations of the earlier steps; empty on ranks that do not write.
        skipped: Faults of the newer checkpoints that were skipped.

    Raises:
        InvalidInput: The checkpoint belongs to another job.
        Corrupted: There are checkpoints, but none is intact.
    """

    def __init__(self, settings: CheckpointSettings, engine: Engine, seed: int, *, writes: bool) -> None:
        self._settings = settings
        self._seed = seed
        self._stack = ExitStack()
        self._checkpoints: Checkpoints | None = None
        self._saved_step = -1
        self._loop: TrainingLoop | None = None
        self.skipped: tuple[str, ...] = ()
        progress, source = None, settings.folder
        if settings.folder is not None:
            _check_on_all(settings.folder)
            self._checkpoints = self._stack.enter_context(Checkpoints(settings.folder, engine, settings.keep))
            progress = self._checkpoints.load()
            self.skipped = self._checkpoints.skipped
            # A job that has no step left must not write its last checkpoint again.
            self._saved_step = -1 if progress is None else progress.step
        if progress is None and settings.resume is not None and settings.resume != settings.folder:
            source = settings.resume
            with Checkpoints(settings.resume, engine) as others:
                progress = others.load()
                self.skipped = others.skipped
            if progress is None:
                raise InvalidInput(
                    f"checkpoints: got resume {settings.resume}, expected a folder with a complete checkpoint",
                    code="FN-1341",
                )
        if progress is not None and progress.seed != seed:
            raise InvalidInput(
                f"checkpoints: got seed {seed}, expected {progress.seed} as in the checkpoint: the seed decides which "
                "samples were already used",
                code="FN-1342",
            )
        self.state = LoopState() if progress is None else _state_of(progress)
        if progress is not None:
            engine.load_scale_state(progress.measures)
        self._trace = TraceWriter(settings.folder) if writes and settings.folder is not None else None
        self.history = EarlierHistory()
        if progress is not None and source is not None and writes:
            self.history = read_trace(source, self.state.step)
            if self.history.fault:
                LOGGER.warning("checkpoints: the earlier losses and evaluations are lost: %s", self.history.fault)

    def __enter__(self) -> "JobCheckpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._stack.__exit__(kind, error, None)

    @property
    def enabled(self) -> bool:
        """Whether there is a folder for checkpoints."""
        return self._checkpoints is not None

    def start(self, observers: Observers) -> LoopStart:
        """Return the start of the loop that resumes from the checkpoint, or of a new job's."""
        return LoopStart(
            state=self.state,
            losses=self.history.losses,
            evaluations=self.history.evaluations,
            observers=observers,
        )

    def follow(self, loop: TrainingLoop, publish: Publish) -> None:
        """Save the state of this loop when its events say so, and publish events of the checkpoints."""
        self._loop = loop
        if self._checkpoints is not None:
            self._checkpoints.while_waiting = lambda: publish(CheckpointWaited(num_steps=loop.state.step))
            self._checkpoints.on_written = lambda step: publish(CheckpointWritten(num_steps=step))

    def on(self, event: Event) -> None:
        """Save if the settings require a checkpoint after this event. Raises the errors of ``save``."""
        every = self._settings.every
        match event:
            case StepSettled(num_steps=num_steps) if every and num_steps % every == 0:
                self._save()
            case TrainingEnded():
                self._save()
                self._finish()
            case TrainingFailed(on_all_ranks=True):
                self._finish()

    def _finish(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.finish()

    def _save(self) -> None:
        assert self._loop is not None, "follow comes before the first event"
        self.save(self._loop)

    def save(self, loop: TrainingLoop) -> None:
        """Save the current state unless it is already saved. Raises StorageFull, Diverged or UnsupportedModel."""
        if self._checkpoints is None or self._saved_step == loop.state.step:
            return
        # The job can resume from the earlier checkpoint if the copies, of which one is stored, differ now.
        self._finish()
        check_replicas(loop.engine.rank_model)
        self._saved_step = loop.state.step
        failure = None
        if self._trace is not None:
            try:
                self._trace.append(loop.history)
            except StorageFull as exc:
                # Raised on all ranks together, because the others would wait for this one.
                failure = exc
        self._checkpoints.save(_progress_of(loop.state, self._seed, loop.engine.scale_state), failure)


def _check_on_all(folder: Path) -> None:
    """Raise InvalidInput on all ranks if any of them cannot write to the folder: the others would wait for it."""
    errors: list[str | None] = [None]
    try:
        check_folder(folder, f"checkpoints: got folder {folder}", create=True)
    except InvalidInput as exc:
        errors = [str(exc)]
    if dist.is_initialized():
        own, errors = errors[0], [None] * dist.get_world_size()
        dist.all_gather_object(errors, own)
    for error in errors:
        if error is not None:
            raise InvalidInput(error, code="FN-1350")


def _state_of(progress: Progress) -> LoopState:
    measures = progress.measures
    missing = [name for name in MEASURES if name not in measures]
    if missing:
        raise InvalidInput(
            f"checkpoints: got one after {progress.step} steps without {', '.join(missing)}, expected one of fanin "
            "train; resume it with the program that wrote it, or export its weights with export_weights",
            code="FN-1345",
        )
    return LoopState(
        step=progress.step,
        cursor=Cursor(epoch=progress.epoch, taken=progress.position),
        num_evaluations=int(measures["looks"]),
        best=int(measures["best"]),
        best_loss=measures.get("best_loss", float("inf")),
        loss_sum=measures["loss_sum"],
        count=int(measures["count"]),
        noise=Noise(
            variance=measures.get("noise_variance", 0.0),
            signal=measures.get("noise_signal", 0.0),
            count=int(measures.get("noise_count", 0)),
            steps=measures.get("noise_steps", 0.0),
        ),
        skipped=int(measures.get("skipped", 0)),
        skips=int(measures.get("skips", 0)),
        num_samples=int(measures["num_samples"]),
        data_digest=int(measures["data_digest"]),
        rate_steps=int(measures["rate_steps"]),
    )


def _progress_of(state: LoopState, seed: int, scale: Mapping[str, float]) -> Progress:
    # Before the first evaluation the best loss is infinite, which JSON cannot represent.
    best_loss = {"best_loss": state.best_loss} if state.best else {}
    noise = {f"noise_{name}": value for name, value in asdict(state.noise).items()} if state.noise.steps else {}
    return Progress(
        step=state.step,
        epoch=state.cursor.epoch,
        position=state.cursor.taken,
        seed=seed,
        measures={
            "looks": state.num_evaluations,
            "best": state.best,
            "loss_sum": state.loss_sum,
            "count": state.count,
            "skipped": state.skipped,
            "skips": state.skips,
            "num_samples": state.num_samples,
            "data_digest": state.data_digest,
            "rate_steps": state.rate_steps,
            **best_loss,
            **noise,
            **scale,
        },
    )
