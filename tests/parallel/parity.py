"""Trains the same steps on one process and on several ranks, and leaves what came out as .npz files.

    python tests/parallel/parity.py FOLDER

A program of its own: ranks are forked after torch is imported (a fifth of a second, where a fresh start costs
seconds), and forking is safe only where autograd has never run.
"""

import multiprocessing
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fanin.clients.data import Examples
from fanin.datacenter.jobfiles import TrainSettings
from fanin.datacenter.mesh import MeshShape, build_mesh
from fanin.datacenter.models.cnn import DigitsCnn
from fanin.datacenter.trainer import Trainer, fit
from fanin.edge.export.app import cross_entropy

NUM_STEPS = 20
# 31 samples in batches of 15 end in a batch of one: uneven shards, and ranks without a sample.
NUM_EXAMPLES, SETTINGS = 31, TrainSettings(learning_rate=0.05, batch_size=15, max_epochs=3, seed=7)
DTYPES = {"float32": torch.float32, "float64": torch.float64}
WORLDS = (1, 2, 3)


class AveragingTrainer(Trainer):
    """What parity must catch: each rank takes the mean of its own samples, and the means are averaged."""

    def _losses(self, batch: Examples) -> Tensor:
        losses = super()._losses(batch)
        return losses * (len(batch) / (max(1, len(losses)) * self._num_ranks))


def data() -> Examples:
    """Noise and labels."""
    rng = np.random.default_rng(3)
    return Examples(x=rng.random((NUM_EXAMPLES, 1, 8, 8), np.float32), y=rng.integers(0, 10, NUM_EXAMPLES, np.int32))


def run(kind: type[Trainer], dtype: str, mesh: DeviceMesh | None, rank: int) -> dict[str, np.ndarray]:
    """The losses and parameters of some steps and then of a fit."""
    # Each rank begins elsewhere: the trainer has to bring them together.
    module = DigitsCnn(seed=rank, channels=(4, 4)).to(DTYPES[dtype])
    trainer, examples = kind(module, cross_entropy, SETTINGS, mesh), data()
    losses = []
    for step in range(NUM_STEPS):
        start = step % 3 * SETTINGS.batch_size
        batch = examples.take(np.arange(start, min(start + SETTINGS.batch_size, NUM_EXAMPLES)))
        losses.append(float(trainer.add_up(trainer.step(batch))))
    after_steps = vector(module)
    trained = fit(trainer, examples, examples, SETTINGS)
    return {
        "losses": np.array(losses),
        "after_steps": after_steps,
        "after_fit": vector(module),
        "epochs": np.array([(epoch.train_loss, epoch.validation_loss) for epoch in trained.epochs]),
    }


def vector(module: torch.nn.Module) -> np.ndarray:
    """All parameters in their own precision."""
    return np.concatenate([value.detach().numpy().ravel() for value in module.parameters()])


def work(folder: Path, rank: int, num_ranks: int) -> None:
    """All cells of one world size on one rank; one process group for all of them."""
    torch.set_num_threads(1)
    mesh = None
    if num_ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet{num_ranks}", rank=rank, world_size=num_ranks)
        mesh = build_mesh(MeshShape(dp_replicate=num_ranks), num_ranks)
    for dtype in DTYPES:
        np.savez(folder / f"{num_ranks}-{dtype}-{rank}.npz", **run(Trainer, dtype, mesh, rank))
    if num_ranks == 2:
        np.savez(folder / f"averaging-{rank}.npz", **run(AveragingTrainer, "float64", mesh, rank))
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
