"""Pipeline schedules: the orders in which a pipeline runs its microbatches, and the rules of each.

``Pipeline`` checks the rules with numbers only, before a process starts. torch reports the same faults after minutes,
by a hang or by an error that names no setting. This module needs no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fanin.protos.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One schedule and its rules.

    Attributes:
        torch_name: the name of the schedule in torch.
        single_stage: each rank has one stage. Otherwise it has several, assigned to the ranks in a loop.
        folded: each rank has two stages; the second half of the pipeline returns over the ranks in reverse order.
        splits_backward: gradients of inputs and of weights are computed separately, which a compiled module cannot do.
        needs_full_pipeline: there must be at least as many microbatches as stages.
        needs_even_rounds: the microbatches must divide evenly into rounds over the ranks.
    """

    torch_name: str
    single_stage: bool = False
    folded: bool = False
    splits_backward: bool = False
    needs_full_pipeline: bool = False
    needs_even_rounds: bool = False

    @property
    def default_stages(self) -> int:
        """Stages of a rank if the settings do not name a number."""
        return 1 if self.single_stage else 2


SCHEDULES: Final[Mapping[str, Schedule]] = MappingProxyType(
    {
        "GPipe": Schedule(torch_name="GPipe", single_stage=True),
        "1F1B": Schedule(torch_name="1F1B", single_stage=True, needs_full_pipeline=True),
        "Interleaved1F1B": Schedule(torch_name="Interleaved1F1B", needs_even_rounds=True),
        "LoopedBFS": Schedule(torch_name="LoopedBFS"),
        "InterleavedZeroBubble": Schedule(
            torch_name="InterleavedZeroBubble", splits_backward=True, needs_even_rounds=True
        ),
        "ZBV": Schedule(torch_name="ZBVZeroBubble", splits_backward=True, folded=True),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A schedule with its sizes: ``num_ranks`` ranks that run ``microbatches``.

    Raises:
        InvalidInput: the schedule cannot run these sizes.
    """

    schedule: str
    num_ranks: int
    stages_per_rank: int
    microbatches: int
    compiled: bool = False

    def __post_init__(self) -> None:
        fault = self._name_fault() or self._stages_fault() or self._microbatches_fault() or self._compile_fault()
        if fault:
            raise InvalidInput(
                f"pipeline: {fault} (schedule {self.schedule}, pp {self.num_ranks}, {self.stages_per_rank} stages a "
                f"rank, {self.microbatches} microbatches, {'compiled' if self.compiled else 'not compiled'})",
                code="FN-1278",
            )

    @property
    def rules(self) -> Schedule:
        """The rules of the schedule."""
        return SCHEDULES[self.schedule]

    @property
    def num_stages(self) -> int:
        """Number of stages on all ranks together."""
        return self.num_ranks * self.stages_per_rank

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, first to last."""
        if self.rules.folded:
            return (rank, self.num_stages - 1 - rank)
        return tuple(range(rank, self.num_stages, self.num_ranks))

    def rank_of(self, stage: int) -> int:
        """Return the rank that computes a stage."""
        if self.rules.folded:
            return min(stage, self.num_stages - 1 - stage)
        return stage % self.num_ranks

    def _name_fault(self) -> str | None:
        known = ", ".join(SCHEDULES)
        return None if self.schedule in SCHEDULES else f"got schedule {self.schedule!r}, expected one of {known}"

    def _stages_fault(self) -> str | None:
        if self.stages_per_rank < 1:
            return f"got {self.stages_per_rank} stages a rank, expected at least 1"
        if self.rules.single_stage and self.stages_per_rank != 1:
            return f"{self.schedule} has 1 stage a rank, got {self.stages_per_rank}"
        if self.rules.folded and self.stages_per_rank != 2:
            return f"{self.schedule} has exactly 2 stages a rank, got {self.stages_per_rank}"
        return None

    def _microbatches_fault(self) -> str | None:
        if self.microbatches < 1:
            return f"got {self.microbatches} microbatches, expected at least 1"
        if self.rules.needs_full_pipeline and self.microbatches < self.num_stages:
            return (
                f"{self.schedule} needs at least as many microbatches as the {self.num_stages} stages, got "
                f"{self.microbatches}; raise microbatches, or use GPipe"
            )
        rounds = max(1, self.microbatches // self.num_ranks)
        if self.rules.needs_even_rounds and self.microbatches % rounds:
            return (
                f"{self.schedule} runs {rounds} rounds over {self.num_ranks} ranks, got {self.microbatches} "
                f"microbatches, which do not divide evenly into rounds; use a multiple of {self.num_ranks}"
            )
        return None

    def _compile_fault(self) -> str | None:
        if self.compiled and self.rules.splits_backward:
            return f"{self.schedule} computes gradients of inputs and weights apart, which a compiled module cannot do"
        return None
