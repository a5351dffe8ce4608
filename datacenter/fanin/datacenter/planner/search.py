"""Every way to spread a model over ranks, the fastest that fits first; and why.

A way that breaks a rule of ``parallel.settings`` is none; one that does not fit the memory is left out, and if none is
left the error names the least memory that would do.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final, get_args

from fanin.datacenter.flops import mfu
from fanin.datacenter.mesh import MeshShape
from fanin.datacenter.parallel.schedules import SCHEDULES
from fanin.datacenter.parallel.settings import (
    DEFAULT_SCHEDULE,
    ParallelSettings,
    Precision,
    Recompute,
    TrainingSettings,
    check_job,
    check_sequence,
)
from fanin.datacenter.planner.bubble import bubble_share
from fanin.datacenter.planner.facts import ModelFacts
from fanin.datacenter.planner.memory import Memory, worst_memory
from fanin.datacenter.planner.spread import Job
from fanin.datacenter.planner.timing import Machine, Timing, predict_timing
from fanin.protos.errors import InvalidInput

GIGABYTE: Final = 10**9
MAX_PIECES: Final = 64
"""Microbatches a stage of the pipeline that are looked at; more shorten the bubble by less than 2 %."""
ANY_RATE: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be trained on what: ``batch_size`` samples of ``sequence`` tokens a step over ``world`` ranks of
    ``memory_bytes`` each."""

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
                raise InvalidInput(f"plan: got {name} {getattr(self, name)}, expected at least 1")

    def job(self, parallel: ParallelSettings) -> Job:
        """The job under these settings. Raises InvalidInput if they are against the rules."""
        training = TrainingSettings(batch_size=self.batch_size, learning_rate=ANY_RATE, clip_norm=1.0)
        check_job(self.facts.layout, parallel, training, self.world)
        check_sequence(parallel, self.sequence)
        return Job(facts=self.facts, parallel=parallel, training=training, sequence=self.sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way, what it takes, and why it stands where it does."""

    job: Job
    timing: Timing
    memory: Memory
    machine: Machine
    reason: str

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.job.batch_tokens / self.timing.seconds

    @property
    def mfu(self) -> float:
        """The share of the peak, by the definition of ``flops``."""
        per_token = self.job.facts.work.flops_per_token(self.job.sequence)
        return mfu(
            per_token, self.tokens_per_second / self.job.parallel.mesh.num_ranks, self.machine.hardware.flops_per_second
        )


def plan(wanted: Wanted) -> list[Choice]:
    """All ways that are legal and fit, the fastest first, equal ones by memory. Raises InvalidInput if none is."""
    fused = wanted.machine.hardware.name != "cpu"
    fitting, least = [], None
    for job in jobs(wanted):
        memory = worst_memory(job, fused_norms=fused)
        if memory.total <= wanted.memory_bytes:
            fitting.append((job, memory))
        if least is None or memory.total < least[1].total:
            least = (job, memory)
    if least is None:
        sizes = wanted.facts.sizes
        raise InvalidInput(
            f"plan: no mesh of {wanted.world} ranks fits {wanted.facts.name}: {sizes.num_layers} layers, "
            f"{sizes.num_heads} heads, {sizes.num_kv_heads} kv heads, feed-forward {sizes.feed_forward}, batch "
            f"{wanted.batch_size}; take a batch that is a multiple of the ranks, or another number of ranks"
        )
    if not fitting:
        raise InvalidInput(
            f"plan: {wanted.facts.name} does not fit: got {_gigabytes(wanted.memory_bytes)} a rank, expected at least "
            f"{_gigabytes(least[1].total)}, which {describe(least[0].parallel)} would need; give each rank more "
            "memory, or take more ranks, a shorter sequence or a smaller batch"
        )
    found = [_choice(job, memory, wanted) for job, memory in fitting]
    return sorted(found, key=lambda each: (each.timing.seconds, each.memory.total, str(each.job.parallel.mesh)))


def jobs(wanted: Wanted) -> Iterator[Job]:
    """Every way that is against no rule."""
    for pp, replicate, shard, tp in factorisations(wanted.world):
        mesh = MeshShape(pp=pp, dp_replicate=replicate, dp_shard=shard, tp=tp)
        if wanted.batch_size % mesh.num_parts:
            continue
        schedules = tuple(SCHEDULES) if pp > 1 else (DEFAULT_SCHEDULE,)
        pieces = [number for number in _divisors(wanted.batch_size // mesh.num_parts) if number <= MAX_PIECES * pp]
        reshards = (None, False) if shard > 1 and pp == 1 else (None,)
        splits = (False, True) if tp > 1 and wanted.facts.layout.sequence == "model" else (False,)
        for schedule, number, again, reshard, split in product(
            schedules, pieces, get_args(Recompute), reshards, splits
        ):
            try:
                yield wanted.job(
                    ParallelSettings(
                        mesh=mesh,
                        schedule=schedule,
                        microbatches=number,
                        recompute=again,
                        reshard=reshard,
                        precision=wanted.precision,
                        sequence_parallel=split,
                    )
                )
            except InvalidInput:
                # The rules say no; there are others.
                continue


def factorisations(number: int, parts: int = 4) -> Iterator[tuple[int, ...]]:
    """Every ordered product of ``parts`` factors."""
    if parts == 1:
        yield (number,)
        return
    for first in _divisors(number):
        for rest in factorisations(number // first, parts - 1):
            yield (first, *rest)


def describe(parallel: ParallelSettings) -> str:
    """Settings in a few words."""
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


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _choice(job: Job, memory: Memory, wanted: Wanted) -> Choice:
    timing = predict_timing(job, wanted.machine)
    return Choice(
        job=job, timing=timing, memory=memory, machine=wanted.machine, reason=_reason(job, timing, memory, wanted)
    )


def _reason(job: Job, timing: Timing, memory: Memory, wanted: Wanted) -> str:
    """What the time goes to, largest first, and what fills the memory."""
    shares = sorted(timing.parts.items(), key=lambda item: -item[1])
    spent = ", ".join(
        f"{name} {share / timing.seconds:.0%}" for name, share in shares if share / timing.seconds > 0.005
    )
    words = [spent]
    if job.parallel.pipelined:
        words.append(f"each rank waits {bubble_share(job.parallel.pipeline()):.0%} of the pipeline's time")
    if job.parallel.recompute == "full":
        again = max(job.again(stage) for rank in range(job.parallel.mesh.pp) for stage in job.stages(rank))
        times = "once more" if again == 1 else f"up to {again} times more"
        words.append(f"each layer is computed {times} to save its activations")
    kept = {
        "parameters and optimizer": memory.parameters + memory.optimizer,
        "gradients": memory.gradients,
        "activations": memory.activations,
        "whole layers and sums": memory.working,
    }
    name, most = max(kept.items(), key=lambda item: item[1])
    words.append(f"most memory is {name}, {_gigabytes(most)} of {_gigabytes(memory.total)}")
    spare = 1 - memory.total / wanted.memory_bytes
    words.append(f"{spare:.0%} is free")
    return "; ".join(words)


def _gigabytes(size_bytes: float) -> str:
    return f"{size_bytes / GIGABYTE:.3g} GB"
