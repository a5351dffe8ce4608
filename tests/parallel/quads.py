"""Trains small jobs on four ranks, and writes the observations of each rank as .npz files.

    python tests/parallel/quads.py FOLDER

A program of its own for the reason in ``parity.py``. All of its jobs share one process group.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from parallel.forks import run_ranks

from fanin.datacenter.checkpoints.weights import export_weights
from fanin.datacenter.config.communication import CommunicationSettings
from fanin.datacenter.config.settings import UNKNOWN_LAYOUT, LayoutSettings
from fanin.datacenter.families.decoders import decoder_layout
from fanin.datacenter.models.decoder import Decoder, DecoderConfig
from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.engine import Engine, build_engine
from fanin.datacenter.parallel.layout import Layout
from fanin.datacenter.parallel.objective import TOKENS, Objective, token_objective
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.parallel.torch_messages import silence_expected_messages
from fanin.datacenter.parallel.vocabulary import VocabularyShard
from fanin.datacenter.ranks.devices import build_mesh
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.training.communication import apply_communication
from fanin.datacenter.training.snapshot import restore, snapshot
from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.protos.errors import UnsupportedModel

NUM_RANKS, NUM_STEPS, BATCH, LENGTH, WIDTH = 4, 3, 8, 6, 8
CONFIG = DecoderConfig(vocabulary=16, width=WIDTH, num_layers=2, num_heads=2, num_kv_heads=2, feed_forward=16)
TRAINING = TrainingSettings(batch_size=BATCH, learning_rate=0.05, optimizer="sgd")
SKIP_SETTINGS = {
    "sharded": ParallelSettings(mesh=MeshShape(dp_replicate=2, dp_shard=2)),
    "cut-and-split": ParallelSettings(mesh=MeshShape(pp=2, tp=2), microbatches=2),
    "local": ParallelSettings(mesh=MeshShape(dp_replicate=4)),
}
HALF_SETTINGS = {
    "pipeline": ParallelSettings(mesh=MeshShape(pp=2, dp_shard=2), microbatches=2, precision="bf16"),
    "kept": ParallelSettings(mesh=MeshShape(dp_shard=4), reshard=False, precision="bf16"),
}
NAMES = LayoutSettings(layers="layers", num_layers=2, inputs=("embed",), outputs=("head",), plan={}).layout


class Shared(nn.Module):
    """An embedding that is also the head, and two layers of which each has the other's matrix."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.embed = nn.Embedding(CONFIG.vocabulary, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, CONFIG.vocabulary, bias=False)
        for value in self.parameters():
            nn.init.normal_(value, std=0.3, generator=generator)
        self.head.weight = self.embed.weight
        self.layers[1].weight = self.layers[0].weight
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.embed(tokens)
        for layer in self.layers:
            stream = stream + layer(stream).tanh()
        scores: Tensor = self.head(stream)
        return scores


def batch(engine: Engine) -> Batch:
    """Return this rank's part of the only batch."""
    tokens = torch.arange(BATCH * (LENGTH + 1)).reshape(BATCH, LENGTH + 1) ** 2 % CONFIG.vocabulary
    index, count = engine.share
    rank_tokens = tokens.chunk(count)[index]
    return Batch(inputs=rank_tokens[:, :-1], targets=rank_tokens[:, 1:])


def flat(engine: Engine) -> np.ndarray:
    """Return all parameters as one vector."""
    return np.concatenate([value.double().numpy().ravel() for value in engine.full_parameters().values()])


def decoder_engine(parallel: ParallelSettings, training: TrainingSettings, objective: Objective = TOKENS) -> Engine:
    mesh = build_mesh(parallel.mesh, NUM_RANKS)
    model = TrainableModel(module=Decoder(CONFIG, seed=1), layout=decoder_layout(CONFIG), objective=objective)
    return build_engine(model, parallel, training, mesh)


def step_results(name: str, rank: int) -> Mapping[str, np.ndarray]:
    """Train three steps. In the second, the gradients of the last rank's samples are not finite."""
    fault = [False]

    def loss_sum(outputs: Tensor, targets: Tensor) -> Tensor:
        loss = TOKENS.loss_sum(outputs, targets)
        return loss + (loss * 0.0).sqrt() if fault[0] and rank == NUM_RANKS - 1 else loss

    training = replace(TRAINING, max_skips=1)
    engine = decoder_engine(SKIP_SETTINGS[name], training, replace(TOKENS, loss_sum=loss_sum, sharded=None))
    if name == "local":
        apply_communication(engine.rank_model.runners[0], CommunicationSettings(local_period=4, dense_steps=2))
    rows, values = [], [flat(engine)]
    for step in range(3):
        fault[0] = step == 1
        result = engine.step(batch(engine))
        rows.append((result.skipped, np.isfinite(float(result.loss))))
        values.append(flat(engine))
    return {"skipped": np.array(rows), "moved": np.array([(new != old).any() for old, new in pairwise(values)])}


def evaluation_results(name: str, folder: Path) -> Mapping[str, np.ndarray]:
    """Return the parameters before an evaluation, and as they are read, written and restored after it."""
    engine = decoder_engine(HALF_SETTINGS[name], TRAINING)
    engine.step(batch(engine))
    before = engine.full_parameters()
    size = BATCH // HALF_SETTINGS[name].mesh.num_parts
    assert len(batch(engine).inputs) == size
    engine.evaluate(batch(engine))
    after = engine.full_parameters()
    engine.evaluate(batch(engine))
    best = snapshot(engine)
    export_weights(engine, folder / f"{name}.safetensors")
    dist.barrier()
    file_values = load_file(folder / f"{name}.safetensors")
    engine.step(batch(engine))
    engine.evaluate(batch(engine))
    restore(engine, best)
    restored_values = engine.full_parameters()
    engine.evaluate(batch(engine))
    engine.load_parameters({key: value / 2 for key, value in before.items()})
    loaded_values = engine.full_parameters()
    matches = [
        all(torch.equal(before[key], values[key]) and values[key].dtype == torch.float32 for key in before)
        for values in (after, file_values, restored_values, {key: value * 2 for key, value in loaded_values.items()})
    ]
    return {"same": np.array(matches)}


def shared_results(parallel: ParallelSettings, layout: Layout) -> Mapping[str, np.ndarray]:
    """Return the losses and parameters of a model with shared parameters, or the reason for its refusal."""
    mesh = None if parallel.mesh.num_ranks == 1 else build_mesh(parallel.mesh, NUM_RANKS)
    try:
        engine = build_engine(TrainableModel(module=Shared(), layout=layout), parallel, TRAINING, mesh)
    except UnsupportedModel as exc:
        return {"told": np.array(str(exc))}
    losses = [float(engine.step(batch(engine)).loss) for _ in range(NUM_STEPS)]
    return {"losses": np.array(losses), "parameters": flat(engine)}


SHARED = {
    "alone": (ParallelSettings(), UNKNOWN_LAYOUT),
    "dp_shard": (ParallelSettings(mesh=MeshShape(dp_shard=4)), UNKNOWN_LAYOUT),
    "layers": (ParallelSettings(mesh=MeshShape(dp_replicate=2, dp_shard=2)), NAMES),
    "ddp": (ParallelSettings(mesh=MeshShape(dp_replicate=4)), UNKNOWN_LAYOUT),
    "pp": (ParallelSettings(mesh=MeshShape(pp=2, dp_shard=2), microbatches=2), NAMES),
    "tp": (ParallelSettings(mesh=MeshShape(dp_shard=2, tp=2)), NAMES),
}


def split_logits(vocabulary: int, dtype: torch.dtype) -> Mapping[str, np.ndarray]:
    """Return loss, gradient and predictions of logits that are split over all ranks, and of the whole logits."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(3, 5, vocabulary, generator=generator, dtype=torch.float64) * 5).to(dtype)
    # Some logits are equal: the first token is predicted.
    logits[0, 0] = 1.0
    targets = torch.randint(0, vocabulary, (3, 5), generator=generator)
    targets[0, :3] = targets[1] = NO_TOKEN
    shard = VocabularyShard.of(dist.group.WORLD, vocabulary)
    shard_slice = slice(shard.first, shard.first + shard.size)
    outcome = {}
    for unit in ("tokens", "samples"):
        objective = token_objective(over_samples=unit == "samples")
        assert objective.sharded is not None
        for name, part, variant in (
            ("whole", logits, objective),
            ("split", logits[..., shard_slice], objective.sharded(shard)),
        ):
            values = part.detach().clone().requires_grad_()
            loss = variant.loss_sum(values, targets)
            torch.autograd.backward(loss)
            gradient = values.grad[..., shard_slice] if name == "whole" else values.grad
            outcome |= {
                f"{name}-{unit}-loss": loss.detach().double().numpy(),
                f"{name}-{unit}-gradient": gradient.double().numpy(),
                f"{name}-{unit}-predictions": variant.predict(part).numpy(),
            }
    return outcome


SPLIT = {
    f"{str(dtype).removeprefix('torch.')}-{size}": (size, dtype)
    for size in (16, 13, 2)
    for dtype in (torch.float32, torch.float64, torch.bfloat16)
}


def work(folder: Path, rank: int) -> None:
    """Run all jobs on one rank."""
    torch.set_num_threads(1)
    silence_expected_messages()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=NUM_RANKS)
    for name in SKIP_SETTINGS:
        np.savez(folder / f"broken-{name}-{rank}.npz", **step_results(name, rank))
    for name in HALF_SETTINGS:
        np.savez(folder / f"half-{name}-{rank}.npz", **evaluation_results(name, folder))
    for name, (parallel, layout) in SHARED.items():
        np.savez(folder / f"shared-{name}-{rank}.npz", **shared_results(parallel, layout))
    for name, (vocabulary, dtype) in SPLIT.items():
        np.savez(folder / f"split-{name}-{rank}.npz", **split_logits(vocabulary, dtype))
    dist.destroy_process_group()


def main(arguments: Sequence[str]) -> int:
    """Run all ranks, and return the number that failed."""
    folder = Path(arguments[0])
    return run_ranks(work, NUM_RANKS, folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
