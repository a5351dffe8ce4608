"""The part of a job that one rank computes and stores: its stages, its parameters, and the tokens of a chunk.

A *chunk* is the part of a batch that a rank computes at once: one microbatch of one gradient accumulation step.
``traffic``, ``memory`` and ``timing`` all use this module, so their predictions describe the same job.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Literal

from fanin.datacenter.parallel.pipelines.schedules import SCHEDULES, Pipeline
from fanin.datacenter.parallel.pipelines.stages import cut
from fanin.datacenter.parallel.settings import ParallelSettings, Precision, TrainingSettings
from fanin.datacenter.planner.facts import ModelFacts, Weight

FULL_BYTES = 4
"""Bytes of a float32 value."""
DOUBLE_BYTES = 8
"""Bytes of a float64 value."""
HALF_BYTES = 2
"""Bytes of a value in bf16 or fp16."""
SUM_BYTES = 8
"""Bytes of a loss, a count or a norm, which ranks sum in float64."""
BYTES: Mapping[Precision, int] = MappingProxyType(
    {"full": FULL_BYTES, "double": DOUBLE_BYTES, "bf16": HALF_BYTES, "fp16": HALF_BYTES}
)
"""Bytes of a value in the output of a matrix product."""
Section = Literal["inputs", "layer", "outputs"]
"""The parameters before the layers, of one layer, or after the layers."""


@cache
def _shares(num_layers: int, num_stages: int, times: tuple[float, ...]) -> tuple[int, ...]:
    """Return the number of layers of each stage. Cached, because a search repeats the call thousands of times."""
    return tuple(map(len, cut(num_layers, num_stages, times)))


@cache
def _stages(
    num_layers: int, schedule: str, sizes: tuple[int, int], times: tuple[float, ...]
) -> tuple[tuple["StageSizes", ...], ...]:
    """Return the stages of each rank. ``sizes`` is (ranks, stages on each rank). Cached for the same reason."""
    num_ranks, per_rank = sizes
    num_stages = num_ranks * per_rank
    shares = _shares(num_layers, num_stages, times)
    # The number of microbatches does not matter here. One for each stage satisfies every schedule.
    pipeline = Pipeline(
        schedule=schedule, num_ranks=num_ranks, stages_per_rank=per_rank, microbatches=num_ranks * per_rank
    )
    return tuple(
        tuple(
            StageSizes(index=index, num_layers=shares[index], first=index == 0, last=index == num_stages - 1)
            for index in pipeline.stages_of(rank)
        )
        for rank in range(num_ranks)
    )


@cache
def _shard_values(facts: ModelFacts, section: Section, tp: int, num_shards: int) -> int:
    weights = {"inputs": facts.inputs, "layer": facts.layer, "outputs": facts.outputs}[section]
    return sum(weight.sharded(tp, facts.sizes.num_kv_heads, num_shards) for weight in weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSizes:
    """The number of layers of a pipeline stage, and whether it has the inputs or the outputs of the model."""

    index: int
    num_layers: int
    first: bool
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model, its layout, its training settings and the tokens of a sample.

    Attributes:
        facts: the model.
        parallel: how it is spread.
        training: how it is trained.
        sequence: tokens of a sample.
        num_shards: shards of a parameter under FSDP2; 1 without it. Derived once, because a search reads it often.
        stream_bytes: bytes of a value in the activations between layers. FSDP2 casts the complete model to half
            precision, autocast only the matrix products. Derived once, too.
    """

    facts: ModelFacts
    parallel: ParallelSettings
    training: TrainingSettings
    sequence: int
    num_shards: int = field(init=False, compare=False)
    stream_bytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        sharded = self.parallel.sharded
        object.__setattr__(self, "num_shards", self.parallel.mesh.dp_shard if sharded else 1)
        object.__setattr__(self, "stream_bytes", HALF_BYTES if self.half and sharded else self.full_bytes)

    @property
    def tp(self) -> int:
        """Ranks of tensor parallelism."""
        return self.parallel.mesh.tp

    @property
    def num_chunks(self) -> int:
        """Chunks of a rank's part of a batch: accumulation steps times microbatches."""
        return self.training.accumulate * self.parallel.microbatches

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.training.batch_size // (self.parallel.mesh.num_parts * self.num_chunks) * self.sequence

    @property
    def stream_tokens(self) -> int:
        """Tokens of a chunk that a rank has between split matrices. Sequence parallelism divides them by tp."""
        return self.chunk_tokens // self.tp if self.parallel.sequence_parallel else self.chunk_tokens

    @property
    def batch_tokens(self) -> int:
        """Tokens of an optimizer step over all ranks."""
        return self.training.batch_size * self.sequence

    @property
    def half(self) -> bool:
        """Whether matrix products use half precision."""
        return self.product_bytes == HALF_BYTES

    @property
    def product_bytes(self) -> int:
        """Bytes of a value in the output of a matrix product."""
        return BYTES[self.parallel.precision]

    @property
    def full_bytes(self) -> int:
        """Bytes of a value in the precision of the parameters: float64 for ``double``, otherwise float32."""
        return max(self.product_bytes, FULL_BYTES)

    def stages(self, rank: int) -> list[StageSizes]:
        """Return the stages of a pipeline rank, first to last."""
        num_layers = self.facts.sizes.num_layers
        if not self.parallel.pipelined:
            return [StageSizes(index=0, num_layers=num_layers, first=True, last=True)]
        parallel = self.parallel
        sizes = (parallel.mesh.pp, parallel.stages_per_rank or SCHEDULES[parallel.schedule].default_stages)
        return list(_stages(num_layers, parallel.schedule, sizes, parallel.times)[rank])

    def num_recomputations(self, stage: StageSizes) -> int:
        """Return how often each layer of a stage is recomputed for a chunk under full recomputation.

        A layer is recomputed once in each backward pass. A schedule that splits the backward pass has one pass for the
        gradients of inputs and, in torch 2.13, one more for each weight. The exception is the first stage, whose
        backward pass is not split.
        """
        if self.parallel.recompute != "full":
            return 0
        splits = self.parallel.pipelined and SCHEDULES[self.parallel.schedule].splits_backward
        return 1 + len(self.facts.layer) if splits and not stage.first else 1

    def ends(self, stage: StageSizes) -> tuple[Weight, ...]:
        """Return the parameters of a stage outside of its layers. A tied table is in the first and the last stage."""
        inputs, outputs = self.facts.inputs, self.facts.outputs
        weights = (*(inputs if stage.first else ()), *(outputs if stage.last else ()))
        return (*inputs, *weights) if self.facts.tied and stage.last and not stage.first else weights

    def num_weights(self, stage: StageSizes) -> int:
        """Return the number of parameter tensors of a stage."""
        return stage.num_layers * len(self.facts.layer) + len(self.ends(stage))

    def stage_values(self, stages: list[StageSizes]) -> tuple[int, int]:
        """Return (parameter values that a rank stores for its stages, the same before FSDP2 shards them, padded)."""
        layers = sum(stage.num_layers for stage in stages)
        stored = layers * self.layer_values
        stored += sum(self.end_values(stage) for stage in stages)
        return stored, stored * self.num_shards

    @property
    def layer_values(self) -> int:
        """Parameter values of one layer that a rank stores."""
        return self.section_values("layer")

    def end_values(self, stage: StageSizes) -> int:
        """Return the parameter values of a stage outside of its layers that a rank stores."""
        values = self.section_values("inputs") if stage.first else 0
        if stage.last:
            values += self.section_values("outputs")
            if self.facts.tied and not stage.first:
                values += self.section_values("inputs")
        return values

    def section_values(self, section: Section) -> int:
        """Return the parameter values of a section that a rank stores."""
        return _shard_values(self.facts, section, self.parallel.mesh.tp, self.num_shards)
