"""The collectives between ranks of a datacenter job, checked against numpy and timed.

    python benchmarks/collectives.py --json FILE

The bandwidths are defined as in nccl-tests. The report includes the measured link as a value for ``fanin plan --link``,
and next to each time the planner's prediction for that link.
"""

import json as codec
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fanin.commands.bench.harness.report import machine
from fanin.commands.console.terminal import JsonOption, prints_text, run_command, write_json
from fanin.commands.console.usage import wrong_usage
from fanin.protos.errors import Conflict, InvalidInput

if TYPE_CHECKING:
    from fanin.datacenter.network.bandwidths import CollectivesReport

GIGABYTE: Final = 10**9
MEGABYTE: Final = 2**20
DEFAULT_MEGABYTES: Final = (0.001, 1.0, 16.0)
PROGRAM: Final = "fanin.datacenter.network.bandwidths"
COLUMNS: Final = ("collective", "MB", "median ms", "algbw GB/s", "busbw GB/s", "sent MB", "planned ms")


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    return run_command(collectives, argv, "benchmarks/collectives.py", "python")


def collectives(
    nproc: Annotated[int, typer.Option("--nproc", help="Number of ranks, all on this machine.")] = 4,
    megabytes: Annotated[
        list[float] | None, typer.Option("--megabytes", help="Size of the tensor; repeatable.")
    ] = None,
    backend: Annotated[str, typer.Option("--backend", help="gloo, or nccl with one GPU a rank.")] = "gloo",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Number of measurements of each.")] = 10,
    json: JsonOption = "",
) -> None:
    """Check and time all collectives between ranks, and report the link that results."""
    # Importing torch takes seconds.
    from fanin.datacenter.config.records import record_of
    from fanin.datacenter.jobs.torchrun import failure_reason, run_ranks
    from fanin.datacenter.network.bandwidths import CollectivesReport, check_backend

    wanted = megabytes or DEFAULT_MEGABYTES
    with wrong_usage():
        check_backend(backend, nproc)
        for size in wanted:
            if not 1.0 <= size * MEGABYTE < inf:
                raise InvalidInput(f"--megabytes: got {size}, expected positive numbers")
    sizes = [round(size * MEGABYTE) for size in wanted]
    with tempfile.TemporaryDirectory(prefix="fanin-bench-") as scratch:
        folder, out = Path(scratch), Path(scratch) / "found.json"
        status = run_ranks([PROGRAM, str(out), backend, str(repeats), *map(str, sizes)], nproc, folder)
        if not out.exists():
            raise Conflict(f"{failure_reason(folder, status)}")
        report = record_of(CollectivesReport, codec.loads(out.read_bytes()), str(out))
    if report.faults:
        raise Conflict(f"{len(report.faults)} of {report.num_checked} are wrong: {report.faults[0]}")
    if json:
        write_json(json, {"nproc": nproc, "backend": backend, **_row(report), "machine": machine()})
    if prints_text(json):
        sys.stdout.write(_text(nproc, backend, report))


def _row(report: "CollectivesReport") -> dict[str, object]:
    link = {"gb_per_second": report.link.bytes_per_second / GIGABYTE, "latency_seconds": report.link.latency_s}
    return {"checked": report.num_checked, "link": link, "collectives": [asdict(each) for each in report.timings]}


def _text(nproc: int, backend: str, report: "CollectivesReport") -> str:
    rows: list[tuple[str, ...]] = [COLUMNS]
    for each in report.timings:
        numbers = (
            each.size_bytes / MEGABYTE,
            each.seconds * 1e3,
            each.algbw_gb_per_second,
            each.busbw_gb_per_second,
            each.wire_bytes / MEGABYTE,
            each.predicted_seconds * 1e3,
        )
        rows.append((each.collective, *(f"{number:.4g}" for number in numbers)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = [
        "  ".join(f"{cell:{width}}" if not column else f"{cell:>{width}}" for column, (cell, width) in enumerate(cells))
        for cells in (zip(row, widths, strict=True) for row in rows)
    ]
    speed, latency_us = report.link.bytes_per_second / GIGABYTE, report.link.latency_s * 1e6
    lines += [
        f"{report.num_checked} results of {nproc} ranks over {backend} are numpy's; bytes are those of the formulas",
        f"the link, of all-reduces: fanin plan --link {speed:.3g} ({latency_us:.0f} us from rank to rank)",
    ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
