"""Measures the bandwidth between ranks: the program that ``python benchmarks/collectives.py`` runs on each rank.

    python -m torch.distributed.run --nproc-per-node N \\
        -m fanin.datacenter.network.bandwidths OUT.json BACKEND REPEATS BYTES...

Every collective is checked first. It is then timed for tensors of BYTES bytes, from a barrier to its end on the slowest
rank. The bytes of one call are counted.

Bandwidths are defined as in nccl-tests. ``algbw`` is the size of the full tensor divided by the time. ``busbw`` is
``algbw`` times the share of each byte that a link carries. So it is comparable with the speed of a link for any number
of ranks.

Reference:
    https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fanin.datacenter.config.records import row_of
from fanin.datacenter.files.jobfiles import write_file
from fanin.datacenter.network.collectives import COLLECTIVES, GLOO, RING, check
from fanin.datacenter.network.counters import ALL_REDUCE, Amount, ByteCounter
from fanin.datacenter.network.links import Link
from fanin.datacenter.ranks.devices import rank_device
from fanin.datacenter.ranks.elastic import end_with_parent, process_group
from fanin.protos.errors import InvalidInput

NCCL: Final = "nccl"
RANKS: Final = "ranks"
WARM_UP: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTiming:
    """The time and the bytes of one collective for one tensor size.

    Attributes:
        collective: its name in ``COLLECTIVES``.
        size_bytes: size of the full tensor.
        seconds: median time on the slowest rank.
        seconds_samples: the time of each repetition on the slowest rank.
        calls: operator calls that the counter saw in one call.
        counted_bytes: payload that the counter saw in one call.
        expected_bytes: payload by formula.
        wire_bytes: bytes that each rank sends in a ring.
        algbw_gb_per_second: algorithm bandwidth, as nccl-tests defines it.
        busbw_gb_per_second: bus bandwidth, as nccl-tests defines it.
        predicted_seconds: time that the planner predicts for the measured link.
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
class CollectivesReport:
    """The result of a benchmark of all collectives.

    Attributes:
        num_checked: results that were compared with numpy, on all ranks.
        faults: descriptions of wrong results and wrong byte counts.
        link: the link between the ranks, fitted to the times.
        timings: one for each collective and size.
    """

    num_checked: int
    faults: tuple[str, ...]
    link: Link
    timings: tuple[CollectiveTiming, ...]


def measure(name: str, size_bytes: int, repeats: int, device: torch.device) -> CollectiveTiming:
    """Time one collective. All ranks call this function together.

    Args:
        name: a key of ``COLLECTIVES``.
        size_bytes: size of the full tensor, rounded down to a multiple of the number of ranks.
        repeats: timed repetitions.
        device: where the tensor is stored.
    """
    collective, num_ranks = COLLECTIVES[name], dist.get_world_size()
    # As in nccl-tests, the size of a gather is that of its output.
    num = max(1, size_bytes // 4 // num_ranks) * num_ranks
    tensor = torch.zeros(num // num_ranks if collective.shared else num, device=device)
    seconds = []
    for _ in range(WARM_UP + repeats):
        dist.barrier()
        started_s = time.perf_counter()
        collective.call(tensor, dist.ReduceOp.SUM)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started_s)
    slowest = torch.tensor(seconds[WARM_UP:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    with ByteCounter(init_device_mesh(device.type, (num_ranks,), mesh_dim_names=(RANKS,))) as counter:
        collective.call(tensor, dist.ReduceOp.SUM)
    (counted,) = counter.counts.values()
    size, time_s = 4 * num, median(slowest.tolist())
    # The ring sends only point-to-point messages. Their bytes must equal the formula of an all-reduce.
    ring_bytes = Amount(num_calls=1, size_bytes=size).wire_bytes(ALL_REDUCE, num_ranks)
    return CollectiveTiming(
        collective=name,
        size_bytes=size,
        seconds=time_s,
        seconds_samples=tuple(slowest.tolist()),
        calls=counted.num_calls,
        counted_bytes=counted.size_bytes,
        expected_bytes=round(ring_bytes) if name == RING else size,
        wire_bytes=counted.wire_bytes(collective.kind, num_ranks),
        algbw_gb_per_second=size / time_s / 1e9,
        busbw_gb_per_second=size / time_s / 1e9 * collective.bus(num_ranks),
    )


def fit_link(rows: Sequence[CollectiveTiming], num_ranks: int) -> Link:
    """Fit the planner's link to the times of the smallest and the largest all-reduce."""
    all_reduces = sorted((row for row in rows if row.collective == "all_reduce"), key=lambda row: row.size_bytes)
    small, large = all_reduces[0], all_reduces[-1]
    hops = 2 * (num_ranks - 1)
    bytes_per_second, latency_s = large.wire_bytes / large.seconds, 0.0
    if large.seconds > small.seconds and large.size_bytes > small.size_bytes:
        bytes_per_second = (large.wire_bytes - small.wire_bytes) / (large.seconds - small.seconds)
        latency_s = max(0.0, small.seconds - small.wire_bytes / bytes_per_second) / hops
    return Link(name="measured", latency_s=latency_s, bytes_per_second=bytes_per_second, source="all-reduces")


def predicted_seconds(row: CollectiveTiming, link: Link, num_ranks: int) -> float:
    """Return the time that the planner predicts for a collective over this link."""
    amount = Amount(num_calls=row.calls, size_bytes=row.counted_bytes)
    return link.seconds(COLLECTIVES[row.collective].kind, amount, num_ranks)


def check_backend(backend: str, num_ranks: int) -> None:
    """Raise InvalidInput unless ``num_ranks`` ranks of this machine can communicate through the backend."""
    if num_ranks < 2:
        raise InvalidInput(f"ranks: got {num_ranks}, expected at least 2: a single rank sends nothing", code="FN-1370")
    if backend not in (GLOO, NCCL):
        raise InvalidInput(f"backend: got {backend!r}, expected {GLOO} or {NCCL}", code="FN-1370")
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == NCCL and num_devices < num_ranks:
        raise InvalidInput(
            f"backend: got {NCCL!r} for {num_ranks} ranks, expected a GPU for each, and there are "
            f"{num_devices}; use {GLOO}",
            code="FN-1370",
        )


def main(arguments: Sequence[str]) -> int:
    """Check and time the collectives on this rank. The first rank writes the report."""
    torch.set_num_threads(1)
    end_with_parent()
    out, backend, repeats, *sizes = arguments
    kind = "cuda" if backend == NCCL else "cpu"
    with process_group(device=kind) as (rank, num_ranks):
        device = rank_device(kind)
        num_checked, faults = check(device, backend)
        faults_of_ranks: list[list[str]] = [[] for _ in range(num_ranks)]
        dist.all_gather_object(faults_of_ranks, faults)
        rows = [measure(name, int(size), int(repeats), device) for name in COLLECTIVES for size in sizes]
        if rank == 0:
            faults = [fault for each in faults_of_ranks for fault in each]
            for row in rows:
                if row.counted_bytes != row.expected_bytes:
                    name = f"{row.collective} of {row.size_bytes} bytes"
                    faults.append(f"{name}: got {row.counted_bytes} bytes sent, expected {row.expected_bytes}")
            link = fit_link(rows, num_ranks)
            timings = tuple(replace(row, predicted_seconds=predicted_seconds(row, link, num_ranks)) for row in rows)
            report = CollectivesReport(
                num_checked=num_checked * num_ranks, faults=tuple(faults), link=link, timings=timings
            )
            write_file(Path(out), json.dumps(row_of(report)).encode())
    return 0
