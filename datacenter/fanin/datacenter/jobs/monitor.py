"""Monitor of one rank: the observers that write the job's measurements into its folder, and the watchdog.

rows.jsonl              one line per step (meters.StepRecord), written by the first rank
tensorboard/            the same numbers, if the config sets ``tensorboard`` and tensorboardX is installed
timeline-rank-N.json    the spans of each rank, if the config sets ``timeline``
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import torch
from torch.nn.parallel import DistributedDataParallel

from fanin.datacenter.config.rates import ADASCALE
from fanin.datacenter.config.settings import WatchSettings
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.files.jobfiles import ROWS_FILE
from fanin.datacenter.network.counters import ByteCounter, by_axis, make_visible
from fanin.datacenter.observers.events import DataRead, Event, StepComputed
from fanin.datacenter.observers.observer import TrainingObserver
from fanin.datacenter.parallel.engine import Engine
from fanin.datacenter.planner.facts import planned_facts
from fanin.datacenter.planner.spread import Job
from fanin.datacenter.planner.traffic import predict_traffic
from fanin.datacenter.watch.flops import best_gemm, hardware_of
from fanin.datacenter.watch.meters import Meter, Scale, Sink
from fanin.datacenter.watch.sinks import JsonLines, open_tensorboard
from fanin.datacenter.watch.timeline import Timeline
from fanin.datacenter.watch.watchdog import Watchdog

COUNTED_STEP: Final = 2
"""Index, from the first step of this process, of the step whose bytes are counted. Earlier steps also create process
groups and exchange shapes."""


class RankMonitor:
    """The observers that monitor the training of one rank while it is entered.

    Args:
        config: The job.
        engine: The engine.
        rank: This rank's number.
        folder: The job's folder.
        first_step: Number of the first step of this process; more than 0 if the job resumes.

    Attributes:
        observers: The observers, in their order.
    """

    def __init__(self, config: TrainConfig, engine: Engine, rank: int, folder: Path, first_step: int) -> None:
        self._settings = config.watch
        self._stack = ExitStack()
        self._path = folder / f"timeline-rank-{rank}.json"
        self._timeline = Timeline(rank)
        self._watchdog = Watchdog(engine, folder, config.watch.hang_after_s)
        self._traffic = StepTraffic(engine, first_step + COUNTED_STEP)
        runner = engine.rank_model.runners.get(0)
        # AdaScale already replaces DDP's hook with one whose collectives are counted.
        hidden = config.communication.plain and config.rate.scale != ADASCALE
        if config.watch.traffic and hidden and isinstance(runner, DistributedDataParallel):
            make_visible(runner)
        cuda = engine.rank_model.device.type == "cuda"
        self._meters = [
            Meter(
                _scale(config, engine),
                _sinks(config.watch, folder, is_new=first_step == 0),
                torch.cuda.max_memory_allocated if cuda else None,
                lambda: self._traffic.bytes_by_axis,
            )
            for _ in range(rank == 0)
        ]
        self.observers: tuple[TrainingObserver, ...] = (
            *([self._timeline] if config.watch.timeline else ()),
            *([self._traffic] if config.watch.traffic else ()),
            *self._meters,
            self._watchdog,
        )

    def __enter__(self) -> "RankMonitor":
        for meter in self._meters:
            self._stack.callback(meter.close)
        if self._settings.timeline:
            self._stack.callback(self._timeline.write, self._path)
        self._stack.callback(self._traffic.close)
        self._stack.enter_context(self._watchdog)
        return self

    @property
    def traffic(self) -> Mapping[str, int] | None:
        """Bytes that this rank sends in a step, by axis; None if no step was counted."""
        return self._traffic.bytes_by_axis or None

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


class StepTraffic:
    """An observer that counts the bytes that this rank sends in one step.

    Attributes:
        bytes_by_axis: The bytes by mesh axis; empty until the step is over.
    """

    def __init__(self, engine: Engine, step: int) -> None:
        self.bytes_by_axis: Mapping[str, int] = {}
        self._mesh = engine.rank_model.mesh
        self._step = step
        self._stack = ExitStack()
        self._counter: ByteCounter | None = None

    def on(self, event: Event) -> None:
        """Count from the read of the step's data to the end of its computation."""
        match event:
            case DataRead(step=step) if step == self._step and self._mesh is not None and self._mesh.size() > 1:
                self._counter = self._stack.enter_context(ByteCounter(self._mesh))
            case StepComputed() if self._counter is not None:
                self._stack.close()
                self.bytes_by_axis, self._counter = by_axis(self._counter.counts), None

    def close(self) -> None:
        """Count no longer."""
        self._stack.close()


def predicted_traffic(config: TrainConfig) -> dict[str, int] | None:
    """Return the bytes that the planner predicts for a step of the first rank, by axis.

    The planner has a formula for the families that it describes (``Family.planned``) on text, in eager mode, whose
    uncompressed gradients are sent in every step.

    Returns:
        Bytes by axis, or None if the planner has no formula for the job.
    """
    family, parallel = config.model.family, config.parallel
    usual = config.communication.plain and config.rate.scale != ADASCALE and not config.training.freeze
    if family is None or not family.family.planned or not config.data.windows:
        return None
    if not usual or parallel.compile or parallel.precision == "fp16":
        return None
    facts = planned_facts(family.name, family)
    job = Job(facts=facts, parallel=parallel, training=config.training, sequence=config.data.length)
    return by_axis(predict_traffic(job))


def _sinks(settings: WatchSettings, folder: Path, *, is_new: bool) -> list[Sink]:
    if is_new:
        (folder / ROWS_FILE).unlink(missing_ok=True)
    sinks: list[Sink] = [JsonLines(folder / ROWS_FILE)]
    return [*sinks, open_tensorboard(folder / "tensorboard")] if settings.tensorboard else sinks


def _scale(config: TrainConfig, engine: Engine) -> Scale:
    """Return the known reference values: a family's FLOPs, and a GPU's or measured CPU's peak."""
    parallel, family, device = config.parallel, config.model.family, engine.rank_model.device
    flops, peak = 0.0, 0.0
    work = family.work if family is not None and config.data.windows else None
    if work is not None:
        flops = float(work.flops_per_token(config.data.length))
    if device.type == "cuda":
        hardware = hardware_of(torch.cuda.get_device_name(device))
        peak = 0.0 if hardware is None else hardware.peak_in(parallel.precision)
    elif config.watch.mfu:
        peak = best_gemm(torch.float64 if parallel.precision == "double" else torch.float32)
    return Scale(
        num_ranks=parallel.mesh.num_ranks,
        flops_per_token=flops,
        peak_flops_per_second=peak,
        pipelined=parallel.pipelined,
    )
