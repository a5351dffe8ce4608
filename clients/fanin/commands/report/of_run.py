"""The report of a Run: from its events so far, its description and the evaluations on held-out data."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby

from fanin.commands.display.plans import plan_sections
from fanin.commands.display.rounds import RoundLine
from fanin.commands.report.content import Chart, Content, Grid
from fanin.protos.chunks import short
from fanin.protos.messages import (
    LoggedEvent,
    RoundClosed,
    RoundFailed,
    RunDescription,
    RunInfo,
    RunRested,
    RunState,
    VersionEvaluation,
    VersionPublished,
)
from fanin.protos.texts import counted, lasted, sized

MAX_ROWS = 500
"""Rows of the table of Rounds; the newest ones."""
VERSION, ROUND = "Version", "Round"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The result of ``fanin verify``: the number of Versions, and what is wrong with some of them."""

    num_versions: int
    problems: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRun:
    """What a coordinator knows of a Run.

    Attributes:
        description: The Run.
        events: Its events so far.
        evaluations: Those of its Versions on held-out data.
        verified: The result of a verification; None without one.
    """

    description: RunDescription
    events: Sequence[LoggedEvent]
    evaluations: Sequence[VersionEvaluation]
    verified: Verified | None


def events_so_far(info: RunInfo, events: Iterable[LoggedEvent]) -> list[LoggedEvent]:
    """Return the events of a Run up to the state in which it was described. ``events`` waits for more of them."""
    needed: set[object] = {info.version} if info.version else set()
    needed |= {info.state} if info.state is not RunState.RUNNING else set()
    read = []
    for entry in events if needed else ():
        read.append(entry)
        match entry.event:
            case VersionPublished(number=number):
                needed.discard(number)
            case RunRested(state=state):
                needed.discard(state)
            case _:
                pass
        if not needed:
            break
    return read


def content_of_run(record: ReportedRun) -> Content:
    """Return the report of a Run."""
    info = record.description.run
    lines = _lines(record.events)
    is_good = info.state in (RunState.RUNNING, RunState.FINISHED) and not (record.verified and record.verified.problems)
    return Content(
        name=info.run_id,
        kind="run",
        state=info.state.value,
        is_good=is_good,
        reason=info.reason,
        figures=_figures(record, lines),
        warnings=[warning.text for warning in record.description.warnings],
        charts=[*_quality(record, lines), *_costs(lines)],
        tables=_tables(record, lines),
    )


def _lines(events: Sequence[LoggedEvent]) -> list[RoundLine]:
    accepted = {entry.event.round: entry.event.num_accepted for entry in events if isinstance(entry.event, RoundClosed)}
    published = [entry.event for entry in events if isinstance(entry.event, VersionPublished)]
    return [RoundLine(version=each, num_devices=accepted.get(each.round)) for each in published if each.round]


def _participations(events: Sequence[LoggedEvent]) -> Counter[str]:
    """Return the number of Rounds of each device. An event lists at most 1,000 of its devices."""
    closed = [entry.event for entry in events if isinstance(entry.event, RoundClosed)]
    return Counter(device for event in closed for device in event.accepted)


def _figures(record: ReportedRun, lines: Sequence[RoundLine]) -> list[tuple[str, str, str]]:
    info, figures = record.description.run, []
    measured = next((line for line in reversed(lines) if line.accuracies != ("", "")), None)
    if measured is not None:
        in_float, in_int8 = measured.accuracies
        remark = f"of Version {measured.version.parent}, on the devices"
        figures += [("Accuracy, float", in_float, remark)] * bool(in_float)
        figures.append(("Accuracy, int8" if in_float else "Cost of int8", in_int8, remark))
    figures.append(("Rounds", str(info.num_rounds), f"of {info.max_rounds} planned"))
    figures.append(("Version", str(info.version), short(info.version_sha256)))
    num_devices = len(_participations(record.events))
    figures.append(("Devices", str(num_devices), f"took part, of {record.description.num_devices} enrolled"))
    if lines:
        median = statistics.median(line.version.round_s for line in lines)
        figures.append(("A Round", lasted(median), "median"))
        down, up = (sum(getattr(line.version, name) for line in lines) for name in ("bytes_down", "bytes_up"))
        figures.append(("Traffic", sized(down + up), f"{sized(down)} down, {sized(up)} up"))
    figures.append(_verified_figure(info.run_id, record.verified))
    return figures


def _verified_figure(run_id: str, verified: Verified | None) -> tuple[str, str, str]:
    if verified is None:
        return "Verified", "not checked", f"fanin verify {run_id} does"
    if verified.problems:
        return "Verified", "no", f"{len(verified.problems)} of {counted(verified.num_versions, 'Version')} fail"
    return "Verified", "yes", counted(verified.num_versions, "Version")


def _quality(record: ReportedRun, lines: Sequence[RoundLine]) -> list[Chart]:
    on_devices = [line.version for line in lines if line.version.evaluation is not None]
    labelled = [(each.parent, each.evaluation) for each in on_devices if each.evaluation and each.evaluation.has_labels]
    trained = [(line.version.number, line.version.train_loss) for line in lines if line.version.train_loss_examples]
    charts = [
        Chart(
            title="Accuracy on the devices",
            x_label=VERSION,
            series={
                "float": [(number, each.accuracy_float) for number, each in labelled],
                "int8": [(number, each.accuracy_int8) for number, each in labelled],
            },
            note="On the validation parts of the devices of the next Round. No device evaluates the last Version.",
        ),
        Chart(
            title="Loss on the devices",
            x_label=VERSION,
            series={
                "training": trained,
                "validation": [(each.parent, each.evaluation.loss) for each in on_devices if each.evaluation],
            },
        ),
    ]
    good = [each for each in record.evaluations if not each.problem]
    names = dict.fromkeys(name.removesuffix("_int8") for each in good for name in each.values)
    for name in names:
        both = {
            label: [(each.version, each.values[key]) for each in good if key in each.values]
            for label, key in (("float", name), ("int8", f"{name}_int8"))
        }
        charts.append(Chart(title=f"{name} on held-out data", x_label=VERSION, series=both))
    return charts


def _costs(lines: Sequence[RoundLine]) -> list[Chart]:
    def of(name: str) -> list[tuple[float, float]]:
        return [(line.version.round, getattr(line.version, name)) for line in lines]

    devices = [(line.version.round, line.num_devices) for line in lines if line.num_devices is not None]
    return [
        Chart(title="Seconds of a Round", x_label=ROUND, series={"seconds": of("round_s")}, is_amount=True),
        Chart(
            title="Bytes of a Round",
            x_label=ROUND,
            series={"down": of("bytes_down"), "up": of("bytes_up")},
            is_amount=True,
            is_bytes=True,
        ),
        Chart(title="Devices of a Round", x_label=ROUND, series={"accepted updates": devices}, is_amount=True),
    ]


def _tables(record: ReportedRun, lines: Sequence[RoundLine]) -> list[Grid]:
    info = record.description.run
    tables = [_coverage(record), _rounds(record, lines)]
    if record.verified is not None:
        good = "Every Version was recomputed from its parent and the closed set of its Updates."
        problems = [(str(number), text) for number, text in enumerate(record.verified.problems, 1)]
        tables.append(Grid(title="Verification", head=(), rows=problems, note="" if problems else good))
    facts = [("Run", info.run_id), ("Bundle", info.bundle_sha256), ("Version", info.version_sha256)]
    facts += [("Started by", str(info.started_by))] * (info.started_by is not None)
    tables.append(Grid(title="Record", head=(), rows=facts))
    if info.plan is not None:
        # Sections that are lists, such as stages, have one row.
        sections = groupby(plan_sections(info.plan), key=lambda row: row[0])
        rows = [("name", info.plan.name)]
        rows += [(name, "; ".join(text for _, text in each)) for name, each in sections]
        tables.append(Grid(title="Plan", head=(), rows=rows))
    return tables


def _coverage(record: ReportedRun) -> Grid:
    num_rounds = _participations(record.events)
    counts = sorted(num_rounds.values())
    runtimes: Counter[str] = Counter()
    for entry in record.events:
        if isinstance(entry.event, VersionPublished):
            runtimes.update(entry.event.runtimes)
    rows = [("took part", f"{len(num_rounds)} of {record.description.num_devices} enrolled devices")]
    if counts:
        text = f"{counts[0]} fewest, {statistics.median(counts):g} median, {counts[-1]} most"
        rows.append(("Rounds of a device", text))
    rows += [(f"with {name}", counted(num, "update")) for name, num in runtimes.most_common()]
    failed = [entry.event for entry in record.events if isinstance(entry.event, RoundFailed)]
    rows += [("failed Rounds", str(len(failed)))] * bool(failed)
    return Grid(title="Devices", head=(), rows=rows)


def _rounds(record: ReportedRun, lines: Sequence[RoundLine]) -> Grid:
    times = {entry.event.round: entry.time for entry in record.events if isinstance(entry.event, VersionPublished)}
    rows = []
    for line in reversed(lines[-MAX_ROWS:]):
        number, *cells = line.cells()
        when = datetime.fromtimestamp(times[line.version.round], UTC).strftime("%Y-%m-%d %H:%M:%S")
        rows.append((number, str(line.version.number), short(line.version.version_sha256), *cells, when))
    head = (
        "Round",
        "Version",
        "digest",
        "devices",
        "loss",
        "accuracy",
        "int8",
        "time",
        "down",
        "up",
        "published (UTC)",
    )
    note = "Accuracy is that of the Version with which the Round began, on its devices."
    if len(lines) > MAX_ROWS:
        note += f" The newest {MAX_ROWS} of {len(lines)}; fanin watch --json has all."
    return Grid(title="Rounds, newest first", head=head, rows=rows, note=note)
