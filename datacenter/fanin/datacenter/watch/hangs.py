"""Hang diagnosis: detects the rank that blocks a job, from the reports of the ranks.

When a job makes no progress, the watchdog of each rank (``watchdog``) reports the rank's activity. It writes the report
to ``hang/attempt-0/rank-3.json`` in the job's folder. The launcher and the watchdogs read the reports and name the
ranks at fault. The first rule that matches any rank decides:

1. A rank without a report hangs: its process is gone, stopped, or stuck outside of Python.
2. A rank that does not wait for another rank hangs: the others wait for it.
3. A rank hangs if it has started fewer collectives than another rank that waits for it in one.

If no rule matches, all ranks wait for each other. The diagnosis then lists the operation that each of them waits for.

The launcher runs this code, so it does not import torch.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from fanin.datacenter.ranks.mesh import AXES, MeshShape
from fanin.protos.errors import InvalidInput

FOLDER: Final = "hang"


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingOperation:
    """A collective or a message that a rank has started and that has not ended.

    Attributes:
        axis: Mesh axis of the process group.
        kind: Name of the operation, such as ``all_reduce``.
        ranks: Ranks of the process group.
        sequence: Number of the collective in its group, from 1; 0 if it is unknown, as for messages.
    """

    axis: str
    kind: str
    ranks: tuple[int, ...]
    sequence: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HangReport:
    """The activity of one rank when its watchdog noticed the hang.

    Attributes:
        rank: The rank.
        mesh: The job's mesh, as ``MeshShape`` prints it.
        step: Optimizer steps completed.
        still_s: Seconds without progress.
        waits: The operation that the rank waits in, or None.
        module: Name of the innermost module, or "" outside of the model.
        phase: ``forward`` or ``backward`` inside ``module``; ``after`` if ``module`` is the last one of this step.
        line: Innermost Python line that is not torch's own.
        done: Number of the last collective that the rank has started, by axis.
    """

    rank: int
    mesh: str
    step: int
    still_s: float
    waits: PendingOperation | None
    module: str
    phase: str
    line: str
    done: Mapping[str, int]


def attempt_folder(folder: Path, attempt: int) -> Path:
    """Return the folder for the reports of one attempt, inside a job's folder."""
    return folder / FOLDER / f"attempt-{attempt}"


def report_name(rank: int | str) -> str:
    """Return the file name of a rank's report; ``*`` gives the pattern for all of them."""
    return f"rank-{rank}.json"


def write_report(folder: Path, report: HangReport) -> None:
    """Write a report into an attempt's folder, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"rank-{report.rank}.new"
    draft.write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")
    draft.replace(folder / report_name(report.rank))


def read_reports(folder: Path) -> dict[int, HangReport]:
    """Return the reports of an attempt by rank. Unreadable reports are treated as missing."""
    reports = (_read_report(path) for path in _paths(folder, report_name("*")))
    return {report.rank: report for report in reports if report is not None}


def explain(folder: Path, since_ns: int = 0) -> str | None:
    """Return the diagnosis of the last attempt that left reports in a job's folder.

    Args:
        folder: The job's folder.
        since_ns: Ignore attempts without a report newer than this time, in nanoseconds on the folder's clock.

    Returns:
        The diagnosis, or None if no attempt left a report.
    """
    attempts = sorted(_paths(folder / FOLDER, "attempt-*"), key=lambda path: path.name.rpartition("-")[2].zfill(9))
    for path in reversed(attempts):
        reports = read_reports(path)
        if reports and max(map(_modified_ns, _paths(path, report_name("*"))), default=0) >= since_ns:
            return diagnose(reports)
    return None


def diagnose(reports: Mapping[int, HangReport]) -> str:
    """Return one sentence that names the ranks that hang, or lists the waits of all ranks."""
    first = min(reports.values(), key=lambda report: report.rank)
    shape = MeshShape.parse(first.mesh)
    suspects = _suspects(reports, shape.num_ranks)
    if not suspects:
        return "all ranks wait for each other: " + "; ".join(_waiting(reports[rank], shape) for rank in sorted(reports))
    return "; ".join(_accusation(rank, reports, shape) for rank in suspects)


def _suspects(reports: Mapping[int, HangReport], num_ranks: int) -> list[int]:
    absent = [rank for rank in range(num_ranks) if rank not in reports]
    idle = [rank for rank, report in sorted(reports.items()) if report.waits is None]
    return absent or idle or [rank for rank in sorted(reports) if _is_behind(reports[rank], reports.values())]


def _is_behind(report: HangReport, others: Iterable[HangReport]) -> bool:
    return any(
        report.rank in other.waits.ranks and report.done.get(other.waits.axis, 0) < other.waits.sequence
        for other in others
        if other.waits is not None
    )


def _accusation(rank: int, reports: Mapping[int, HangReport], shape: MeshShape) -> str:
    others = [report for report in reports.values() if report.rank != rank]
    waiting = [report for report in others if report.waits is not None and rank in report.waits.ranks]
    # The innermost mesh axis communicates most often, so its ranks name the missing operation most precisely.
    witness = min(waiting, key=lambda report: (-_depth(report), report.rank), default=None)
    own = reports.get(rank)
    state = "left no report: it is gone, stopped, or stuck outside of Python" if own is None else f"is {_place(own)}"
    if witness is None:
        return f"{_name(rank, shape)} hangs; it {state}"
    return f"{_name(rank, shape)} hangs: {_waiting(witness, shape)}; it {state}"


def _waiting(report: HangReport, shape: MeshShape) -> str:
    waits = report.waits
    operation = "no collective" if waits is None else f"{waits.kind} over {waits.axis}"
    return f"{_name(report.rank, shape)} waits in {operation} {_place(report)}, for {report.still_s:.1f} s"


def _place(report: HangReport) -> str:
    where = f"after {report.module}" if report.phase == "after" else f"in {report.module}, {report.phase}"
    return f"{where if report.module else 'outside of the model'}, step {report.step + 1}, {report.line}"


def _name(rank: int, shape: MeshShape) -> str:
    return f"rank {rank} ({_coordinates(rank, list(shape.sizes.items()))})"


def _coordinates(rank: int, sizes: Sequence[tuple[str, int]]) -> str:
    """Return a rank's coordinate along each axis with more than one rank."""
    coordinates = []
    for index, (axis, size) in enumerate(sizes):
        inner = math.prod(each for _, each in sizes[index + 1 :])
        if size > 1:
            coordinates.append(f"{axis} {rank // inner % size}")
    return ", ".join(coordinates) or "alone"


def _depth(report: HangReport) -> int:
    return AXES.index(report.waits.axis) if report.waits is not None and report.waits.axis in AXES else -1


def _paths(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a folder that match. The first rank may remove the folder at any time, on any machine."""
    try:
        return [path for path in folder.iterdir() if fnmatchcase(path.name, pattern)]
    except OSError:
        return []


def _modified_ns(path: Path) -> int:
    """Return when a report was written; 0 if it was removed together with its attempt."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _read_report(path: Path) -> HangReport | None:
    try:
        row = json.loads(path.read_bytes())
        waits = row.pop("waits")
        pending = None if waits is None else PendingOperation(**{**waits, "ranks": tuple(waits["ranks"])})
        report = HangReport(**row, waits=pending)
        MeshShape.parse(report.mesh)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, InvalidInput):
        return None
    return report
