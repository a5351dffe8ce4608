"""Counts the traffic of one step of jobs of four ranks, and writes it as JSON.

    python tests/parallel/traffic.py FOLDER first|all

A program of its own for the reason in ``parity.py``. ``RANK.json`` maps each cell to ``counts`` and ``debug``.
``counts`` maps "axis kind" to [calls, bytes]. ``debug`` maps an operator to its calls in torch's CommDebugMode.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))

from parallel.forks import run_ranks

from fanin.datacenter.families.decoders import decoder_layout
from fanin.datacenter.models.decoder import Decoder, DecoderConfig
from fanin.datacenter.network.counters import ByteCounter, make_visible
from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.engine import build_engine
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.parallel.torch_messages import silence_expected_messages
from fanin.datacenter.planner.facts import decoder_facts
from fanin.datacenter.planner.spread import Job
from fanin.datacenter.ranks.devices import build_mesh
from fanin.datacenter.ranks.mesh import MeshShape

NUM_RANKS: Final = 4
BATCH, LENGTH = 16, 8
CONFIG: Final = DecoderConfig(vocabulary=48, width=32, num_layers=4, num_heads=4, num_kv_heads=4, feed_forward=40)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficCell:
    """A job of four ranks."""

    mesh: str
    model: dict[str, object] = field(default_factory=dict)
    parallel: dict[str, object] = field(default_factory=dict)
    training: dict[str, object] = field(default_factory=dict)

    @property
    def config(self) -> DecoderConfig:
        """The config of the decoder."""
        return replace(CONFIG, **self.model)

    def job(self) -> Job:
        """Return the planner's input."""
        return Job(
            facts=decoder_facts("cell", self.config),
            parallel=ParallelSettings(mesh=MeshShape.parse(self.mesh), **self.parallel),
            training=TrainingSettings(batch_size=BATCH, learning_rate=0.01, **self.training),
            sequence=LENGTH,
        )


UNEVEN, TIED, CLIP, HALF, TWO = (
    {"vocabulary": 49, "feed_forward": 42},
    {"tied": True},
    {"clip_norm": 1.0},
    {"precision": "bf16"},
    {"microbatches": 2},
)
SPLIT: Final = {"sequence_parallel": True}
CELLS: Final[dict[str, TrafficCell]] = {
    "tensor": TrafficCell(mesh="tp=4"),
    "tensor, few key heads": TrafficCell(mesh="tp=4", model={"num_kv_heads": 2}, parallel=TWO, training=CLIP),
    "tensor, recompute": TrafficCell(mesh="tp=4", parallel={"recompute": "full"}),
    "tensor, selective": TrafficCell(mesh="tp=4", parallel={"recompute": "selective"}),
    "tensor, bf16": TrafficCell(mesh="tp=4", parallel=HALF),
    "sequence": TrafficCell(mesh="tp=4", parallel=SPLIT, training=CLIP),
    "sequence, few key heads": TrafficCell(mesh="tp=4", model={"num_kv_heads": 2}, parallel=SPLIT | TWO, training=CLIP),
    "sequence, recompute": TrafficCell(mesh="tp=4", model={"tied": True}, parallel=SPLIT | {"recompute": "full"}),
    "sequence, selective": TrafficCell(mesh="tp=4", parallel=SPLIT | {"recompute": "selective"}),
    "sequence, bf16": TrafficCell(mesh="tp=4", parallel=SPLIT | HALF),
    "sequence and shard, bf16": TrafficCell(
        mesh="dp_shard=2,tp=2", parallel=SPLIT | HALF, training={"accumulate": 2, **CLIP}
    ),
    "sequence and replicate": TrafficCell(mesh="dp_replicate=2,tp=2", parallel=SPLIT),
    "sequence and pipeline": TrafficCell(mesh="pp=2,tp=2", model={"tied": True}, parallel=SPLIT | TWO, training=CLIP),
    "sequence and pipeline, bf16": TrafficCell(mesh="pp=2,tp=2", parallel=SPLIT | HALF | TWO | {"recompute": "full"}),
    "sequence, folded": TrafficCell(
        mesh="pp=2,tp=2", parallel=SPLIT | TWO | {"schedule": "ZBV"}, training={"accumulate": 2}
    ),
    "shard": TrafficCell(mesh="dp_shard=4"),
    "shard, kept": TrafficCell(mesh="dp_shard=4", parallel={"reshard": False, **TWO}),
    "shard, uneven": TrafficCell(mesh="dp_shard=4", model=UNEVEN, training={"accumulate": 2, **CLIP}),
    "shard, bf16, tied": TrafficCell(mesh="dp_shard=4", model=TIED, parallel=HALF),
    "hybrid": TrafficCell(mesh="dp_replicate=2,dp_shard=2", training=CLIP),
    "replicate": TrafficCell(mesh="dp_replicate=4", training={"accumulate": 2, **CLIP}),
    "replicate by hybrid": TrafficCell(mesh="dp_replicate=4", parallel={"replicate": "hsdp"}),
    "shard and tensor": TrafficCell(mesh="dp_shard=2,tp=2", model={"num_kv_heads": 1}, training=CLIP),
    "shard and tensor, bf16": TrafficCell(mesh="dp_shard=2,tp=2", parallel=HALF),
    "replicate and tensor": TrafficCell(mesh="dp_replicate=2,tp=2"),
    "pipeline": TrafficCell(mesh="pp=4", parallel={"microbatches": 4}, training={"accumulate": 2}),
    "pipeline and shard": TrafficCell(
        mesh="pp=2,dp_shard=2", model=TIED, parallel=TWO, training={"accumulate": 2, **CLIP}
    ),
    "pipeline and shard, given back": TrafficCell(
        mesh="pp=2,dp_shard=2", parallel={"reshard": True, "microbatches": 4}
    ),
    "pipeline and shard, bf16": TrafficCell(mesh="pp=2,dp_shard=2", parallel=HALF | TWO),
    "pipeline and tensor": TrafficCell(mesh="pp=2,tp=2", model=TIED, parallel=TWO, training=CLIP),
    "pipeline and tensor, bf16": TrafficCell(mesh="pp=2,tp=2", parallel=HALF | TWO | {"recompute": "full"}),
    "pipeline and replicate": TrafficCell(mesh="pp=2,dp_replicate=2", parallel=TWO, training={"accumulate": 2}),
    "interleaved": TrafficCell(
        mesh="pp=2,tp=2", model=TIED, parallel={"schedule": "Interleaved1F1B", "microbatches": 4}
    ),
    "interleaved, shard": TrafficCell(mesh="pp=2,dp_shard=2", parallel={"schedule": "Interleaved1F1B"} | TWO),
    "zero bubble, tensor": TrafficCell(mesh="pp=2,tp=2", parallel={"schedule": "InterleavedZeroBubble"} | TWO),
    "zero bubble, recompute": TrafficCell(
        mesh="pp=2,tp=2", parallel={"schedule": "InterleavedZeroBubble", "recompute": "full"} | TWO
    ),
    "sequence, folded, recompute": TrafficCell(
        mesh="pp=2,tp=2", parallel=SPLIT | TWO | {"schedule": "ZBV", "recompute": "full"}
    ),
    "folded, tied": TrafficCell(mesh="pp=2,tp=2", model=TIED, parallel={"schedule": "ZBV"} | TWO),
}


FIRST: Final = ("tensor", "sequence", "shard", "pipeline and tensor")
"""Cells that CI counts."""


def cells_of(suite: str) -> dict[str, TrafficCell]:
    """Return the cells of a run."""
    return CELLS if suite == "all" else {name: CELLS[name] for name in FIRST}


def work(folder: Path, suite: str, rank: int) -> None:
    """Run all cells on one rank, in one process group."""
    torch.set_num_threads(1)
    silence_expected_messages()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=NUM_RANKS)
    results = {name: run(cell) for name, cell in cells_of(suite).items()}
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(results))


def run(cell: TrafficCell) -> dict[str, dict[str, object]]:
    """Return the traffic of the third step of a job, when all setup is done."""
    job = cell.job()
    mesh = build_mesh(job.parallel.mesh, NUM_RANKS)
    model = TrainableModel(module=Decoder(cell.config), layout=decoder_layout(cell.config))
    engine = build_engine(model, job.parallel, job.training, mesh)
    for runner in engine.rank_model.runners.values():
        if isinstance(runner, DistributedDataParallel):
            make_visible(runner)
    index, count = engine.share
    tokens = torch.randint(0, CONFIG.vocabulary, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    rank_tokens = tokens.chunk(count)[index]
    batch = Batch(inputs=rank_tokens[:, :-1], targets=rank_tokens[:, 1:])
    for _ in range(2):
        engine.step(batch, BATCH * LENGTH)
    with ByteCounter(mesh) as counter:
        engine.step(batch, BATCH * LENGTH)
    debug_calls = {}
    # torch's own counter ignores pipelines, and miscounts a module that runs twice in a step.
    if job.num_chunks == 1 and not job.parallel.pipelined:
        with CommDebugMode() as debug:
            engine.step(batch, BATCH * LENGTH)
        debug_calls = {str(operator): calls for operator, calls in debug.get_comm_counts().items()}
    counts = {" ".join(key): [amount.num_calls, amount.size_bytes] for key, amount in counter.counts.items()}
    return {"counts": counts, "debug": debug_calls}


def main(arguments: Sequence[str]) -> int:
    """Run all ranks, and return the number that failed."""
    folder, suite = Path(arguments[0]), arguments[1]
    return run_ranks(work, NUM_RANKS, folder, suite)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
