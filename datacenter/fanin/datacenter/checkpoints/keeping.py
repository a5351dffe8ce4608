"""A job that can be stopped at any moment: its checkpoints, where it goes on, and the trace of what it has done.

Of a job's state, what decides what comes next is in the checkpoint (parameters, optimizer, cursor, patience); what is
only told (each step's loss, each evaluation) is a trace beside it, ``steps.jsonl``, a line each. Going on at step n
keeps the trace's first n steps, so a job that was killed ends with the trace of one that was not.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Final

import torch.distributed as dist

from fanin.datacenter.checkpoints.checkpoint import Checkpoints
from fanin.datacenter.checkpoints.progress import Progress
from fanin.datacenter.data.samples import Cursor
from fanin.datacenter.jobs.config import CheckpointSettings
from fanin.datacenter.jobs.jobfiles import Evaluated
from fanin.datacenter.jobs.places import check_folder
from fanin.datacenter.jobs.records import record_of
from fanin.datacenter.parallel.engine import Engine
from fanin.datacenter.training.rates import Noise
from fanin.datacenter.training.trainer import State, Trainer
from fanin.protos.errors import InvalidInput, StorageFull

TRACE_FILE: Final = "steps.jsonl"
STEP: Final = "loss"
MEASURES: Final = ("looks", "best", "loss_sum", "count", "num_samples", "rate_steps")
"""What a job cannot go on without."""


class Keeper:
    """The checkpoints of one job on one rank; ``state`` is where it begins. All ranks make one."""

    def __init__(self, settings: CheckpointSettings, engine: Engine, seed: int, *, writes: bool) -> None:
        """``writes``: whether this rank keeps the trace. Raises InvalidInput, or Corrupted."""
        self._settings = settings
        self._seed = seed
        self._stack = ExitStack()
        self._checkpoints: Checkpoints | None = None
        self._saved_step = -1
        self.skipped: tuple[str, ...] = ()
        """What was wrong with newer checkpoints than the one that the job goes on from."""
        progress = None
        if settings.folder is not None:
            _check_on_all(settings.folder)
            self._checkpoints = self._stack.enter_context(Checkpoints(settings.folder, engine, settings.keep))
            progress = self._checkpoints.load()
            self.skipped = self._checkpoints.skipped
            # What is there need not be written again, by a job that has nothing left to do.
            self._saved_step = -1 if progress is None else progress.step
        if progress is None and settings.resume is not None and settings.resume != settings.folder:
            with Checkpoints(settings.resume, engine) as others:
                progress = others.load()
                self.skipped = others.skipped
            if progress is None:
                raise InvalidInput(
                    f"checkpoints: got resume {settings.resume}, expected a folder with a whole checkpoint"
                )
        if progress is not None and progress.seed != seed:
            raise InvalidInput(
                f"checkpoints: got seed {seed}, expected {progress.seed} as in the checkpoint: it decides what was seen"
            )
        self.state = State() if progress is None else _state(progress)
        if progress is not None:
            engine.load_scale_state(progress.measures)
        self._trace = settings.folder / TRACE_FILE if writes and settings.folder is not None else None
        sources = [] if progress is None else [folder for folder in (settings.folder, settings.resume) if folder]
        self.losses, self.evaluated = _read_trace(sources, self.state.step) if writes else ([], [])
        self._written = (0, 0)

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._stack.__exit__(kind, error, None)

    @property
    def keeps(self) -> bool:
        """Whether there is a folder for checkpoints."""
        return self._checkpoints is not None

    def while_waiting(self, alive: Callable[[], None]) -> None:
        """What is to be called now and then while a checkpoint is waited for."""
        if self._checkpoints is not None:
            self._checkpoints.while_waiting = alive

    def after_step(self, trainer: Trainer) -> None:
        """Save where it is time for it."""
        every = self._settings.every
        if every and trainer.state.step % every == 0:
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Save the state as it is, unless it is saved already. Raises StorageFull."""
        if self._checkpoints is None or self._saved_step == trainer.state.step:
            return
        self._saved_step = trainer.state.step
        failure = None
        if self._trace is not None:
            try:
                self._append(trainer)
            except StorageFull as exc:
                # Told by all ranks together: the others would wait for this one.
                failure = exc
        self._checkpoints.save(_progress(trainer.state, self._seed, trainer.engine.scale_state), failure)

    def _append(self, trainer: Trainer) -> None:
        """The trace must be on the disk before the checkpoint that stands on it is marked."""
        assert self._trace is not None
        trained, (num_losses, num_evaluated) = trainer.trained, self._written
        lines: list[Mapping[str, object]] = [{STEP: loss} for loss in trained.losses[num_losses:]]
        lines += [asdict(each) for each in trained.evaluated[num_evaluated:]]
        # The first time all of it, aside: it takes the place of what the checkpoints until now stand on.
        path = self._trace if num_losses else self._trace.with_name(f"{TRACE_FILE}.new")
        try:
            with path.open("a" if num_losses else "w", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(line, allow_nan=False)}\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())
            path.replace(self._trace)
        except OSError as exc:
            raise StorageFull(f"{path}: the trace could not be written ({exc}); the last checkpoint stays") from exc
        self._written = (len(trained.losses), len(trained.evaluated))


def _check_on_all(folder: Path) -> None:
    """Raise InvalidInput on all ranks if one of them cannot write there: the others would wait for it."""
    told: list[str | None] = [None]
    try:
        check_folder(folder, f"checkpoints: got folder {folder}", makes=True)
    except InvalidInput as exc:
        told = [str(exc)]
    if dist.is_initialized():
        mine, told = told[0], [None] * dist.get_world_size()
        dist.all_gather_object(told, mine)
    for each in told:
        if each is not None:
            raise InvalidInput(each)


def _read_trace(folders: list[Path], step: int) -> tuple[list[float | None], list[Evaluated]]:
    """The first ``step`` losses, and the evaluations until then, from the first folder that has a trace."""
    path = next((folder / TRACE_FILE for folder in folders if (folder / TRACE_FILE).exists()), None)
    losses: list[float | None] = []
    evaluated: list[Evaluated] = []
    for line in [] if path is None else path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            # The last line of a job that was killed; what it said is done again.
            break
        if STEP in row:
            losses.append(None if row[STEP] is None else float(row[STEP]))
        else:
            evaluated.append(record_of(Evaluated, row, str(path)))
    return losses[:step], [each for each in evaluated if each.step <= step]


def _state(progress: Progress) -> State:
    measures = progress.measures
    missing = [name for name in MEASURES if name not in measures]
    if missing:
        raise InvalidInput(
            f"checkpoints: got one after {progress.step} steps without {', '.join(missing)}, expected one of fanin "
            "train; a program of your own goes on from its own, and gives weights by export_weights"
        )
    return State(
        step=progress.step,
        cursor=Cursor(epoch=progress.epoch, taken=progress.position),
        looks=int(measures["looks"]),
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
        rate_steps=int(measures["rate_steps"]),
    )


def _progress(state: State, seed: int, scale: Mapping[str, float]) -> Progress:
    # A best loss is there once there was a look; infinity is no number of JSON.
    best_loss = {"best_loss": state.best_loss} if state.best else {}
    noise = {f"noise_{name}": value for name, value in asdict(state.noise).items()} if state.noise.steps else {}
    return Progress(
        step=state.step,
        epoch=state.cursor.epoch,
        position=state.cursor.taken,
        seed=seed,
        measures={
            "looks": state.looks,
            "best": state.best,
            "loss_sum": state.loss_sum,
            "count": state.count,
            "skipped": state.skipped,
            "skips": state.skips,
            "num_samples": state.num_samples,
            "rate_steps": state.rate_steps,
            **best_loss,
            **noise,
            **scale,
        },
    )
