"""The orders in which a pipeline may run its microbatches, and what each of them needs.

Decided on numbers alone, before a process is spent; torch finds the same faults after minutes, by hanging or with
an error that names none of them. Needs no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fanin.protos.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One schedule: torch's name for it, and its rules.

    ``single``: each rank has one stage; else several, one after the other around the ranks. ``folded``: each rank has
    two, and the second half of the pipeline goes back over the ranks. ``splits_backward``: gradients of inputs and of
    weights are computed apart, which a compiled module cannot do.
    """

    torch_name: str
    single: bool = False
    folded: bool = False
    splits_backward: bool = False
    enough: bool = False
    even: bool = False

    @property
    def default_stages(self) -> int:
        """Stages of a rank where nothing else is said."""
        return 1 if self.single else 2


SCHEDULES: Final[Mapping[str, Schedule]] = MappingProxyType(
    {
        "GPipe": Schedule(torch_name="GPipe", single=True),
        "1F1B": Schedule(torch_name="1F1B", single=True, enough=True),
        "Interleaved1F1B": Schedule(torch_name="Interleaved1F1B", even=True),
        "LoopedBFS": Schedule(torch_name="LoopedBFS"),
        "InterleavedZeroBubble": Schedule(torch_name="InterleavedZeroBubble", splits_backward=True, even=True),
        "ZBV": Schedule(torch_name="ZBVZeroBubble", splits_backward=True, folded=True),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How a pipeline of ``num_ranks`` runs ``microbatches``; checked as it is made. Raises InvalidInput."""

    schedule: str
    num_ranks: int
    stages_per_rank: int
    microbatches: int
    compiled: bool = False

    def __post_init__(self) -> None:
        fault = self._unknown() or self._stages() or self._microbatches() or self._compiled()
        if fault:
            raise InvalidInput(
                f"pipeline: {fault} (schedule {self.schedule}, pp {self.num_ranks}, {self.stages_per_rank} stages a "
                f"rank, {self.microbatches} microbatches, {'compiled' if self.compiled else 'not compiled'})"
            )

    @property
    def rules(self) -> Schedule:
        """The schedule's row."""
        return SCHEDULES[self.schedule]

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.num_ranks * self.stages_per_rank

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, first to last."""
        if self.rules.folded:
            return (rank, self.num_stages - 1 - rank)
        return tuple(range(rank, self.num_stages, self.num_ranks))

    def rank_of(self, stage: int) -> int:
        """The rank that has a stage."""
        if self.rules.folded:
            return min(stage, self.num_stages - 1 - stage)
        return stage % self.num_ranks

    def _unknown(self) -> str | None:
        known = ", ".join(SCHEDULES)
        return None if self.schedule in SCHEDULES else f"got schedule {self.schedule!r}, expected one of {known}"

    def _stages(self) -> str | None:
        if self.stages_per_rank < 1:
            return f"got {self.stages_per_rank} stages a rank, expected at least 1"
        if self.rules.single and self.stages_per_rank != 1:
            return f"{self.schedule} has 1 stage a rank, got {self.stages_per_rank}"
        if self.rules.folded and self.stages_per_rank != 2:
            return f"{self.schedule} has exactly 2 stages a rank, got {self.stages_per_rank}"
        return None

    def _microbatches(self) -> str | None:
        if self.microbatches < 1:
            return f"got {self.microbatches} microbatches, expected at least 1"
        if self.rules.enough and self.microbatches < self.num_stages:
            return (
                f"{self.schedule} needs at least as many microbatches as the {self.num_stages} stages, got "
                f"{self.microbatches}; raise them, or take GPipe"
            )
        rounds = max(1, self.microbatches // self.num_ranks)
        if self.rules.even and self.microbatches % rounds:
            return (
                f"{self.schedule} goes over {self.num_ranks} ranks in {rounds} rounds, which {self.microbatches} "
                f"microbatches do not fill evenly; take a multiple of {self.num_ranks}"
            )
        return None

    def _compiled(self) -> str | None:
        if self.compiled and self.rules.splits_backward:
            return f"{self.schedule} computes gradients of inputs and weights apart, which a compiled module cannot"
        return None
