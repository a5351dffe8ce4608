"""Trains the same job on one process and on several ranks, and leaves what came out as .npz files.

    python tests/parallel/parity.py FOLDER

A program of its own: ranks are forked after torch is imported (a fifth of a second, where a fresh start costs
seconds), and forking is safe only where autograd has never run. The matrix of meshes is in ``matrix.py``; here it is
the loop around the step: the last batch of an epoch that nobody can share out, evaluation, going on elsewhere.
"""

import multiprocessing
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fanin.clients.digits import split_digits
from fanin.datacenter.communication import CommunicationSettings
from fanin.datacenter.config import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    StopSettings,
    TrainConfig,
)
from fanin.datacenter.devices import build_mesh
from fanin.datacenter.job import whole_values
from fanin.datacenter.keeping import Keeper
from fanin.datacenter.mesh import MeshShape
from fanin.datacenter.models.cnn import DigitsCnn
from fanin.datacenter.objectives import Scored, filled_objective
from fanin.datacenter.parallel.build import Model
from fanin.datacenter.parallel.engine import Engine, build_engine
from fanin.datacenter.parallel.objective import Objective
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.samples import ExampleSamples
from fanin.datacenter.trainer import Parts, Trainer
from fanin.edge.export.app import cross_entropy

NUM_STEPS, HALF_WAY = 20, 10
# 25 samples in batches of 12 end in a batch of one: uneven parts, and ranks without a sample.
NUM_EXAMPLES, BATCH = 25, 12
DTYPES = {"float32": torch.float32, "float64": torch.float64}
WORLDS = (1, 2, 3)
HOOKS = {
    "even": CommunicationSettings(),
    "fp16": CommunicationSettings(hook="fp16"),
    "bf16": CommunicationSettings(hook="bf16"),
    "powersgd": CommunicationSettings(hook="powersgd", rank=2, dense_steps=4),
    "local": CommunicationSettings(local_period=4, dense_steps=4),
}


def config(num_ranks: int) -> TrainConfig:
    """The job; its model and data are made here."""
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


def averaging(num_ranks: int) -> Objective:
    """What parity must catch: each rank takes the mean of its own samples, and the means are averaged."""
    right = filled_objective(cross_entropy)

    def loss_sum(outputs: Tensor, targets: Tensor) -> Tensor:
        return right.loss_sum(outputs, targets) / max(1, int(right.count(targets))) * BATCH / num_ranks

    return Objective(loss_sum=loss_sum, count=right.count)


def parts(num: int, dtype: torch.dtype) -> Parts:
    """Some digits, which are held out from nobody."""
    examples = split_digits(1, 1.0, 0).public.take(np.arange(num))
    samples = ExampleSamples(examples, dtype=dtype)
    return Parts(train=samples, held_out=samples)


def scored_engine(
    job: TrainConfig, mesh: DeviceMesh | None, dtype: torch.dtype, objective: Objective
) -> tuple[Engine, Scored]:
    """An engine, and the objective that counts for it."""
    scored = Scored(objective)
    module = DigitsCnn(seed=1, channels=(4, 4)).to(dtype)
    model = Model(module=module, layout=job.model.parallel_layout, objective=scored.objective)
    return build_engine(model, job.parallel, job.training, mesh), scored


def found(trainer: Trainer) -> Mapping[str, np.ndarray]:
    """What a job came to."""
    trained = trainer.trained
    rows = [(each.step, each.train_loss, each.validation_loss, each.validation_accuracy) for each in trained.evaluated]
    values = whole_values(trainer.engine)
    return {
        "losses": np.array(trained.losses),
        "evaluated": np.array(rows),
        "parameters": np.concatenate([value.numpy().ravel() for value in values.values()]),
    }


def go_on(folder: Path, num_ranks: int, mesh: DeviceMesh | None) -> Mapping[str, np.ndarray]:
    """The job again, each world doing a part of it and leaving the rest to the next."""
    steps = NUM_STEPS if num_ranks == WORLDS[-1] else HALF_WAY + num_ranks
    job = replace(
        config(num_ranks),
        stop=StopSettings(steps=steps),
        checkpoints=CheckpointSettings(folder=folder / "checkpoints", every=4),
    )
    engine, scored = scored_engine(job, mesh, torch.float64, filled_objective(cross_entropy))
    first = mesh is None or dist.get_rank() == 0
    with Keeper(job.checkpoints, engine, job.seed, writes=first) as keeper:
        trainer = Trainer(engine, scored, job, parts(NUM_EXAMPLES, torch.float64), keeper.state)
        trainer.remember(keeper.losses, keeper.evaluated)
        while trainer.state.step < steps:
            if trainer.step():
                trainer.look()
            keeper.after_step(trainer)
        keeper.save(trainer)
    return found(trainer)


def work(folder: Path, rank: int, num_ranks: int) -> None:
    """All cells of one world size on one rank; one process group for all of them."""
    torch.set_num_threads(1)
    mesh = None
    if num_ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet{num_ranks}", rank=rank, world_size=num_ranks)
        mesh = build_mesh(MeshShape(dp_replicate=num_ranks), num_ranks)
    right = filled_objective(cross_entropy)

    def run(name: str, job: TrainConfig, dtype: torch.dtype, objective: Objective = right) -> None:
        engine, scored = scored_engine(job, mesh, dtype, objective)
        # Local steps and a batch of a single sample do not go together: it is one rank's alone.
        num = BATCH * 2 if name in HOOKS else NUM_EXAMPLES
        trainer = Trainer(engine, scored, job, parts(num, dtype))
        trainer.run()
        np.savez(folder / f"{num_ranks}-{name}-{rank}.npz", **found(trainer))

    for name, dtype in DTYPES.items():
        run(name, config(num_ranks), dtype)
    np.savez(folder / f"{num_ranks}-resumed-{rank}.npz", **go_on(folder, num_ranks, mesh))
    if num_ranks == 2:
        run("averaging", config(2), torch.float64, averaging(2))
        for name, settings in HOOKS.items():
            evaluation = replace(config(2).evaluation, every=4)
            run(name, replace(config(2), communication=settings, evaluation=evaluation), torch.float32)
    if num_ranks > 1:
        dist.destroy_process_group()


def main(folder: Path) -> int:
    """All world sizes, one after the other; the number of ranks that failed."""
    fork = multiprocessing.get_context("fork")
    failed = 0
    for num_ranks in WORLDS:
        ranks = [fork.Process(target=work, args=(folder, rank, num_ranks)) for rank in range(num_ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            failed += process.exitcode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
