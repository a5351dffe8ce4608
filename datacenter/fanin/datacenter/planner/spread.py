"""One rank's part of a job, in numbers: which stages it has, what is in them, how large a piece is, and of what dtype.

``traffic``, ``memory`` and ``timing`` all begin here, so that they speak of the same job.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from fanin.datacenter.parallel.pipelines.pipeline import cut
from fanin.datacenter.parallel.pipelines.schedules import SCHEDULES, Pipeline
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.planner.facts import ModelFacts, Weight

FULL_BYTES = 4
"""Of a value in the parameters' own precision."""
HALF_BYTES = 2
SUM_BYTES = 8
"""Of a loss, a count or a norm, summed over ranks in float64."""
Part = Literal["inputs", "layer", "outputs"]
"""Parameters before the layers, of one layer, and after the layers."""


@cache
def _shares(num_layers: int, num_stages: int, times: tuple[float, ...]) -> tuple[int, ...]:
    """Layers of each stage. A planner asks for the same thousands of times, here and below."""
    return tuple(map(len, cut(num_layers, num_stages, times)))


@cache
def _stages(
    num_layers: int, schedule: str, sizes: tuple[int, int], times: tuple[float, ...]
) -> tuple[tuple["Stage", ...], ...]:
    """The stages of each rank; ``sizes``: ranks, and stages of each rank."""
    num_ranks, per_rank = sizes
    num_stages = num_ranks * per_rank
    shares = _shares(num_layers, num_stages, times)
    # How many microbatches there are decides nothing here, and as many as stages break no rule.
    pipeline = Pipeline(
        schedule=schedule, num_ranks=num_ranks, stages_per_rank=per_rank, microbatches=num_ranks * per_rank
    )
    return tuple(
        tuple(
            Stage(index=index, num_layers=shares[index], first=index == 0, last=index == num_stages - 1)
            for index in pipeline.stages_of(rank)
        )
        for rank in range(num_ranks)
    )


@cache
def _shard_values(facts: ModelFacts, part: Part, tp: int, num_shards: int) -> int:
    weights = {"inputs": facts.inputs, "layer": facts.layer, "outputs": facts.outputs}[part]
    return sum(weight.sharded(tp, facts.sizes.num_kv_heads, num_shards) for weight in weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: how many layers, and which ends of the model are in it."""

    index: int
    num_layers: int
    first: bool
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model, how it is spread and trained, and the tokens of a sample.

    ``num_shards``: in how many shares FSDP2 cuts a parameter, 1 where it does not. ``stream_bytes``: of a value of what
    layers hand on; FSDP2 casts the model, autocast the products alone. Both are derived once: a search asks for them
    millions of times.
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
        object.__setattr__(self, "stream_bytes", HALF_BYTES if self.half and sharded else FULL_BYTES)

    @property
    def tp(self) -> int:
        """Ranks of tensor parallelism."""
        return self.parallel.mesh.tp

    @property
    def turns(self) -> int:
        """Pieces of a rank's part of a batch."""
        return self.training.accumulate * self.parallel.microbatches

    @property
    def piece_tokens(self) -> int:
        """Tokens that a rank works on at once."""
        return self.training.batch_size // (self.parallel.mesh.num_parts * self.turns) * self.sequence

    @property
    def stream_tokens(self) -> int:
        """Of these, what a rank has of them between the matrices that are split."""
        return self.piece_tokens // self.tp if self.parallel.sequence_parallel else self.piece_tokens

    @property
    def batch_tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return self.training.batch_size * self.sequence

    @property
    def half(self) -> bool:
        """Whether matrix products are in half precision."""
        return self.parallel.precision != "full"

    @property
    def product_bytes(self) -> int:
        """Of a value that comes out of a matrix product."""
        return HALF_BYTES if self.half else FULL_BYTES

    def stages(self, rank: int) -> list[Stage]:
        """The stages of a rank of the pipeline, first to last."""
        num_layers = self.facts.sizes.num_layers
        if not self.parallel.pipelined:
            return [Stage(index=0, num_layers=num_layers, first=True, last=True)]
        parallel = self.parallel
        sizes = (parallel.mesh.pp, parallel.stages_per_rank or SCHEDULES[parallel.schedule].default_stages)
        return list(_stages(num_layers, parallel.schedule, sizes, parallel.times)[rank])

    def again(self, stage: Stage) -> int:
        """How often a layer of a stage is computed again for each piece where all of its activations are.

        Once in each backward pass over it. A schedule that splits the backward pass has one for the gradients of inputs
        and, in torch 2.13, one more for each weight; the first stage alone goes back at once.
        """
        if self.parallel.recompute != "full":
            return 0
        splits = self.parallel.pipelined and SCHEDULES[self.parallel.schedule].splits_backward
        return 1 + len(self.facts.layer) if splits and not stage.first else 1

    def ends(self, stage: Stage) -> tuple[Weight, ...]:
        """The parameters of a stage outside of its layers; a tied table is in both ends of a pipeline."""
        inputs, outputs = self.facts.inputs, self.facts.outputs
        found = (*(inputs if stage.first else ()), *(outputs if stage.last else ()))
        return (*inputs, *found) if self.facts.tied and stage.last and not stage.first else found

    def num_weights(self, stage: Stage) -> int:
        """Parameters of a stage, as tensors."""
        return stage.num_layers * len(self.facts.layer) + len(self.ends(stage))

    def stage_values(self, stages: list[Stage]) -> tuple[int, int]:
        """(values that a rank keeps of stages, values of them as ``tp`` splits them, padded)."""
        layers = sum(stage.num_layers for stage in stages)
        mine = layers * self.layer_values
        mine += sum(self.end_values(stage) for stage in stages)
        return mine, mine * self.num_shards

    @property
    def layer_values(self) -> int:
        """Values that a rank keeps of one layer's parameters."""
        return self.part_values("layer")

    def end_values(self, stage: Stage) -> int:
        """Values that a rank keeps of the parameters of a stage outside of its layers."""
        values = self.part_values("inputs") if stage.first else 0
        if stage.last:
            values += self.part_values("outputs")
            if self.facts.tied and not stage.first:
                values += self.part_values("inputs")
        return values

    def part_values(self, part: Part) -> int:
        """Values that a rank keeps of a part's parameters."""
        return _shard_values(self.facts, part, self.parallel.mesh.tp, self.num_shards)
