"""What is seen of a job while it trains, in its folder, and the eye on ranks that hang.

rows.jsonl              a line a step (meters.Row), by the first rank
tensorboard/            the same, where it is asked for and tensorboardX is installed
timeline-rank-N.json    what each rank did when, where it is asked for
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Final

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.nn.parallel import DistributedDataParallel

from fanin.datacenter.jobs.config import TrainConfig, WatchSettings
from fanin.datacenter.jobs.jobfiles import ROWS_FILE
from fanin.datacenter.network.counters import ByteCounter, by_axis, make_visible
from fanin.datacenter.parallel.engine import Engine
from fanin.datacenter.planner.facts import decoder_facts
from fanin.datacenter.planner.spread import Job
from fanin.datacenter.planner.traffic import predict_traffic
from fanin.datacenter.training.rates import ADASCALE
from fanin.datacenter.training.trainer import Trainer
from fanin.datacenter.watch.flops import best_gemm, hardware_of
from fanin.datacenter.watch.meters import JsonLines, Meter, Scale, Sink, open_tensorboard
from fanin.datacenter.watch.timeline import watch_stage
from fanin.datacenter.watch.watchdog import Watchdog

COUNTED_STEP: Final = 2
"""The steps before it make groups and find out shapes, which sends more."""


class Watch:
    """Looks after one rank's job while it is entered."""

    def __init__(self, config: TrainConfig, trainer: Trainer, rank: int, folder: Path) -> None:
        self._settings = config.watch
        self._trainer = trainer
        self._stack = ExitStack()
        self._counter: ByteCounter | None = None
        self._counted_step = trainer.state.step + COUNTED_STEP
        engine, timeline = trainer.engine, trainer.timeline
        timeline.rank, timeline.step = rank, trainer.state.step
        self._path = folder / f"timeline-rank-{rank}.json"
        self._watchdog = Watchdog(engine, folder, config.watch.hang_after_s)
        for stage in _stages(engine):
            # Its methods are replaced for this one object, which types do not foresee.
            watch_stage(stage, timeline)  # type: ignore[arg-type]
        runner = engine.rank_model.runners.get(0)
        # What AdaScale does there is seen already.
        hidden = config.communication.plain and config.rate.scale != ADASCALE
        if config.watch.traffic and hidden and isinstance(runner, DistributedDataParallel):
            make_visible(runner)
        cuda = engine.rank_model.device.type == "cuda"
        tells = rank == 0
        self._meter = Meter(
            timeline,
            _scale(config, engine) if tells else Scale(),
            _sinks(config.watch, folder, begins=trainer.state.step == 0) if tells else (),
            torch.cuda.max_memory_allocated if cuda else None,
        )
        trainer.around_step = self._around
        trainer.after_batch = self._watchdog.alive

    def __enter__(self) -> "Watch":
        self._stack.callback(self._meter.close)
        if self._settings.timeline:
            self._stack.callback(self._trainer.timeline.write, self._path)
        self._stack.enter_context(self._watchdog)
        return self

    @property
    def traffic(self) -> Mapping[str, int] | None:
        """What this rank sends in a step, in bytes by axis; None where none was counted."""
        return self._meter.bytes_by_axis or None

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def alive(self) -> None:
        """Something goes on that is no step."""
        self._watchdog.alive()

    def after_step(self) -> None:
        """Tell of the step that is done."""
        if self._counter is not None:
            self._meter.bytes_by_axis, self._counter = by_axis(self._counter.counts), None
        last = self._trainer.last
        self._meter.tell(last.loss, last.units, last.norm, last.rate, last.gain)
        self._watchdog.beat(self._trainer.state.step)

    def _around(self) -> AbstractContextManager[object]:
        mesh = self._trainer.engine.rank_model.mesh
        if not self._settings.traffic or mesh is None or mesh.size() == 1:
            return nullcontext()
        if self._trainer.state.step != self._counted_step:
            return nullcontext()
        self._counter = ByteCounter(mesh)
        return self._counter


def predicted_traffic(config: TrainConfig) -> dict[str, int] | None:
    """What the planner has the first rank send in a step, in bytes by axis; None where it has no formula for the job.

    It has one of decoders on windows, whose gradients all travel in each step, as they are and in eager mode.
    """
    decoder, parallel = config.model.decoder, config.parallel
    usual = config.communication.plain and config.rate.scale != ADASCALE and not config.training.freeze
    if decoder is None or not config.data.windows or not usual or parallel.compile or parallel.precision == "fp16":
        return None
    facts = decoder_facts("decoder", decoder)
    job = Job(facts=facts, parallel=parallel, training=config.training, sequence=config.data.length)
    return by_axis(predict_traffic(job))


def _stages(engine: Engine) -> list[_PipelineStageBase]:
    schedule = engine.rank_model.schedule
    if schedule is None:
        return []
    # torch keeps them to itself, and offers nothing else to see a pipeline's bubble by.
    return [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else list(schedule._stages)


def _sinks(settings: WatchSettings, folder: Path, *, begins: bool) -> list[Sink]:
    if begins:
        (folder / ROWS_FILE).unlink(missing_ok=True)
    sinks: list[Sink] = [JsonLines(folder / ROWS_FILE)]
    return [*sinks, open_tensorboard(folder / "tensorboard")] if settings.tensorboard else sinks


def _scale(config: TrainConfig, engine: Engine) -> Scale:
    """What speed is compared with, as far as it is known: a decoder's on windows, a GPU's or a measured CPU's."""
    parallel, decoder, device = config.parallel, config.model.decoder, engine.rank_model.device
    flops, peak = 0.0, 0.0
    if decoder is not None and config.data.windows:
        flops = float(decoder_facts("decoder", decoder).work.flops_per_token(config.data.length))
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
