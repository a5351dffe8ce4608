"""How fast ranks speak: the program of each rank behind ``fanin bench collectives``.

    python -m torch.distributed.run --nproc-per-node N \\
        -m fanin.datacenter.network.bandwidths OUT.json BACKEND REPEATS BYTES...

Every collective is checked, and then timed for tensors of so many bytes, from a barrier to the end on the slowest rank;
what one call sends is counted. Bandwidths are those of nccl-tests (https://github.com/NVIDIA/nccl-tests,
doc/PERFORMANCE.md): ``algbw`` is size / time, the size that of the whole tensor; ``busbw`` is that times what a link
carries of each byte, so that it compares with a link's speed whatever the number of ranks.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fanin.datacenter.jobs.devices import rank_device
from fanin.datacenter.jobs.elastic import end_with_parent, process_group
from fanin.datacenter.jobs.jobfiles import write_file
from fanin.datacenter.jobs.records import row_of
from fanin.datacenter.network.collectives import COLLECTIVES, GLOO, RING, check
from fanin.datacenter.network.counters import ALL_REDUCE, Amount, ByteCounter
from fanin.datacenter.planner.links import Link
from fanin.protos.errors import InvalidInput

NCCL: Final = "nccl"
RANKS: Final = "ranks"
WARM_UP: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One collective of one size.

    ``calls`` and ``counted_bytes``: what a call is by fanin's counter, and should be (``expected_bytes``);
    ``wire_bytes``: what each rank of a ring sends for it; ``predicted_seconds``: the planner's, of the link found.
    """

    collective: str
    size_bytes: int
    seconds: float
    seconds_samples: tuple[float, ...]
    calls: int
    counted_bytes: int
    expected_bytes: int
    wire_bytes: float
    algbw_gb_per_second: float
    busbw_gb_per_second: float
    predicted_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came of it: how many results were ``checked`` on all ranks, what was ``wrong``, and the measurements."""

    checked: int
    wrong: tuple[str, ...]
    link: Link
    measured: tuple[Measured, ...]


def measure(name: str, size_bytes: int, repeats: int, device: torch.device) -> Measured:
    """Time a collective, on all ranks together."""
    collective, num_ranks = COLLECTIVES[name], dist.get_world_size()
    # As nccl-tests have it: of a gather the size is that of what comes out.
    num = max(1, size_bytes // 4 // num_ranks) * num_ranks
    mine = torch.zeros(num // num_ranks if collective.shared else num, device=device)
    seconds = []
    for _ in range(WARM_UP + repeats):
        dist.barrier()
        started_s = time.perf_counter()
        collective.call(mine, dist.ReduceOp.SUM)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started_s)
    slowest = torch.tensor(seconds[WARM_UP:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    with ByteCounter(init_device_mesh(device.type, (num_ranks,), mesh_dim_names=(RANKS,))) as counter:
        collective.call(mine, dist.ReduceOp.SUM)
    (counted,) = counter.counts.values()
    size, time_s = 4 * num, median(slowest.tolist())
    # The ring's messages are all that it sends: they are to be what the formula says of an all-reduce.
    by_hand = Amount(num_calls=1, size_bytes=size).wire_bytes(ALL_REDUCE, num_ranks)
    return Measured(
        collective=name,
        size_bytes=size,
        seconds=time_s,
        seconds_samples=tuple(slowest.tolist()),
        calls=counted.num_calls,
        counted_bytes=counted.size_bytes,
        expected_bytes=round(by_hand) if name == RING else size,
        wire_bytes=counted.wire_bytes(collective.kind, num_ranks),
        algbw_gb_per_second=size / time_s / 1e9,
        busbw_gb_per_second=size / time_s / 1e9 * collective.bus(num_ranks),
    )


def link_found(rows: Sequence[Measured], num_ranks: int) -> Link:
    """What ranks are connected by, as the planner has it, from the smallest and the largest all-reduce."""
    mine = sorted((row for row in rows if row.collective == "all_reduce"), key=lambda row: row.size_bytes)
    small, large = mine[0], mine[-1]
    hops = 2 * (num_ranks - 1)
    bytes_per_second, latency_s = large.wire_bytes / large.seconds, 0.0
    if large.seconds > small.seconds and large.size_bytes > small.size_bytes:
        bytes_per_second = (large.wire_bytes - small.wire_bytes) / (large.seconds - small.seconds)
        latency_s = max(0.0, small.seconds - small.wire_bytes / bytes_per_second) / hops
    return Link(name="measured", latency_s=latency_s, bytes_per_second=bytes_per_second, source="all-reduces")


def predicted_seconds(row: Measured, link: Link, num_ranks: int) -> float:
    """How long the planner would say that it takes."""
    amount = Amount(num_calls=row.calls, size_bytes=row.counted_bytes)
    return link.seconds(COLLECTIVES[row.collective].kind, amount, num_ranks)


def check_backend(backend: str, num_ranks: int) -> None:
    """Raise InvalidInput unless so many ranks of this machine can speak through it."""
    if num_ranks < 2:
        raise InvalidInput(f"ranks: got {num_ranks}, expected at least 2: one sends nothing")
    if backend not in (GLOO, NCCL):
        raise InvalidInput(f"backend: got {backend!r}, expected {GLOO} or {NCCL}")
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == NCCL and num_devices < num_ranks:
        raise InvalidInput(
            f"backend: got {NCCL!r} for {num_ranks} ranks, expected a GPU for each, and there are "
            f"{num_devices}; take {GLOO}"
        )


def main(arguments: Sequence[str]) -> int:
    """Check and measure on this rank; the first one writes what was found."""
    end_with_parent()
    out, backend, repeats, *sizes = arguments
    kind = "cuda" if backend == NCCL else "cpu"
    with process_group(device=kind) as (rank, num_ranks):
        device = rank_device(kind)
        num, wrong = check(device, backend)
        told: list[list[str]] = [[] for _ in range(num_ranks)]
        dist.all_gather_object(told, wrong)
        rows = [measure(name, int(size), int(repeats), device) for name in COLLECTIVES for size in sizes]
        if rank == 0:
            faults = [each for one in told for each in one]
            for row in rows:
                if row.counted_bytes != row.expected_bytes:
                    what = f"{row.collective} of {row.size_bytes} bytes"
                    faults.append(f"{what}: got {row.counted_bytes} bytes sent, expected {row.expected_bytes}")
            link = link_found(rows, num_ranks)
            measured = tuple(replace(row, predicted_seconds=predicted_seconds(row, link, num_ranks)) for row in rows)
            found = Found(checked=num * num_ranks, wrong=tuple(faults), link=link, measured=measured)
            write_file(Path(out), json.dumps(row_of(found)).encode())
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    status = main(sys.argv[1:])
    # As a job's ranks (job.py): gloo's threads may outlive the statics that they use.
    os._exit(status)
