"""Measures the peak memory of a rank with torch's own tracker, and compares it with the planner's formula.

    python tests/parallel/memory.py FILE first|small|large

A program of its own: tensors are fake, and so is the process group, of which a process can have one. FILE becomes
a JSON object that maps each cell to [tracked, predicted] bytes. The peak excludes the optimizer's step, because the
tracker counts its temporary memory as state.
"""

import json
import multiprocessing
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from fanin.datacenter.families.decoders import decoder_layout
from fanin.datacenter.models.decoder import Decoder, DecoderConfig
from fanin.datacenter.parallel.build import TrainableModel, build
from fanin.datacenter.parallel.objective import TOKENS
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.planner.facts import decoder_facts
from fanin.datacenter.planner.memory import predict_memory
from fanin.datacenter.planner.spread import Job
from fanin.datacenter.ranks.devices import build_mesh
from fanin.datacenter.ranks.mesh import MeshShape

SMALL: Final = DecoderConfig(vocabulary=512, width=256, num_layers=4, num_heads=8, num_kv_heads=4, feed_forward=704)
LARGE: Final = DecoderConfig(
    vocabulary=128_256, width=4096, num_layers=32, num_heads=32, num_kv_heads=8, feed_forward=14_336
)
SHALLOW: Final = replace(LARGE, num_layers=8)
"""Tracking takes half a second a layer, so the cells that vary a complete model have a quarter of its layers."""

SPLIT: Final = {"sequence_parallel": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCell:
    """A job with ``samples`` samples of ``length`` tokens in a chunk, and the pipeline rank that is measured."""

    mesh: str
    config: DecoderConfig = SMALL
    samples: int = 2
    length: int = 128
    rank: int = 0
    settings: dict[str, object] = field(default_factory=dict)

    def job(self) -> Job:
        """Return the planner's input."""
        parallel = ParallelSettings(mesh=MeshShape.parse(self.mesh), **self.settings)
        batch = parallel.mesh.num_parts * parallel.microbatches * self.samples
        training = TrainingSettings(batch_size=batch, learning_rate=1e-3)
        return Job(facts=decoder_facts("cell", self.config), parallel=parallel, training=training, sequence=self.length)


CELLS: Final[dict[str, dict[str, MemoryCell]]] = {
    "first": {
        "first stage": MemoryCell(mesh="pp=2,dp_shard=2", settings={"microbatches": 4}),
    },
    "small": {
        "sharded": MemoryCell(mesh="dp_shard=4"),
        "alone over tp": MemoryCell(mesh="tp=4"),
        "sharded, few tokens": MemoryCell(mesh="dp_shard=4", samples=1, length=32),
        "sharded, kept": MemoryCell(mesh="dp_shard=4", settings={"reshard": False}),
        "sharded, full recompute": MemoryCell(mesh="dp_shard=4", settings={"recompute": "full"}),
        "sharded, selective recompute": MemoryCell(mesh="dp_shard=4", settings={"recompute": "selective"}),
        "sharded, bf16": MemoryCell(mesh="dp_shard=4", settings={"precision": "bf16"}),
        "sharded over tp, bf16": MemoryCell(
            mesh="dp_shard=2,tp=2", settings={"precision": "bf16", "recompute": "full"}
        ),
        "sequence over tp": MemoryCell(mesh="tp=4", settings=SPLIT),
        "sequence over tp, full recompute": MemoryCell(mesh="tp=4", samples=8, settings=SPLIT | {"recompute": "full"}),
        "sequence over tp, selective recompute": MemoryCell(
            mesh="dp_shard=2,tp=2", settings=SPLIT | {"precision": "bf16", "recompute": "selective"}
        ),
        "sequence over tp, first stage": MemoryCell(mesh="pp=2,tp=2", settings=SPLIT | {"microbatches": 4}),
        "sequence over tp, last stage": MemoryCell(mesh="pp=2,tp=2", rank=1, settings=SPLIT | {"microbatches": 4}),
        "turns": MemoryCell(mesh="dp_shard=4", settings={"microbatches": 3}),
        # With fewer layers, the formula is 11 % below: the logits are most of the memory.
        "last stage": MemoryCell(
            mesh="pp=2,tp=2", rank=1, config=replace(SMALL, num_layers=8), settings={"microbatches": 4}
        ),
        "all at once": MemoryCell(mesh="pp=2,tp=2", settings={"microbatches": 3, "schedule": "GPipe"}),
    },
    "large": {
        "8 B, 64 shards": MemoryCell(mesh="dp_shard=64", config=LARGE, length=2048, settings={"precision": "bf16"}),
        "8 layers, 64 shards, full recompute": MemoryCell(
            mesh="dp_shard=64", config=SHALLOW, length=2048, settings={"precision": "bf16", "recompute": "full"}
        ),
        "8 layers, 8 shards over tp 8": MemoryCell(
            mesh="dp_shard=8,tp=8", config=SHALLOW, length=2048, settings={"precision": "bf16"}
        ),
        "8 layers, 8 shards, sequence over tp 8": MemoryCell(
            mesh="dp_shard=8,tp=8", config=SHALLOW, length=2048, settings=SPLIT | {"precision": "bf16"}
        ),
        "8 B, first of four stages, sequence over tp 4": MemoryCell(
            mesh="pp=4,dp_shard=4,tp=4",
            config=LARGE,
            length=2048,
            settings=SPLIT | {"precision": "bf16", "microbatches": 4},
        ),
    },
}


class StageSchedule:
    """The chunks of one stage, in the order of its schedule."""

    def __init__(self, runner: nn.Module, job: Job, rank: int, tracker: MemTracker) -> None:
        self.runner, self.job, self.rank, self.tracker = runner, job, rank, tracker
        self.first, self.last = rank == 0, rank == job.parallel.mesh.pp - 1
        self.queue: list[Tensor] = []

    def run(self) -> None:
        """Run all forward and backward passes of a step."""
        parallel, num = self.job.parallel, self.job.num_chunks
        num_warm_up = num if parallel.schedule == "GPipe" else min(num, parallel.mesh.pp - self.rank)
        for _ in range(num_warm_up):
            self.forward()
        for index in range(num):
            self.backward(last=index == num - 1)
            if index + num_warm_up < num:
                self.forward()

    def forward(self) -> None:
        """Run the forward pass of one chunk, and queue its loss or the output for the next stage."""
        # The tracker registers a module only once unless it is reset.
        self.tracker.reset_mod_stats()
        samples = self.job.chunk_tokens // self.job.sequence
        shape = (samples, self.job.sequence)
        tokens = torch.zeros(shape, dtype=torch.long)
        dtype = torch.bfloat16 if self.job.stream_bytes == 2 else torch.float32
        stream_shape = (samples, self.job.stream_tokens // samples, self.job.facts.width)
        stream = torch.zeros(*stream_shape, dtype=dtype, requires_grad=True)
        outputs = self.runner(tokens if self.first else stream)
        self.queue.append(TOKENS.loss_sum(outputs, tokens) / 7 if self.last else outputs)
        self.outputs = outputs if self.last else None

    def backward(self, *, last: bool) -> None:
        """Run the backward pass of the chunk that has waited longest."""
        value = self.queue.pop(0)
        if isinstance(self.runner, FSDPModule):
            self.runner.set_requires_gradient_sync(last)
            if self.job.parallel.pipelined:
                self.runner.set_is_last_backward(last)
                self.runner.set_reshard_after_backward(last or self.job.parallel.reshards)
        value.backward(None if self.last else torch.ones_like(value))


def tracked_peak(cell: MemoryCell) -> int:
    """Return the tracker's peak in the forward and backward passes of a second step."""
    job = cell.job()
    world = job.parallel.mesh.num_ranks
    rank = cell.rank * world // job.parallel.mesh.pp
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    mesh = build_mesh(job.parallel.mesh, world)
    with torch.device("meta"):
        module = Decoder(cell.config)
    # On meta and outside the fake mode, because the code of meshes needs real numbers.
    model = TrainableModel(module=module, layout=decoder_layout(cell.config))
    rank_model = build(model, job.parallel, job.training, mesh, torch.device("meta"))
    part = rank_model.parts[cell.rank]
    with FakeTensorMode(allow_non_fake_inputs=True):
        part.to_empty(device="cpu")
        optimizer = torch.optim.AdamW(part.parameters(), foreach=False)
        if isinstance(part, FSDPModule):
            tracker: MemTracker = FSDPMemTracker(part, optimizer)
            tracker.track_inputs(())
        else:
            tracker = MemTracker()
            tracker.track_external(part, optimizer)
        schedule = StageSchedule(rank_model.runners[cell.rank], job, cell.rank, tracker)
        with tracker:
            schedule.run()
            optimizer.step()
            optimizer.zero_grad()
        tracker._peak_mem, tracker._peak_mem_snap = {}, {}
        with tracker:
            schedule.run()
        (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    dist.destroy_process_group()
    return int(snapshot["Total"])


def main(arguments: Sequence[str]) -> int:
    """Measure all cells of one size."""
    # torch's tracker uses functions that torch itself has deprecated.
    warnings.simplefilter("ignore")
    cells = CELLS[arguments[1]]
    # One process for each cell: DTensor keeps the groups of a mesh, and the groups of an earlier cell no longer exist.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        peaks = pool.map(tracked_peak, cells.values(), chunksize=1)
    results = {
        name: [peak, predict_memory(cell.job(), cell.rank).total]
        for (name, cell), peak in zip(cells.items(), peaks, strict=True)
    }
    Path(arguments[0]).write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
