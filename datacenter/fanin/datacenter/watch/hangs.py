"""Who hangs: what each rank of a job that stands still has left, and the one sentence that follows from it.

A rank's watchdog (``watchdog``) leaves ``hang/attempt-0/rank-3.json`` in the job's folder. The one that
hangs is whoever left nothing (stopped, or stuck outside of Python), or else waits for nobody, or else is behind the
others in a collective that they wait in. Needs no torch: the launcher asks.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from fanin.datacenter.parallel.mesh import AXES, MeshShape
from fanin.protos.errors import InvalidInput

FOLDER: Final = "hang"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A collective or message that has not ended: over which axis, of which ranks, the how manieth of theirs.

    ``sequence`` is 0 where that is not known, as of messages.
    """

    axis: str
    kind: str
    ranks: tuple[int, ...]
    sequence: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a rank was at. ``done``: axis to the number of the last collective that it has begun there.

    ``phase`` is ``forward`` or ``backward`` within ``module``, or ``after``: the last one it was in, in this step.
    ``line`` is the innermost line that is not torch's.
    """

    rank: int
    mesh: str
    step: int
    still_s: float
    waits: Wait | None
    module: str
    phase: str
    line: str
    done: Mapping[str, int]


def attempt_folder(folder: Path, attempt: int) -> Path:
    """Where the ranks of an attempt leave word, in a job's folder."""
    return folder / FOLDER / f"attempt-{attempt}"


def report_name(rank: int | str) -> str:
    """What a rank's report is called; ``*`` for all of them."""
    return f"rank-{rank}.json"


def write_report(folder: Path, report: Report) -> None:
    """Leave word in an attempt's folder, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"rank-{report.rank}.new"
    draft.write_text(json.dumps(asdict(report), indent=1))
    draft.replace(folder / report_name(report.rank))


def read_reports(folder: Path) -> dict[int, Report]:
    """The reports of an attempt by rank; one that cannot be read is as good as none."""
    found = (_report(path) for path in _paths(folder, report_name("*")))
    return {report.rank: report for report in found if report is not None}


def explain(folder: Path, since_ns: int = 0) -> str | None:
    """Who hung in the last attempt that left reports in a job's folder, since then on its clock; None if none did."""
    attempts = sorted(_paths(folder / FOLDER, "attempt-*"), key=lambda path: path.name.rpartition("-")[2].zfill(9))
    for path in reversed(attempts):
        reports = read_reports(path)
        if reports and max(map(_written_ns, _paths(path, report_name("*"))), default=0) >= since_ns:
            return sentence(reports)
    return None


def sentence(reports: Mapping[int, Report]) -> str:
    """Names the rank that hangs, or says that none can be told apart."""
    some = min(reports.values(), key=lambda report: report.rank)
    shape = MeshShape.parse(some.mesh)
    suspects = _suspects(reports, shape.num_ranks)
    if not suspects:
        return "all ranks wait for each other: " + "; ".join(_waiting(reports[rank], shape) for rank in sorted(reports))
    return "; ".join(_accusation(rank, reports, shape) for rank in suspects)


def _suspects(reports: Mapping[int, Report], num_ranks: int) -> list[int]:
    absent = [rank for rank in range(num_ranks) if rank not in reports]
    idle = [rank for rank, report in sorted(reports.items()) if report.waits is None]
    return absent or idle or [rank for rank in sorted(reports) if _is_behind(reports[rank], reports.values())]


def _is_behind(report: Report, others: Iterable[Report]) -> bool:
    return any(
        report.rank in other.waits.ranks and report.done.get(other.waits.axis, 0) < other.waits.sequence
        for other in others
        if other.waits is not None
    )


def _accusation(rank: int, reports: Mapping[int, Report], shape: MeshShape) -> str:
    others = [report for report in reports.values() if report.rank != rank]
    waiting = [report for report in others if report.waits is not None and rank in report.waits.ranks]
    # Ranks that speak most often with it know best what it did not come to: those furthest in on the mesh.
    direct = min(waiting, key=lambda report: (-_depth(report), report.rank), default=None)
    mine = reports.get(rank)
    left = "left no word: it is gone, stopped, or stuck outside of Python" if mine is None else f"is {_place(mine)}"
    if direct is None:
        return f"{_name(rank, shape)} hangs; it {left}"
    return f"{_name(rank, shape)} hangs: {_waiting(direct, shape)}; it {left}"


def _waiting(report: Report, shape: MeshShape) -> str:
    waits = report.waits
    what = "no collective" if waits is None else f"{waits.kind} over {waits.axis}"
    return f"{_name(report.rank, shape)} waits in {what} {_place(report)}, for {report.still_s:.1f} s"


def _place(report: Report) -> str:
    where = f"after {report.module}" if report.phase == "after" else f"in {report.module}, {report.phase}"
    return f"{where if report.module else 'outside of the model'}, step {report.step + 1}, {report.line}"


def _name(rank: int, shape: MeshShape) -> str:
    return f"rank {rank} ({_coordinates(rank, list(shape.sizes.items()))})"


def _coordinates(rank: int, sizes: Sequence[tuple[str, int]]) -> str:
    """Where a rank stands along each axis that has more than one."""
    found = []
    for index, (axis, size) in enumerate(sizes):
        inner = math.prod(each for _, each in sizes[index + 1 :])
        if size > 1:
            found.append(f"{axis} {rank // inner % size}")
    return ", ".join(found) or "alone"


def _depth(report: Report) -> int:
    return AXES.index(report.waits.axis) if report.waits is not None and report.waits.axis in AXES else -1


def _paths(folder: Path, pattern: str) -> list[Path]:
    """What is there of such names. Of several machines, the first rank may remove the folder at any moment."""
    try:
        return [path for path in folder.iterdir() if fnmatchcase(path.name, pattern)]
    except OSError:
        return []


def _written_ns(path: Path) -> int:
    """When a report was written; 0 if it is gone, with the attempt that it was of."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _report(path: Path) -> Report | None:
    try:
        row = json.loads(path.read_bytes())
        waits = row.pop("waits")
        report = Report(**row, waits=None if waits is None else Wait(**{**waits, "ranks": tuple(waits["ranks"])}))
        MeshShape.parse(report.mesh)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, InvalidInput):
        return None
    return report
