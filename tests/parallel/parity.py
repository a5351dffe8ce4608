"""Trains the same job in one process and on several ranks, and writes the results as .npz files.

    python tests/parallel/parity.py FOLDER change|night

A program of its own, because it forks ranks after torch is imported. A fork takes a fifth of a second, a fresh start
seconds. Forking is safe only in a process in which autograd has never run.

The matrix of meshes is in ``matrix.py``. This program covers the loop around the step: an uneven last
batch of an epoch, evaluation, and resuming on another number of ranks. It also trains the demo's models
on the demo's mesh: convolutions that are cut, and matrices between them that are split.
"""

import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).parents[1]))

from parallel.hooks import EVALUATE_EVERY, FACTOR_RANKS, RECORD, collective_checks, powersgd_residuals, run_counted

from fanin.clients.data.digits import split_digits
from fanin.clients.data.examples import Examples
from fanin.commands.demo.options import DEFAULT_MESH
from fanin.commands.demo.steps import job_config
from fanin.commands.demo.tasks import TASKS
from fanin.datacenter.checkpoints.resumable import JobCheckpoints
from fanin.datacenter.config.communication import CommunicationSettings
from fanin.datacenter.config.rates import RateSettings
from fanin.datacenter.config.settings import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    StopSettings,
)
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.data.samples import DataSplit, ExampleSamples
from fanin.datacenter.jobs.job import full_values, train_rank
from fanin.datacenter.models.cnn import DigitsCnn
from fanin.datacenter.models.digits_app import smoothed_cross_entropy
from fanin.datacenter.models.fashion_app import FashionCnn
from fanin.datacenter.observers.events import Event, StepEnded, StepSettled
from fanin.datacenter.observers.observer import Observers
from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.engine import Engine, build_engine
from fanin.datacenter.parallel.objective import Objective, ScoredObjective, padded_objective
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.ranks.devices import build_mesh
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.training.loop import TrainingLoop
from fanin.datacenter.training.state import LoopStart
from fanin.edge.export.app.app import cross_entropy
from fanin.protos.errors import Corrupted, InvalidInput

NUM_STEPS, HALF_WAY = 20, 10
# The last of the batches of 12 has one of the 25 samples: parts are uneven, and some ranks have no sample.
NUM_EXAMPLES, BATCH = 25, 12
DTYPES = {"float32": torch.float32, "float64": torch.float64}
WORLDS = (1, 2, 3)
HOOKS = {
    "even": CommunicationSettings(),
    "fp16": CommunicationSettings(hook="fp16"),
    "fp16-turns": CommunicationSettings(hook="fp16"),
    "bf16": CommunicationSettings(hook="bf16"),
    "powersgd": CommunicationSettings(hook="powersgd", rank=2, dense_steps=4),
    "local": CommunicationSettings(local_period=4, dense_steps=4),
    # One local step, then the mean of the copies: averaging the gradients of each step, in another way.
    "each": CommunicationSettings(local_period=1, dense_steps=2),
}
ACCUMULATIONS = {"fp16-turns": 2}
# AdaScale's parts: the accumulation steps of all copies together, as many in each world.
NUM_PARTS = 6
DEMO: Mapping[str, tuple[Callable[[int], nn.Module], int]] = {
    "digits": (DigitsCnn, 8),
    "fashion-mnist": (FashionCnn, 28),
}
DEMO_CELLS = {
    "change": [("digits", "float64")],
    "night": [("digits", "float32"), ("fashion-mnist", "float32"), ("fashion-mnist", "float64")],
}
"""The demo's jobs in CI, and those that the nightly suite adds: model and type."""
DEMO_WORLDS = {1: MeshShape(), 4: MeshShape.parse(DEFAULT_MESH)}
# The demo's batches have 16 samples, so the last batch of an epoch is half full.
DEMO_EXAMPLES = 40


def config(num_ranks: int) -> TrainConfig:
    """Return the job. This program builds its model and data."""
    mesh = MeshShape(dp_replicate=num_ranks)
    return TrainConfig(
        model=ModelSettings(app="made:here"),
        data=DataSettings(examples=Path("made-here.npz")),
        training=TrainingSettings(batch_size=BATCH, learning_rate=0.05, optimizer="sgd"),
        stop=StopSettings(steps=NUM_STEPS),
        evaluation=EvaluationSettings(batch_size=num_ranks * 4),
        parallel=ParallelSettings(mesh=mesh),
        seed=7,
    )


def averaging_objective(num_ranks: int) -> Objective:
    """Return an objective with an error that parity must detect: it averages the means of the ranks."""
    objective = padded_objective(cross_entropy)

    def loss_sum(outputs: Tensor, targets: Tensor) -> Tensor:
        return objective.loss_sum(outputs, targets) / max(1, int(objective.count(targets))) * BATCH / num_ranks

    return Objective(loss_sum=loss_sum, count=objective.count)


def parts(num: int, dtype: torch.dtype) -> DataSplit:
    """Return some digits, which are training data and held-out data alike."""
    examples = split_digits(1, 1.0, 0).public.take(np.arange(num))
    samples = ExampleSamples(examples, dtype=dtype)
    return DataSplit(train=samples, held_out=samples)


def scored_engine(
    job: TrainConfig, mesh: DeviceMesh | None, dtype: torch.dtype, objective: Objective
) -> tuple[Engine, ScoredObjective]:
    """Return an engine and its scored objective."""
    scored = ScoredObjective(objective)
    module = DigitsCnn(seed=1, channels=(4, 4)).to(dtype)
    model = TrainableModel(module=module, layout=job.model.parallel_layout, objective=scored.objective)
    return build_engine(model, job.parallel, job.training, mesh), scored


def results(trainer: TrainingLoop) -> Mapping[str, np.ndarray]:
    """Return the results of a job."""
    history = trainer.history
    rows = [(each.step, each.train_loss, each.validation_loss, each.validation_accuracy) for each in history.evaluated]
    values = full_values(trainer.engine)
    return {
        "losses": np.array(history.losses),
        "evaluated": np.array(rows),
        "parameters": np.concatenate([value.numpy().ravel() for value in values.values()]),
    }


def resume(folder: Path, num_ranks: int, mesh: DeviceMesh | None) -> Mapping[str, np.ndarray]:
    """Resume the job on each number of ranks in turn. Each trains a part and leaves the rest to the next."""
    steps = NUM_STEPS if num_ranks == WORLDS[-1] else HALF_WAY + num_ranks
    job = replace(
        config(num_ranks),
        stop=StopSettings(steps=steps),
        checkpoints=CheckpointSettings(folder=folder / "checkpoints", every=4),
    )
    engine, scored = scored_engine(job, mesh, torch.float64, padded_objective(cross_entropy))
    is_first = mesh is None or dist.get_rank() == 0
    with JobCheckpoints(job.checkpoints, engine, job.seed, writes=is_first) as keeper:
        start = keeper.start(Observers())
        trainer = TrainingLoop(engine, scored, job, parts(NUM_EXAMPLES, torch.float64), start)
        keeper.follow(trainer, start.observers.publish)
        while trainer.state.step < steps:
            if trainer.step():
                trainer.record_evaluation()
            keeper.on(StepSettled(num_steps=trainer.state.step))
        keeper.save(trainer)
    return results(trainer)


def folder_errors(folder: Path, rank: int, mesh: DeviceMesh) -> Mapping[str, np.ndarray]:
    """Return the errors of one of two ranks whose folders differ.

    First one rank cannot write checkpoints. Then each rank reads a folder of its own. One has a checkpoint, and the
    other has none, or one that cannot be read.
    """
    job, errors = config(2), []
    engine, _ = scored_engine(job, mesh, torch.float64, padded_objective(cross_entropy))
    own_folder = folder / f"apart-{rank}"
    with JobCheckpoints(CheckpointSettings(folder=own_folder), engine, job.seed, writes=rank == 0) as keeper:
        keeper.save(
            TrainingLoop(engine, ScoredObjective(padded_objective(cross_entropy)), job, parts(BATCH, torch.float64))
        )
    if rank == 1:
        shutil.rmtree(own_folder)
    for case, place in enumerate((own_folder if rank == 0 else Path("/dev/null/apart"), own_folder, own_folder)):
        if rank == 1 and case == 2:
            (own_folder / "LATEST").write_text("{")
        try:
            JobCheckpoints(CheckpointSettings(folder=place), engine, job.seed, writes=False)
            errors.append("nothing")
        except (Corrupted, InvalidInput) as exc:
            errors.append(f"{type(exc).__name__}: {exc}")
    return {"told": np.array(errors)}


def offload_results(folder: Path) -> Mapping[str, np.ndarray]:
    """Return the losses (job, steps) of one process, and whether a process group was left.

    The jobs are a plain one, one with its parameters on the CPU, and a plain one that resumes from the checkpoint of
    the second.
    """
    examples, losses = split_digits(1, 1.0, 0).public, []
    np.savez(folder / "digits.npz", x=examples.inputs["x"], y=examples.y)
    for name, offload, steps in (("plain", False, 8), ("there", True, 6), ("there", False, 8)):
        job = replace(
            config(1),
            model=ModelSettings(app="fanin.datacenter.models.digits_app:app"),
            data=DataSettings(examples=folder / "digits.npz"),
            stop=StopSettings(steps=steps),
            parallel=ParallelSettings(offload=offload),
            checkpoints=CheckpointSettings(folder=folder / f"offload-{name}", every=3),
        )
        losses.append([*train_rank(job).metrics.trained.losses, 0.0, 0.0][:8])
    return {"losses": np.array(losses), "left": np.array(dist.is_initialized())}


def overflow(rank: int, mesh: DeviceMesh) -> Mapping[str, np.ndarray]:
    """Run two fp16 steps, the first with an overflow on one of two ranks; return skipped steps and parameters."""
    factors, objective = [0.0], padded_objective(cross_entropy)
    job = replace(config(2), parallel=ParallelSettings(mesh=MeshShape(dp_shard=2), precision="fp16"))
    scaled_objective = replace(
        objective, loss_sum=lambda outputs, targets: objective.loss_sum(outputs, targets) * factors[0]
    )
    engine, _ = scored_engine(job, mesh, torch.float32, scaled_objective)
    examples = split_digits(1, 1.0, 0).public.take(np.arange(BATCH).reshape(2, -1)[rank])
    batch, skipped = Batch(inputs=torch.from_numpy(examples.inputs["x"]), targets=torch.from_numpy(examples.y)), []
    values = [engine.full_parameters()]
    for factors[0] in (1e36 if rank == 1 else 1.0, 1.0):
        skipped.append(engine.step(batch).skipped)
        values.append(engine.full_parameters())
    rows = [np.concatenate([value.numpy().ravel() for value in row.values()]) for row in values]
    return {"skipped": np.array(skipped), "parameters": np.array(rows)}


class Gains:
    """An observer that keeps AdaScale's gains."""

    def __init__(self) -> None:
        self.values: list[float | None] = []

    def on(self, event: Event) -> None:
        if isinstance(event, StepEnded):
            self.values.append(event.gain)


def adascale_results(num_ranks: int, mesh: DeviceMesh | None) -> Mapping[str, np.ndarray]:
    """Train with AdaScale from a base batch of two samples; return the results and the gain of each step."""
    job = config(num_ranks)
    rate = RateSettings(scale="adascale", base_batch=BATCH // NUM_PARTS, warm_up=4, decay="cosine", floor=0.1)
    job = replace(job, rate=rate, training=replace(job.training, accumulate=NUM_PARTS // num_ranks))
    engine, scored = scored_engine(job, mesh, torch.float64, padded_objective(cross_entropy))
    gains = Gains()
    start = LoopStart(observers=Observers([gains]))
    trainer = TrainingLoop(engine, scored, job, parts(NUM_EXAMPLES, torch.float64), start)
    trainer.run()
    return {**results(trainer), "gains": np.array(gains.values)}


def work(folder: Path, rank: int, num_ranks: int) -> None:
    """Train all jobs of one world size on one rank, in one process group."""
    torch.set_num_threads(1)
    os.environ.update(RECORD)
    mesh = None
    if num_ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet{num_ranks}", rank=rank, world_size=num_ranks)
        mesh = build_mesh(MeshShape(dp_replicate=num_ranks), num_ranks)
    default_objective = padded_objective(cross_entropy)

    def run(name: str, job: TrainConfig, dtype: torch.dtype, objective: Objective = default_objective) -> None:
        engine, scored = scored_engine(job, mesh, dtype, objective)
        # Local steps exclude a batch of a single sample, which only one rank would have.
        num = BATCH * 2 if name in HOOKS else NUM_EXAMPLES
        trainer = TrainingLoop(engine, scored, job, parts(num, dtype))
        counts: Mapping[str, np.ndarray] = {}
        if name in HOOKS and mesh is not None:
            counts = run_counted(trainer, mesh, NUM_STEPS)
        else:
            trainer.run()
        np.savez(folder / f"{num_ranks}-{name}-{rank}.npz", **results(trainer), **counts)

    for name, dtype in DTYPES.items():
        run(name, config(num_ranks), dtype)
    np.savez(folder / f"{num_ranks}-resumed-{rank}.npz", **resume(folder, num_ranks, mesh))
    np.savez(folder / f"{num_ranks}-adascale-{rank}.npz", **adascale_results(num_ranks, mesh))
    if num_ranks == 1:
        np.savez(folder / "1-offloaded-0.npz", **offload_results(folder))
    if num_ranks == 3:
        np.savez(folder / f"3-spoken-{rank}.npz", **collective_checks())
    if num_ranks == 2:
        run("averaging", config(2), torch.float64, averaging_objective(2))
        assert mesh is not None
        np.savez(folder / f"2-apart-{rank}.npz", **folder_errors(folder, rank, mesh))
        np.savez(folder / f"2-overflow-{rank}.npz", **overflow(rank, build_mesh(MeshShape(dp_shard=2), 2)))
        for name, settings in HOOKS.items():
            job = replace(config(2), evaluation=replace(config(2).evaluation, every=EVALUATE_EVERY))
            job = replace(job, training=replace(job.training, accumulate=ACCUMULATIONS.get(name, 1)))
            run(name, replace(job, communication=settings), torch.float32)
        for name, factors in FACTOR_RANKS.items():
            np.savez(folder / f"2-kept-{name}-{rank}.npz", **powersgd_residuals(config(2), rank, mesh, factors))
    if num_ranks > 1:
        dist.destroy_process_group()


def noise(name: str) -> Examples:
    """Return random examples with the shapes of one of the demo's data sets."""
    generator, side = np.random.default_rng(3), DEMO[name][1]
    x = generator.random((DEMO_EXAMPLES, 1, side, side), np.float32)
    return Examples(inputs={"x": x}, y=generator.integers(0, 10, DEMO_EXAMPLES, np.int32))


def demonstrate(folder: Path, rank: int, num_ranks: int, suite: str) -> None:
    """Train some of the demo's jobs on one rank, with its models, layouts and settings, but for fewer steps."""
    torch.set_num_threads(1)
    shape, mesh = DEMO_WORLDS[num_ranks], None
    if num_ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/demo", rank=rank, world_size=num_ranks)
        mesh = build_mesh(shape, num_ranks)
    for name, precision in DEMO_CELLS[suite]:
        kind, dtype = DEMO[name][0], DTYPES[precision]
        job = job_config(TASKS[name], TASKS[name].pretrain, folder, shape, 7)
        job = replace(job, stop=StopSettings(steps=NUM_STEPS))
        scored, samples = (
            ScoredObjective(padded_objective(smoothed_cross_entropy)),
            ExampleSamples(noise(name), dtype=dtype),
        )
        model = TrainableModel(module=kind(1).to(dtype), layout=job.model.parallel_layout, objective=scored.objective)
        engine = build_engine(model, job.parallel, job.training, mesh)
        trainer = TrainingLoop(engine, scored, job, DataSplit(train=samples, held_out=samples))
        trainer.run()
        np.savez(folder / f"{num_ranks}-{name}-{precision}-{rank}.npz", **results(trainer))
    if num_ranks > 1:
        dist.destroy_process_group()


def main(arguments: Sequence[str]) -> int:
    """Run all world sizes, one after the other; return the number of ranks that failed."""
    folder, suite = Path(arguments[0]), arguments[1]
    fork = multiprocessing.get_context("fork")
    num_failed = 0
    loops = [(work, num) for num in WORLDS] if suite == "change" else []
    demos = [(partial(demonstrate, suite=suite), num) for num in DEMO_WORLDS]
    for target, num_ranks in (*loops, *demos):
        ranks = [fork.Process(target=target, args=(folder, rank, num_ranks)) for rank in range(num_ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            num_failed += process.exitcode != 0
    return num_failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
