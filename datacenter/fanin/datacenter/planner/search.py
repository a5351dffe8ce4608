"""Enumerates every layout of a model over ranks, and sorts those that fit by predicted step time.

A layout must pass the checks of ``parallel.settings`` and ``parallel.checks``. Layouts that do not fit the memory are
dropped. If none is left, the error names the least memory that a layout needs.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Final, get_args

from fanin.datacenter.parallel.pipelines.schedules import SCHEDULES
from fanin.datacenter.parallel.settings import DEFAULT_SCHEDULE, ParallelSettings, Recompute
from fanin.datacenter.planner.choices import LayoutChoice, LayoutRequest, describe, gigabytes
from fanin.datacenter.planner.memory import STATE_VALUES, Memory, worst_memory
from fanin.datacenter.planner.spread import Job
from fanin.datacenter.planner.timing import predict_timing
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.protos.errors import InvalidInput

MAX_MICROBATCHES_PER_STAGE: Final = 64
"""Limit of the search. More microbatches shorten the bubble by less than 2 %."""
LEAST_SCHEDULE: Final = "GPipe"
"""The schedule with the fewest rules: any number of microbatches, one stage a rank. A mesh that it rejects is rejected
by all schedules."""
ProgressCallback = Callable[[float, int], None]
"""Receives the share of the search that is done, 0.0 to 1.0, and the number of layouts so far."""


def _no_progress(share: float, num_layouts: int) -> None:
    """Report nothing."""


def plan(request: LayoutRequest, progress: ProgressCallback = _no_progress) -> list[LayoutChoice]:
    """Return all layouts that are legal and fit the memory, the fastest first.

    Layouts with equal times are sorted by memory.

    Args:
        request: the model and the ranks.
        progress: called before each layout is evaluated.

    Raises:
        InvalidInput: no layout is legal, or none fits. The message names the least memory that a layout needs.
    """
    fitting, num_layouts = list[LayoutChoice](), 0
    meshes = list(_meshes(request))
    for num_done, mesh in enumerate(meshes):
        for job in _jobs_of_mesh(request, mesh):
            if _least_parameter_bytes(job) > request.memory_bytes:
                # Every layout on this mesh stores at least as many parameters.
                break
            num_layouts += 1
            progress(num_done / len(meshes), num_layouts)
            memory = _memory(job, request)
            if memory.total <= request.memory_bytes:
                fitting.append(_choice(job, memory, request))
    if not fitting:
        raise _nothing_fits(request)
    return sorted(fitting, key=lambda each: (each.timing.seconds, each.memory.total, str(each.job.parallel.mesh)))


def price(request: LayoutRequest, mesh: MeshShape) -> list[LayoutChoice]:
    """Return all legal layouts on one mesh, also those that do not fit the memory.

    Layouts that fit come first; both groups are sorted by step time.

    Raises:
        InvalidInput: no layout on this mesh is legal. The message names the rule that it breaks.
    """
    choices = [_choice(job, _memory(job, request), request) for job in _jobs_of_mesh(request, mesh)]
    if not choices:
        # The error of this check names the broken rule.
        request.job(ParallelSettings(mesh=mesh, precision=request.precision, schedule=LEAST_SCHEDULE, microbatches=1))
        raise InvalidInput(
            f"no schedule runs {request.facts.name} on mesh {mesh}; use another batch size", code="FN-1380"
        )
    return sorted(choices, key=lambda each: (not each.fits, each.timing.seconds, each.memory.total))


def jobs(request: LayoutRequest) -> Iterator[Job]:
    """Yield the job of every legal layout."""
    for mesh in _meshes(request):
        yield from _jobs_of_mesh(request, mesh)


def factorisations(number: int, num_factors: int = 4) -> Iterator[tuple[int, ...]]:
    """Yield every ordered product of ``num_factors`` factors."""
    if num_factors == 1:
        yield (number,)
        return
    for first in _divisors(number):
        for rest in factorisations(number // first, num_factors - 1):
            yield (first, *rest)


def _meshes(request: LayoutRequest) -> Iterator[MeshShape]:
    for pp, replicate, shard, tp in factorisations(request.world):
        mesh = MeshShape(pp=pp, dp_replicate=replicate, dp_shard=shard, tp=tp)
        if request.batch_size % mesh.num_parts == 0:
            yield mesh


def _jobs_of_mesh(request: LayoutRequest, mesh: MeshShape) -> Iterator[Job]:
    """Yield the job of every legal layout on one mesh. The checks that reject most layouts come first."""
    if not _is_legal(request, mesh, LEAST_SCHEDULE, 1):
        return
    pp, tp = mesh.pp, mesh.tp
    schedules = tuple(SCHEDULES) if pp > 1 else (DEFAULT_SCHEDULE,)
    samples = request.batch_size // mesh.num_parts
    microbatches = [number for number in _divisors(samples) if number <= MAX_MICROBATCHES_PER_STAGE * pp]
    reshards = (None, False) if mesh.dp_shard > 1 and pp == 1 else (None,)
    splits = (False, True) if tp > 1 and request.facts.layout.sequence == "model" else (False,)
    for schedule, number in product(schedules, microbatches):
        if not _is_legal(request, mesh, schedule, number):
            continue
        for recompute, reshard, split in product(get_args(Recompute), reshards, splits):
            try:
                yield request.job(
                    ParallelSettings(
                        mesh=mesh,
                        schedule=schedule,
                        microbatches=number,
                        recompute=recompute,
                        reshard=reshard,
                        precision=request.precision,
                        sequence_parallel=split,
                    )
                )
            except InvalidInput:
                # This combination is not legal; others may be.
                continue


def _is_legal(request: LayoutRequest, mesh: MeshShape, schedule: str, microbatches: int) -> bool:
    try:
        request.job(ParallelSettings(mesh=mesh, schedule=schedule, microbatches=microbatches))
    except InvalidInput:
        return False
    return True


def _memory(job: Job, request: LayoutRequest) -> Memory:
    return worst_memory(job, fused_norms=request.machine.hardware.name != "cpu")


def _choice(job: Job, memory: Memory, request: LayoutRequest) -> LayoutChoice:
    timing = predict_timing(job, request.machine)
    return LayoutChoice(
        job=job, timing=timing, memory=memory, machine=request.machine, memory_bytes=request.memory_bytes
    )


def _least_parameter_bytes(job: Job) -> int:
    """Return a lower bound of a rank's parameters and optimizer state, for every schedule on the mesh of the job."""
    facts, pp = job.facts, job.parallel.mesh.pp
    layers = facts.sizes.num_layers // pp * job.layer_values
    return (1 + STATE_VALUES[job.training.optimizer]) * job.full_bytes * layers


def _nothing_fits(request: LayoutRequest) -> InvalidInput:
    """Return the error for a model that fits no mesh, with the least memory that a layout needs."""
    least = min(
        ((_memory(job, request).total, describe(job.parallel)) for job in jobs(request)),
        key=lambda each: each[0],
        default=None,
    )
    if least is None:
        sizes = request.facts.sizes
        return InvalidInput(
            f"plan: no mesh of {request.world} ranks fits {request.facts.name}: {sizes.num_layers} layers, "
            f"{sizes.num_heads} heads, {sizes.num_kv_heads} kv heads, feed-forward {sizes.feed_forward}, batch "
            f"{request.batch_size}; use a batch that is a multiple of the ranks, or another number of ranks",
            code="FN-1380",
        )
    return InvalidInput(
        f"plan: {request.facts.name} does not fit: got {gigabytes(request.memory_bytes)} a rank, expected at least "
        f"{gigabytes(least[0])}, which {least[1]} needs; give each rank more memory, or use more ranks, a "
        "shorter sequence or a smaller batch",
        code="FN-1381",
    )


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
