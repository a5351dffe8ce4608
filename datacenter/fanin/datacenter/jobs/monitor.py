"""Monitor of one rank: writes the job's measurements into its folder, and runs the watchdog.

rows.jsonl              one line per step (meters.StepRecord), written by the first rank
tensorboard/            the same numbers, if the config sets ``tensorboard`` and tensorboardX is installed
timeline-rank-N.json    the spans of each rank, if the config sets ``timeline``
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Final

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.nn.parallel import DistributedDataParallel

from fanin.datacenter.config.rates import ADASCALE
from fanin.datacenter.config.settings import WatchSettings
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.files.jobfiles import ROWS_FILE
from fanin.datacenter.network.counters import ByteCounter, by_axis, make_visible
from fanin.datacenter.parallel.engine import Engine
from fanin.datacenter.planner.facts import planned_facts
from fanin.datacenter.planner.spread import Job
from fanin.datacenter.planner.traffic import predict_traffic
from fanin.datacenter.training.loop import TrainingLoop
from fanin.datacenter.watch.flops import best_gemm, hardware_of
from fanin.datacenter.watch.meters import Meter, Scale, Sink
from fanin.datacenter.watch.sinks import JsonLines, open_tensorboard
from fanin.datacenter.watch.timeline import watch_stage
from fanin.datacenter.watch.watchdog import Watchdog

COUNTED_STEP: Final = 2
"""Index, from the first step of this process, of the step whose bytes are counted. Earlier steps also create process
groups and exchange shapes."""


class RankMonitor:
    """Monitors the training of one rank while it is entered."""

    def __init__(self, config: TrainConfig, loop: TrainingLoop, rank: int, folder: Path) -> None:
        self._settings = config.watch
        self._loop = loop
        self._stack = ExitStack()
        self._counter: ByteCounter | None = None
        self._counted_step = loop.state.step + COUNTED_STEP
        engine, timeline = loop.engine, loop.timeline
        timeline.rank, timeline.step = rank, loop.state.step
        self._path = folder / f"timeline-rank-{rank}.json"
        self._watchdog = Watchdog(engine, folder, config.watch.hang_after_s)
        for stage in _stages(engine):
            # The methods of this one object are replaced, which its type does not allow for.
            watch_stage(stage, timeline)  # type: ignore[arg-type]
        runner = engine.rank_model.runners.get(0)
        # AdaScale already replaces DDP's hook with one whose collectives are counted.
        hidden = config.communication.plain and config.rate.scale != ADASCALE
        if config.watch.traffic and hidden and isinstance(runner, DistributedDataParallel):
            make_visible(runner)
        cuda = engine.rank_model.device.type == "cuda"
        is_first = rank == 0
        self._meter = Meter(
            timeline,
            _scale(config, engine) if is_first else Scale(),
            _sinks(config.watch, folder, is_new=loop.state.step == 0) if is_first else (),
            torch.cuda.max_memory_allocated if cuda else None,
        )
        loop.around_step = self._around_step
        loop.after_batch = self._watchdog.alive

    def __enter__(self) -> "RankMonitor":
        self._stack.callback(self._meter.close)
        if self._settings.timeline:
            self._stack.callback(self._loop.timeline.write, self._path)
        self._stack.enter_context(self._watchdog)
        return self

    @property
    def traffic(self) -> Mapping[str, int] | None:
        """Bytes that this rank sends in a step, by axis; None if no step was counted."""
        return self._meter.bytes_by_axis or None

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def alive(self) -> None:
        """Record progress outside of steps."""
        self._watchdog.alive()

    def after_step(self) -> None:
        """Record the step that has just ended."""
        if self._counter is not None:
            self._meter.bytes_by_axis, self._counter = by_axis(self._counter.counts), None
        last = self._loop.last
        self._meter.record(last.loss, last.units, last.norm, last.rate, last.gain)
        self._watchdog.beat(self._loop.state.step)

    def _around_step(self) -> AbstractContextManager[object]:
        mesh = self._loop.engine.rank_model.mesh
        if not self._settings.traffic or mesh is None or mesh.size() == 1:
            return nullcontext()
        if self._loop.state.step != self._counted_step:
            return nullcontext()
        self._counter = ByteCounter(mesh)
        return self._counter


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


def _stages(engine: Engine) -> list[_PipelineStageBase]:
    schedule = engine.rank_model.schedule
    if schedule is None:
        return []
    # torch has no public access to a schedule's stages, and no other way to measure a pipeline's bubble.
    return [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else list(schedule._stages)


def _sinks(settings: WatchSettings, folder: Path, *, is_new: bool) -> list[Sink]:
    if is_new:
        (folder / ROWS_FILE).unlink(missing_ok=True)
    sinks: list[Sink] = [JsonLines(folder / ROWS_FILE)]
    return [*sinks, open_tensorboard(folder / "tensorboard")] if settings.tensorboard else sinks


def _scale(config: TrainConfig, engine: Engine) -> Scale:
    """Return the reference values, as far as they are known: a family's FLOPs, and a GPU's or measured CPU's peak."""
    parallel, family, device = config.parallel, config.model.family, engine.rank_model.device
    flops, peak = 0.0, 0.0
    work = family.work if family is not None and config.data.windows else None
    if work is not None:
        flops = float(work.flops_per_token(config.data.length))
    if device.type == "cuda":
        hardware = hardware_of(torch.cuda.get_device_name(device))
        full = parallel.precision == "full"
        peak = 0.0 if hardware is None else hardware.float32_flops_per_second if full else hardware.flops_per_second
    elif config.watch.mfu:
        peak = best_gemm()
    return Scale(
        num_ranks=parallel.mesh.num_ranks,
        flops_per_token=flops,
        peak_flops_per_second=peak,
        pipelined=parallel.pipelined,
    )
