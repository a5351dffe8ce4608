"""Program of one rank of a training job.

    python -m torch.distributed.run --nproc-per-node N -m fanin.datacenter.jobs.job CONFIG.json

Every rank reads the same config and data, processes its share of each batch, and computes the same numbers. Rank 0
writes the result. Without torchrun's environment the program is a job of one process. Errors in the config, the App or
the data are detected before the first collective, on every rank, and stored in the job's folder.

The option ``--machines`` announces several machines. There may be more or fewer ranks than the config's mesh has. The
mesh is then fitted to them, and the job resumes from its checkpoint.
"""

import logging
import os
import resource
import shutil
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from fanin.datacenter.checkpoints.resumable import JobCheckpoints
from fanin.datacenter.checkpoints.weights import export_weights
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.data.samples import batch_share
from fanin.datacenter.files.jobfiles import (
    CALLER_FILE,
    MACHINES,
    SEED_FILE,
    THREADS,
    Metrics,
    TrainResult,
    clear,
    read_config,
    write_error,
    write_file,
    write_result,
)
from fanin.datacenter.jobs.balance import balance_pipeline
from fanin.datacenter.jobs.calls import CallAfterStep, caller_of
from fanin.datacenter.jobs.comparison import Comparison
from fanin.datacenter.jobs.initial import initial_values
from fanin.datacenter.jobs.monitor import RankMonitor, predicted_traffic
from fanin.datacenter.models.pretrained_folder import CONFIG
from fanin.datacenter.observers.loading import RankPlace, load_observers
from fanin.datacenter.observers.observer import Failure, Guest, Observers, TrainingObserver
from fanin.datacenter.parallel.draws.recording import NUM_EXAMPLES, find_draws
from fanin.datacenter.parallel.draws.sites import ModelDraws
from fanin.datacenter.parallel.engine import Engine, build_engine
from fanin.datacenter.parallel.gather import full_buffers
from fanin.datacenter.parallel.pipelines.stages import stage_times
from fanin.datacenter.parallel.settings import ParallelSettings
from fanin.datacenter.ranks.devices import build_mesh, describe_device, device_type, rank_device
from fanin.datacenter.ranks.elastic import (
    StopSignal,
    end_with_parent,
    group_of_one,
    is_lost_connection,
    process_group,
)
from fanin.datacenter.ranks.first import on_first_rank
from fanin.datacenter.training.decisions import agree
from fanin.datacenter.training.loop import TrainingLoop
from fanin.datacenter.training.model import JobModel, build_job_model
from fanin.datacenter.training.parameters import parameter_table
from fanin.datacenter.watch import hangs
from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos.errors import Diverged, FaninError, InvalidInput, UnsupportedModel, coded
from fanin.protos.texts import counted

LOGGER: Final = logging.getLogger(__name__)
ALONE: Final = RankPlace()
KIB: Final = 1024
WEIGHTS_KIND: Final = {"format": "pt"}
"""Metadata that transformers expects in a file's header."""
COLLECTIVES: Final = "/torch/distributed/"
"""The function of torch that calls the forward of a module."""
STOPPED: Final = 75
"""Exit status of a rank that saved and ended because another machine was stopped, or because a machine joined."""
SIGNAL_S: Final = 3.0
"""Seconds that such a rank waits for a signal on its own machine. Agents react to an event within a second."""
SIGNAL_POLL_S: Final = 0.1


def main(arguments: Sequence[str]) -> int:
    """Run a rank by the config in a file. Return the exit status: 0 if torchrun must not restart the rank."""
    multi_machine = MACHINES in arguments[:1]
    paths = [Path(argument) for argument in arguments[multi_machine:]]
    if len(paths) != 1:
        sys.stderr.write(f"fanin.datacenter.jobs.job: got {len(paths)} arguments, expected one: the config's path\n")
        return 2
    end_with_parent()
    with ExitStack() as stack:
        stop = StopSignal()
        # Active until the rank ends: a repeated signal must not interrupt a rank that still saves.
        stack.push(stop)
        return _run_rank(paths[0], stop, multi_machine=multi_machine)


def _run_rank(path: Path, stop: StopSignal, *, multi_machine: bool) -> int:
    folder = path.parent
    try:
        config = read_config(path)
    except InvalidInput as exc:
        sys.stderr.write(f"{type(exc).__name__}: {coded(exc)}\n")
        return 2
    if os.environ.get("RANK", "0") == "0":
        # No rank writes a report of this attempt before the first rank has joined the others.
        clear(folder)
        shutil.rmtree(folder / hangs.FOLDER, ignore_errors=True)
    with ExitStack() as group:
        try:
            rank, world_size = group.enter_context(_ranks(config))
            fitted = config.fitted(world_size) if multi_machine else config
            place = RankPlace(rank=rank, num_ranks=world_size, folder=folder)
            result = train_rank(fitted, place, stop=stop)
        except (Exception, SystemExit) as exc:  # Code of the App may raise anything, and may even call sys.exit.
            # All of it before the group closes: the ranks that wait for this one fail then, and their errors are later.
            error = exc if isinstance(exc, FaninError) else _error_of_app(config, exc)
            if error is None:
                LOGGER.exception("this rank has failed")
                return 1
            return _report(folder, error)
    if rank == 0:
        write_result(folder, result)
        (folder / SEED_FILE).unlink(missing_ok=True)
    if rank == 0 and result.failure:
        # Status 0, because a restart would not change the result.
        _report(folder, InvalidInput(result.failure, code="FN-1362"))
    return _stopped_status(stop) if multi_machine and result.metrics.stopped else 0


def _report(folder: Path, error: FaninError) -> int:
    """Log and store the error of this rank, and return the exit status."""
    sys.stderr.write(f"{type(error).__name__}: {coded(error)}\n")
    write_error(folder, error)
    # All ranks diverge at the same step, and would again after a restart. Status 0 prevents that, and the launcher
    # reports the error.
    return 0 if isinstance(error, Diverged) else 1


def _error_of_app(config: TrainConfig, caught: BaseException) -> FaninError | None:
    """Return the error for an exception that code of the App raised in the training; None if other code raised it.

    The traceback is written to the rank's log.
    """
    if not config.model.app or is_lost_connection(caught):
        return None
    from fanin.edge.export.diagnosis.lines import own_line

    frames = [frame for frame, _ in traceback.walk_tb(caught.__traceback__)]
    innermost, line = frames[-1], own_line(caught, of_fanin=False)
    files = [frame.f_code.co_filename for frame in frames]
    last_own = max((index for index, file in enumerate(files) if line.startswith(f"{file}:")), default=0)
    # Arguments that a forward does not accept are refused before its first line.
    is_call = isinstance(caught, TypeError) and innermost.f_code.co_filename == nn.modules.module.__file__
    # In a collective of the App's forward, this rank waited for a rank that is gone.
    is_peer = any(COLLECTIVES in file for file in files[last_own:])
    if not is_call and (is_peer or not line):
        return None
    traceback.print_exception(caught)
    what = f"{type(caught).__name__}{f' at {line}' if line else ''}"
    text = " ".join(str(caught).split())
    return UnsupportedModel(
        f"App {config.model.app!r}: its own code raised {what}: {text}; the log of the rank has the traceback",
        code="FN-1300",
    )


def _stopped_status(stop: StopSignal) -> int:
    """Return the exit status of a rank that stopped, on several machines.

    Status 0 would mean to torchrun that the job is complete: the agent would wait for all others to end, and then close
    the rendezvous. But on a machine that was not stopped itself, the job must continue.
    """
    until_s = time.monotonic() + SIGNAL_S
    while not stop.requested and time.monotonic() < until_s:
        time.sleep(SIGNAL_POLL_S)
    return STOPPED


def train_rank(
    config: TrainConfig,
    place: RankPlace = ALONE,
    *,
    stop: StopSignal | None = None,
    observers: Sequence[TrainingObserver] = (),
) -> TrainResult:
    """Train on this rank, by a config that the launcher has checked.

    Args:
        config: The job.
        place: This rank. Without a folder there are no measurements and no hang reports.
        stop: Stop signal, which begins if the job has a folder for checkpoints; None to keep the caller's handler of
            SIGTERM. The caller exits it.
        observers: Observers of this rank, beside those of the config.

    Raises:
        InvalidInput: The App or the data is invalid, or an observer has failed before the last step. The App may raise
            its own errors.
    """
    # One process needs a process group only if FSDP2 keeps its parameters on the CPU.
    needed = place.num_ranks == 1 and config.parallel.sharded
    with group_of_one(needed=needed, device=config.parallel.device):
        return _run_loop(config, place, stop, [*_rank_observers(config, place), *observers])


def _rank_observers(config: TrainConfig, place: RankPlace) -> list[TrainingObserver]:
    """Return the observers of the config, and on the first rank that of the caller."""
    guests: list[TrainingObserver] = list(_load_observers(config, place))
    if _has_caller(place) and place.folder is not None and place.rank == 0:
        guests.append(CallAfterStep(caller_of(place.folder)))
    return guests


def _has_caller(place: RankPlace) -> bool:
    return place.folder is not None and (place.folder / CALLER_FILE).exists()


def _load_observers(config: TrainConfig, place: RankPlace) -> list[Guest]:
    """Return the observers of the config. Raises InvalidInput on all ranks if those of any rank cannot be loaded."""
    names = config.watch.observers
    guests: list[Guest] = []
    failure = None
    try:
        guests = load_observers(names, place)
    except InvalidInput as exc:
        failure = Failure(reason=str(exc))
    verdict = agree(failure) if names else None
    if verdict is not None:
        raise InvalidInput(verdict.reason, code="FN-1360")
    return guests


def _run_loop(
    config: TrainConfig, place: RankPlace, stop: StopSignal | None, guests: Sequence[TrainingObserver]
) -> TrainResult:
    """Build the engine, run the training loop, and return its result."""
    rank, folder = place.rank, place.folder
    job = build_job_model(config, rank=rank, num_ranks=place.num_ranks)
    table = None if job.app is None else parameter_table(job.model.module)
    config, engine, comparison = _build_engine(config, job, place)
    started_s = time.monotonic()
    with JobCheckpoints(config.checkpoints, engine, config.seed, writes=rank == 0) as checkpoints:
        comparison.check(engine)
        monitor = None if folder is None else RankMonitor(config, engine, rank, folder, checkpoints.state.step)
        signals = [stop] if stop is not None and checkpoints.enabled else []
        observers = Observers(
            [*(monitor.observers if monitor else ()), checkpoints, *guests, *signals],
            shared=bool(signals or config.watch.observers or _has_caller(place)),
        )
        start = checkpoints.start(observers)
        loop = TrainingLoop(engine, job.scored, config, job.data, start)
        checkpoints.follow(loop, observers.publish)
        for each in signals:
            each.begin()
        with nullcontext() if monitor is None else monitor:
            history = loop.run()
    # A job that was stopped has time for a checkpoint only, and its values are not the final ones.
    if not loop.interrupted:
        _write_weights(config, job, engine, rank)
    traffic = None if monitor is None else monitor.traffic
    metrics = Metrics(
        trained=history,
        mesh=config.parallel.mesh,
        num_ranks=place.num_ranks,
        device=device_type(config.parallel.device),
        stopped=loop.interrupted,
        train_s=time.monotonic() - started_s,
        units_per_second=loop.throughput.units_per_second,
        peak_memory_bytes=_peak_memory(engine),
        layer_times=config.parallel.times if config.parallel.pipelined else (),
        stage_times=_stage_times(config.parallel, job.model.layout.sizes.num_layers),
        bytes_by_axis=traffic,
        predicted_bytes_by_axis=None if traffic is None else predicted_traffic(config),
        skipped_checkpoints=checkpoints.skipped,
        lost_history=checkpoints.history.fault,
    )
    if table is None:
        return TrainResult(metrics=metrics, failure=loop.failure)
    return TrainResult(metrics=metrics, table=table, parameters=_parameters(engine, table), failure=loop.failure)


def _build_engine(config: TrainConfig, job: JobModel, place: RankPlace) -> tuple[TrainConfig, Engine, Comparison]:
    """Put the model on this rank, with the values that the job starts from. A collective.

    Returns:
        The config with the measured layer times, the engine, and the comparison of the mesh with the complete module.
    """
    rank, num_ranks, kind = place.rank, place.num_ranks, device_type(config.parallel.device)
    alone = num_ranks == 1 and not config.parallel.sharded
    mesh = None if alone else build_mesh(config.parallel.mesh, num_ranks, kind)
    device = rank_device(kind)
    if rank == 0 and place.folder is not None:
        # Not to stderr: the launcher reports the text there as the reason of a failure.
        sys.stdout.write(f"{counted(num_ranks, 'rank')} of mesh {config.parallel.mesh}, on {describe_device(kind)}\n")
        sys.stdout.flush()
    config = balance_pipeline(config, job, device)
    job = replace(job, model=replace(job.model, draws=_find_draws(job)))
    initial = initial_values(config, job, num_ranks, place.folder)
    comparison = Comparison(config, job, rank)
    engine = build_engine(job.model, config.parallel, config.training, mesh, device)
    initial.load(engine)
    return config, engine, comparison


def _find_draws(job: JobModel) -> ModelDraws:
    """Return the random numbers that the model draws in training. A collective."""
    samples = job.data.train.of_epoch(0)
    indices = np.arange(min(len(samples), NUM_EXAMPLES[-1]))
    objective = job.model.objective
    return on_first_rank(lambda _: find_draws(job.model.module, objective, batch_share(samples, indices, (0, 1), 1)))


def _write_weights(config: TrainConfig, job: JobModel, engine: Engine, rank: int) -> None:
    """Write the final weights, and the config.json that belongs to them, if the job names a file. A collective."""
    weights = config.checkpoints.weights
    if weights is None:
        return
    export_weights(engine, weights, WEIGHTS_KIND)
    if job.files.exported is not None and rank == 0:
        write_file(weights.with_name(CONFIG), job.files.exported)


def _parameters(engine: Engine, table: TensorTable) -> Float32s:
    """Return the parameters and running statistics of an App (num_values,), laid out by ``table``. A collective."""
    values = {name: value.numpy() for name, value in full_values(engine).items()}
    return table.flatten({spec.name: values[spec.name] for spec in table.specs})


def full_values(engine: Engine) -> dict[str, torch.Tensor]:
    """Return all parameters and running statistics, unsharded, on every rank. A collective."""
    return full_buffers(engine.rank_model) | engine.full_parameters()


def _stage_times(parallel: ParallelSettings, num_layers: int) -> tuple[float, ...]:
    """Return the time of each pipeline stage; empty if the split is not based on layer times."""
    if not parallel.pipelined or not parallel.times:
        return ()
    return stage_times(num_layers, parallel.pipeline().num_stages, parallel.times)


def _peak_memory(engine: Engine) -> int:
    """Return the highest memory use of any rank, in bytes. A collective."""
    device = engine.rank_model.device
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else KIB)
    most = torch.tensor(peak, dtype=torch.int64, device=device)
    if engine.rank_model.mesh is not None:
        dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def _ranks(config: TrainConfig) -> AbstractContextManager[tuple[int, int]]:
    """Open the process group of torchrun's environment and yield (rank, world size); (0, 1) without one."""
    # The watchdog has the better diagnosis, so torch's own timeout is longer.
    if "RANK" not in os.environ:
        return nullcontext((0, 1))
    return process_group(2 * config.watch.hang_after_s, config.parallel.device)


def use_threads(environment: Mapping[str, str]) -> None:
    """Use one thread per rank unless ``OMP_NUM_THREADS`` is set. torch's default is all cores."""
    if not environment.get(THREADS):
        torch.set_num_threads(1)


if __name__ == "__main__":
    use_threads(os.environ)
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: torch 2.13's gloo threads may outlive C++ statics. A rank that has done all its work then aborts
    # ("terminate called without an active exception", in 3 of 8 runs).
    os._exit(status)
