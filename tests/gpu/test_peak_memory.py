"""The planner's formula of memory, compared with what torch's allocator of a GPU gives out."""

import gc
from dataclasses import dataclass, field

import pytest
import torch

from fanin.datacenter.families.decoders import PRESETS, decoder_layout
from fanin.datacenter.models.decoder import Decoder
from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.engine import Engine, build_engine
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.planner.facts import decoder_facts
from fanin.datacenter.planner.memory import predict_memory
from fanin.datacenter.planner.spread import Job
from fanin.datacenter.ranks.devices import build_mesh, rank_device
from fanin.datacenter.ranks.elastic import group_of_one
from fanin.datacenter.ranks.mesh import MeshShape

GPU = torch.device("cuda", 0)
LENGTH = 2048
TOLERANCE = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A preset, the samples of its step, and what differs from bf16 without recomputation."""

    size: str = "350m"
    samples: int = 4
    sharded: bool = False
    settings: dict[str, object] = field(default_factory=dict)

    def parallel(self) -> ParallelSettings:
        mesh = {"mesh": MeshShape.parse("dp_shard=1")} if self.sharded else {}
        return ParallelSettings(**{"precision": "bf16"} | self.settings | mesh)

    def training(self) -> TrainingSettings:
        return TrainingSettings(batch_size=self.samples, learning_rate=1e-4, clip_norm=1.0)


COURSES = {
    "125m": Course(size="125m"),
    "125m, full recompute": Course(size="125m", settings={"recompute": "full"}),
    "125m, selective recompute": Course(size="125m", settings={"recompute": "selective"}),
    "350m": Course(),
    "350m, full recompute": Course(settings={"recompute": "full"}),
    "350m, selective recompute": Course(settings={"recompute": "selective"}),
    "350m, float32": Course(settings={"precision": "full"}),
    "350m, fp16": Course(settings={"precision": "fp16"}),
    "350m, sharded": Course(sharded=True),
    "350m, offloaded": Course(sharded=True, settings={"offload": True}),
}


def peak_bytes(course: Course, engine: Engine) -> int:
    """Return the most bytes that were allocated in the third step."""
    tokens = torch.randint(0, PRESETS[course.size].vocabulary, (course.samples, LENGTH + 1)).to(GPU)
    batch = Batch(inputs=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous())
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats(GPU)
        assert float(engine.step(batch, course.samples * LENGTH).loss) > 0
    return torch.cuda.max_memory_allocated(GPU)


@pytest.mark.parametrize("course", COURSES.values(), ids=COURSES)
def test_the_planner_predicts_what_the_allocator_gives_out(course: Course) -> None:
    rank_device("cuda")
    gc.collect()
    before = torch.cuda.memory_allocated(GPU)
    config, parallel, training = PRESETS[course.size], course.parallel(), course.training()
    with group_of_one(needed=course.sharded, device="cuda"):
        with GPU:
            model = TrainableModel(module=Decoder(config), layout=decoder_layout(config))
        mesh = build_mesh(MeshShape(), 1) if course.sharded else None
        measured = peak_bytes(course, build_engine(model, parallel, training, mesh, GPU)) - before
    facts = decoder_facts(course.size, config)
    job = Job(facts=facts, parallel=parallel, training=training, sequence=LENGTH)
    predicted = predict_memory(job, fused_norms=True).total
    print(f"predicted / measured: {predicted / measured:.3f}, {measured / 1e9:.2f} GB")
    assert predicted == pytest.approx(measured, rel=TOLERANCE)
