"""Every way to spread a model over ranks, the fastest that fits first; and why.

A way that breaks a rule of ``parallel.settings`` is none; one that does not fit the memory is left out, and if none is
left the error names the least memory that would do.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Final, get_args

from fanin.datacenter.parallel.mesh import MeshShape
from fanin.datacenter.parallel.pipelines.schedules import SCHEDULES
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
from fanin.datacenter.planner.memory import STATE_VALUES, Memory, worst_memory
from fanin.datacenter.planner.spread import FULL_BYTES, Job
from fanin.datacenter.planner.timing import Machine, Timing, predict_timing
from fanin.datacenter.watch.flops import mfu
from fanin.protos.errors import InvalidInput

GIGABYTE: Final = 10**9
MAX_PIECES: Final = 64
"""Microbatches a stage of the pipeline that are looked at; more shorten the bubble by less than 2 %."""
ANY_RATE: Final = 1.0
LEAST_SCHEDULE: Final = "GPipe"
"""It runs any number of microbatches on one stage a rank: a mesh that breaks a rule with it breaks it with all."""
Progress = Callable[[float, int], None]


def _silent(share: float, num_ways: int) -> None:
    """Report nothing."""


@cache
def _training(batch_size: int) -> TrainingSettings:
    return TrainingSettings(batch_size=batch_size, learning_rate=ANY_RATE, clip_norm=1.0)


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
        training = _training(self.batch_size)
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
    memory_bytes: int

    @property
    def fits(self) -> bool:
        """Whether it needs no more memory than a rank has."""
        return self.memory.total <= self.memory_bytes

    @property
    def reason(self) -> str:
        """What the time goes to, largest first, and what fills the memory."""
        return _reason(self.job, self.timing, self.memory, self.memory_bytes)

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


def plan(wanted: Wanted, progress: Progress = _silent) -> list[Choice]:
    """All ways that are legal and fit, the fastest first, equal ones by memory. Raises InvalidInput if none is.

    ``progress`` is called with the share of the work that is done, 0.0 to 1.0, and the number of ways until then.
    """
    fitting, num_ways = list[Choice](), 0
    meshes = list(_meshes(wanted))
    for done, mesh in enumerate(meshes):
        for job in _of_mesh(wanted, mesh):
            if _parameters_alone(job) > wanted.memory_bytes:
                # All ways on this mesh keep as many parameters, or more.
                break
            num_ways += 1
            progress(done / len(meshes), num_ways)
            memory = _memory(job, wanted)
            if memory.total <= wanted.memory_bytes:
                fitting.append(_choice(job, memory, wanted))
    if not fitting:
        raise _nothing_fits(wanted)
    return sorted(fitting, key=lambda each: (each.timing.seconds, each.memory.total, str(each.job.parallel.mesh)))


def price(wanted: Wanted, mesh: MeshShape) -> list[Choice]:
    """All ways on one mesh, those that fit first, the fastest of each first; also if none fits. Raises InvalidInput."""
    found = [_choice(job, _memory(job, wanted), wanted) for job in _of_mesh(wanted, mesh)]
    if not found:
        # Its words say which rule the mesh breaks.
        wanted.job(ParallelSettings(mesh=mesh, precision=wanted.precision, schedule=LEAST_SCHEDULE, microbatches=1))
        raise InvalidInput(f"plan: no schedule runs {wanted.facts.name} on mesh {mesh}; take another batch")
    return sorted(found, key=lambda each: (not each.fits, each.timing.seconds, each.memory.total))


def jobs(wanted: Wanted) -> Iterator[Job]:
    """Every way that is against no rule."""
    for mesh in _meshes(wanted):
        yield from _of_mesh(wanted, mesh)


def _meshes(wanted: Wanted) -> Iterator[MeshShape]:
    for pp, replicate, shard, tp in factorisations(wanted.world):
        mesh = MeshShape(pp=pp, dp_replicate=replicate, dp_shard=shard, tp=tp)
        if wanted.batch_size % mesh.num_parts == 0:
            yield mesh


def _of_mesh(wanted: Wanted, mesh: MeshShape) -> Iterator[Job]:
    """Every way on one mesh that is against no rule. What breaks one whatever the rest is asked first."""
    if not _legal(wanted, mesh, LEAST_SCHEDULE, 1):
        return
    pp, tp = mesh.pp, mesh.tp
    schedules = tuple(SCHEDULES) if pp > 1 else (DEFAULT_SCHEDULE,)
    pieces = [number for number in _divisors(wanted.batch_size // mesh.num_parts) if number <= MAX_PIECES * pp]
    reshards = (None, False) if mesh.dp_shard > 1 and pp == 1 else (None,)
    splits = (False, True) if tp > 1 and wanted.facts.layout.sequence == "model" else (False,)
    for schedule, number in product(schedules, pieces):
        if not _legal(wanted, mesh, schedule, number):
            continue
        for again, reshard, split in product(get_args(Recompute), reshards, splits):
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


def _legal(wanted: Wanted, mesh: MeshShape, schedule: str, microbatches: int) -> bool:
    try:
        wanted.job(ParallelSettings(mesh=mesh, schedule=schedule, microbatches=microbatches))
    except InvalidInput:
        return False
    return True


def _memory(job: Job, wanted: Wanted) -> Memory:
    return worst_memory(job, fused_norms=wanted.machine.hardware.name != "cpu")


def _parameters_alone(job: Job) -> int:
    """Bytes of parameters and optimizer of a rank at least, whatever the schedule and the rest of the settings."""
    facts, pp = job.facts, job.parallel.mesh.pp
    layers = facts.sizes.num_layers // pp * job.layer_values
    return (1 + STATE_VALUES[job.training.optimizer]) * FULL_BYTES * layers


def _nothing_fits(wanted: Wanted) -> InvalidInput:
    """The error for a model that fits no mesh, with the least memory that one takes."""
    least = min(
        ((_memory(job, wanted).total, describe(job.parallel)) for job in jobs(wanted)),
        key=lambda each: each[0],
        default=None,
    )
    if least is None:
        sizes = wanted.facts.sizes
        return InvalidInput(
            f"plan: no mesh of {wanted.world} ranks fits {wanted.facts.name}: {sizes.num_layers} layers, "
            f"{sizes.num_heads} heads, {sizes.num_kv_heads} kv heads, feed-forward {sizes.feed_forward}, batch "
            f"{wanted.batch_size}; take a batch that is a multiple of the ranks, or another number of ranks"
        )
    return InvalidInput(
        f"plan: {wanted.facts.name} does not fit: got {_gigabytes(wanted.memory_bytes)} a rank, expected at least "
        f"{_gigabytes(least[0])}, which {least[1]} would need; give each rank more memory, or take more ranks, a "
        "shorter sequence or a smaller batch"
    )


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
    return Choice(job=job, timing=timing, memory=memory, machine=wanted.machine, memory_bytes=wanted.memory_bytes)


def _reason(job: Job, timing: Timing, memory: Memory, memory_bytes: int) -> str:
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
    spare = 1 - memory.total / memory_bytes
    words.append(f"{spare:.0%} is free" if spare >= 0 else f"{-spare:.0%} more than a rank has")
    return "; ".join(words)


def _gigabytes(size_bytes: float) -> str:
    return f"{size_bytes / GIGABYTE:.3g} GB"
