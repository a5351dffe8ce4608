"""The program of one rank.

    python -m torch.distributed.run --nproc-per-node N -m fanin.datacenter.jobs.job CONFIG.json

Every rank reads the same config and data, takes its part of each batch, and comes to the same numbers; rank 0 writes
them. Without torchrun's environment it is one process by itself. What is wrong with the config, the App or the data is
found before the first collective, on every rank alike, and is left in the job's folder as one of our own errors.

After ``--machines`` the ranks are those of several machines, which may be more or fewer than the config's mesh has: it
is fitted to them, and the job goes on from its checkpoint.
"""

import os
import resource
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from fanin.datacenter.checkpoints.keeping import Keeper
from fanin.datacenter.checkpoints.parameters import parameter_table
from fanin.datacenter.checkpoints.weights import export_weights, import_weights
from fanin.datacenter.jobs.config import SAFETENSORS, TrainConfig, check_config, fit_config
from fanin.datacenter.jobs.devices import build_mesh, described, device_type, rank_device
from fanin.datacenter.jobs.elastic import Stop, end_with_parent, group_of_one, process_group
from fanin.datacenter.jobs.jobfiles import (
    MACHINES,
    THREADS,
    Metrics,
    Trained,
    TrainResult,
    clear,
    read_config,
    write_error,
    write_file,
    write_result,
)
from fanin.datacenter.models.pretrained_folder import CONFIG
from fanin.datacenter.parallel.engine import Engine, build_engine
from fanin.datacenter.parallel.pipelines.balance import balance_pipeline
from fanin.datacenter.parallel.pipelines.stages import stage_times
from fanin.datacenter.parallel.settings import ParallelSettings
from fanin.datacenter.training.communication import check_kept
from fanin.datacenter.training.model import make
from fanin.datacenter.training.trainer import Trainer, data_groups
from fanin.datacenter.watch import hangs
from fanin.datacenter.watch.watching import Watch, predicted_traffic
from fanin.protos.errors import Diverged, FaninError, InvalidInput

KIB: Final = 1024
WEIGHTS_KIND: Final = {"format": "pt"}
"""What transformers looks for in a file's header."""
STOPPED: Final = 75
"""The status of a rank that saved and left because another machine was told to stop, or saw one come."""
SIGNAL_S: Final = 3.0
"""How long such a rank waits for its own machine's signal: agents that see the same do so within a second."""
SIGNAL_POLL_S: Final = 0.1


def main(arguments: Sequence[str]) -> int:
    """Train as the config says; 0 if torchrun has nothing to start again."""
    several = MACHINES in arguments[:1]
    paths = [Path(argument) for argument in arguments[several:]]
    if len(paths) != 1:
        sys.stderr.write(f"fanin.datacenter.jobs.job: got {len(paths)} arguments, expected one: the config's path\n")
        return 2
    end_with_parent()
    with ExitStack() as stack:
        stop = Stop()
        # Left with the rank: the signal that comes again must not end one that still writes what it saves.
        stack.push(stop)
        return _main(paths[0], stop, several=several)


def _main(path: Path, stop: Stop, *, several: bool) -> int:
    folder = path.parent
    try:
        config = read_config(path)
    except InvalidInput as exc:
        sys.stderr.write(f"{type(exc).__name__}: {exc}\n")
        return 2
    if os.environ.get("RANK", "0") == "0":
        # Nobody leaves word in this attempt before its first rank has joined the others.
        clear(folder)
        shutil.rmtree(folder / hangs.FOLDER, ignore_errors=True)
    try:
        with _ranks(config) as (rank, world_size):
            fitted = fit_config(config, world_size) if several else config
            result = train(fitted, rank, world_size, folder, stop)
    except FaninError as exc:
        sys.stderr.write(f"{type(exc).__name__}: {exc}\n")
        write_error(folder, exc)
        # All ranks come to it at the same step, and would again: to torchrun the job is done. The launcher tells.
        return 0 if isinstance(exc, Diverged) else 1
    if rank == 0:
        write_result(folder, result)
    return _status(stop) if several and stop.stopped else 0


def _status(stop: Stop) -> int:
    """Of a rank that stopped on several machines: where it was not told itself, the job is not done for its machine.

    To torchrun status 0 is the end: its agent would wait for all others to end, and then close the meeting to them.
    """
    until_s = time.monotonic() + SIGNAL_S
    while not stop.asked and time.monotonic() < until_s:
        time.sleep(SIGNAL_POLL_S)
    return STOPPED


def train(
    config: TrainConfig, rank: int, world_size: int, folder: Path | None = None, stop: Stop | None = None
) -> TrainResult:
    """Train on this rank, watched in a ``folder`` if there is one. Raises InvalidInput and the App's own errors.

    ``stop`` is begun if checkpoints are kept, and then knows whether it ended the training; whose it is exits it.
    """
    check_config(config, world_size)
    check_kept(config.communication, config.checkpoints.folder)
    with ExitStack() as stack:
        # Of one process no more is wanted than it has, unless FSDP2 is to keep its parameters on the CPU.
        wanted = world_size == 1 and config.parallel.sharded
        stack.enter_context(group_of_one(wanted=wanted, device=config.parallel.device))
        if stop is None:
            stop = Stop()
            stack.push(stop)
        return _train(config, (rank, world_size), folder, stop)


def _train(config: TrainConfig, place: tuple[int, int], folder: Path | None, stop: Stop) -> TrainResult:
    rank, world_size = place
    made = make(config)
    table = None if made.app is None else parameter_table(made.model.module)
    kind = device_type(config.parallel.device)
    alone = world_size == 1 and not config.parallel.sharded
    mesh = None if alone else build_mesh(config.parallel.mesh, world_size, kind)
    device = rank_device(kind)
    if rank == 0 and folder is not None:
        # Not to stderr: a launcher takes what is there for the reason of a failure.
        sys.stdout.write(f"{world_size} ranks of mesh {config.parallel.mesh}, on {described(kind)}\n")
        sys.stdout.flush()
    config = balance_pipeline(config, made, rank, device)
    engine = build_engine(made.model, config.parallel, config.training, mesh, device)
    initial, weights = config.model.initial, config.checkpoints.weights
    if initial is not None and initial.suffix == SAFETENSORS:
        import_weights(engine, initial)
    if made.weights is not None:
        import_weights(engine, made.weights, made.aside, cast=True)
    started_s = time.monotonic()
    with Keeper(config.checkpoints, engine, config.seed, writes=rank == 0) as keeper:
        trainer = Trainer(engine, made.scored, config, made.parts, keeper.state)
        trainer.remember(keeper.losses, keeper.evaluated)
        watch = None if folder is None else Watch(config, trainer, rank, folder)
        trained = _run(trainer, keeper, watch, stop if keeper.keeps else None)
    # Told to stop, there is time for a checkpoint, and this is not what the model ends with.
    if weights is not None and not stop.stopped:
        export_weights(engine, weights, WEIGHTS_KIND)
        if made.exported is not None and rank == 0:
            write_file(weights.with_name(CONFIG), made.exported)
    traffic = None if watch is None else watch.traffic
    metrics = Metrics(
        trained=trained,
        mesh=config.parallel.mesh,
        num_ranks=world_size,
        device=kind,
        stopped=stop.stopped,
        train_s=time.monotonic() - started_s,
        units_per_second=trainer.speed.units_per_second,
        peak_memory_bytes=_peak_memory(engine),
        layer_times=config.parallel.times if config.parallel.pipelined else (),
        stage_times=_stage_times(config.parallel, made.model.layout.sizes.num_layers),
        bytes_by_axis=traffic,
        predicted_bytes_by_axis=None if traffic is None else predicted_traffic(config),
        skipped_checkpoints=keeper.skipped,
    )
    if table is None:
        return TrainResult(metrics=metrics)
    values = {name: value.numpy() for name, value in whole_values(engine).items()}
    found = {spec.name: values[spec.name] for spec in table.specs}
    return TrainResult(metrics=metrics, table=table, parameters=table.flatten(found))


def _run(trainer: Trainer, keeper: Keeper, watch: Watch | None, stop: Stop | None) -> Trained:
    """Train to the end, or to SIGTERM, with checkpoints on the way and one at the end."""
    with ExitStack() as stack:
        if stop is not None:
            stop.begin()
        if watch is not None:
            stack.enter_context(watch)
            keeper.while_waiting(watch.alive)

        def after_step() -> bool:
            if watch is not None:
                watch.after_step()
            keeper.after_step(trainer)
            return stop is not None and stop.agreed()

        trained = trainer.run(after_step)
        keeper.save(trainer)
    return trained


def whole_values(engine: Engine) -> dict[str, torch.Tensor]:
    """All parameters and running statistics, whole, on every rank; a collective."""
    mine = {
        name: value.detach().cpu()
        for part in engine.parts.values()
        for name, value in part.named_buffers()
        if value.is_floating_point()
    }
    statistics = [mine]
    for group in data_groups(engine)[-1:] if engine.rank_model.parallel.pipelined else []:
        statistics = [{} for _ in range(group.size())]
        dist.all_gather_object(statistics, mine, group=group)
    return {name: value for part in statistics for name, value in part.items()} | engine.full_parameters()


def _stage_times(parallel: ParallelSettings, num_layers: int) -> tuple[float, ...]:
    """What its cut makes of each stage, where times were given or measured."""
    if not parallel.pipelined or not parallel.times:
        return ()
    return stage_times(num_layers, parallel.pipeline().num_stages, parallel.times)


def _peak_memory(engine: Engine) -> int:
    """Bytes of the rank that took most."""
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
    """(rank, world size) of the group that torchrun's environment describes; (0, 1) without one."""
    # torch's own timeout says less than the watchdog, and so comes later.
    if "RANK" not in os.environ:
        return nullcontext((0, 1))
    return process_group(2 * config.watch.hang_after_s, config.parallel.device)


def use_threads(environment: Mapping[str, str]) -> None:
    """One thread for each rank unless ``OMP_NUM_THREADS`` says otherwise; torch itself would take all cores."""
    if not environment.get(THREADS):
        torch.set_num_threads(1)


if __name__ == "__main__":
    use_threads(os.environ)
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: torch 2.13's gloo threads may still be there when C++ statics are destroyed, and then a rank
    # that has done all its work aborts ("terminate called without an active exception", 3 runs of 8).
    os._exit(status)
