"""The input and the output of the planner: a model with its ranks, and one layout with its predictions."""

from dataclasses import dataclass
from functools import cache
from typing import Final

from fanin.datacenter.parallel.checks import check_job, check_sequence
from fanin.datacenter.parallel.settings import ParallelSettings, Precision, TrainingSettings
from fanin.datacenter.planner.bubble import bubble_share
from fanin.datacenter.planner.facts import ModelFacts
from fanin.datacenter.planner.memory import Memory
from fanin.datacenter.planner.spread import Job
from fanin.datacenter.planner.timing import Machine, Timing
from fanin.datacenter.watch.flops import mfu
from fanin.protos.errors import InvalidInput

GIGABYTE: Final = 10**9
ANY_RATE: Final = 1.0
"""A learning rate. It changes neither time nor memory."""
SHOWN_SHARE: Final = 0.005
"""Shares of the step time below this are left out of the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRequest:
    """A model, its ranks and its training settings.

    Attributes:
        facts: the model.
        machine: hardware and links of the ranks.
        world: number of ranks.
        memory_bytes: memory of each rank that tensors may use.
        batch_size: samples of a step over all ranks.
        sequence: tokens of a sample.
        precision: dtype of the computation.
    """

    facts: ModelFacts
    machine: Machine
    world: int
    memory_bytes: int
    batch_size: int
    sequence: int
    precision: Precision = "bf16"

    def __post_init__(self) -> None:
        for name in ("world", "memory_bytes", "batch_size", "sequence"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name}: got {getattr(self, name)}, expected at least 1", code="FN-1375")

    def job(self, parallel: ParallelSettings) -> Job:
        """Return the job that trains the model with these settings.

        Raises:
            InvalidInput: the settings do not fit the model, the batch or the number of ranks.
        """
        training = _training(self.batch_size)
        check_job(self.facts.layout, parallel, training, self.world)
        check_sequence(parallel, self.sequence)
        return Job(facts=self.facts, parallel=parallel, training=training, sequence=self.sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """One layout with its predicted time and memory.

    Attributes:
        job: the model and how it is spread.
        timing: predicted seconds of a step.
        memory: predicted peak memory of the rank that needs most.
        machine: hardware and links of the ranks.
        memory_bytes: memory of each rank that tensors may use.
    """

    job: Job
    timing: Timing
    memory: Memory
    machine: Machine
    memory_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the predicted memory is at most ``memory_bytes``."""
        return self.memory.total <= self.memory_bytes

    @property
    def reason(self) -> str:
        """The shares of the step time, largest first, and the largest use of memory, as one line of text."""
        shares = sorted(self.timing.parts.items(), key=lambda item: -item[1])
        seconds = self.timing.seconds
        words = [", ".join(f"{name} {part / seconds:.0%}" for name, part in shares if part / seconds > SHOWN_SHARE)]
        if self.job.parallel.pipelined:
            words.append(f"each rank waits {bubble_share(self.job.parallel.pipeline()):.0%} of the pipeline's time")
        if self.job.parallel.recompute == "full":
            words.append(f"each layer is computed {_recomputation_text(self.job)} to save its activations")
        return "; ".join([*words, *_memory_texts(self.memory, self.memory_bytes)])

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second over all ranks."""
        return self.job.batch_tokens / self.timing.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, 0.0 to 1.0, as ``watch.flops`` defines it."""
        flops_per_token = self.job.facts.work.flops_per_token(self.job.sequence)
        tokens_per_rank = self.tokens_per_second / self.job.parallel.mesh.num_ranks
        return mfu(flops_per_token, tokens_per_rank, self.machine.hardware.flops_per_second)


def describe(parallel: ParallelSettings) -> str:
    """Return a layout as one line of text. Settings at their default are left out."""
    words = [f"mesh {parallel.mesh}"]
    if parallel.pipelined:
        words.append(f"schedule {parallel.schedule}")
    if parallel.microbatches > 1:
        words.append(f"{parallel.microbatches} microbatches")
    if parallel.recompute != "none":
        words.append(f"{parallel.recompute} recomputation")
    if parallel.sequence_parallel:
        words.append("sequence parallelism")
    if parallel.reshard is False:
        words.append("parameters kept between forward and backward")
    return ", ".join(words)


def gigabytes(size_bytes: float) -> str:
    """Return a size as text in units of 10^9 bytes."""
    return f"{size_bytes / GIGABYTE:.3g} GB"


@cache
def _training(batch_size: int) -> TrainingSettings:
    return TrainingSettings(batch_size=batch_size, learning_rate=ANY_RATE, clip_norm=1.0)


def _recomputation_text(job: Job) -> str:
    most = max(job.num_recomputations(stage) for rank in range(job.parallel.mesh.pp) for stage in job.stages(rank))
    return "once more" if most == 1 else f"up to {most} times more"


def _memory_texts(memory: Memory, memory_bytes: int) -> tuple[str, str]:
    parts = {
        "parameters and optimizer": memory.parameters + memory.optimizer,
        "gradients": memory.gradients,
        "activations": memory.activations,
        "whole layers and sums": memory.working,
    }
    name, most = max(parts.items(), key=lambda item: item[1])
    spare = 1 - memory.total / memory_bytes
    return (
        f"most memory is {name}, {gigabytes(most)} of {gigabytes(memory.total)}",
        f"{spare:.0%} is free" if spare >= 0 else f"{-spare:.0%} more than a rank has",
    )
