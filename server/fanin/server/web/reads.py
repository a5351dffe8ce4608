"""The read models of the page: what a view shows, as values. Templates only arrange them.

Every list is a page: no view reads more than a few hundred rows, however long a Run is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from fanin.protos.messages import (
    LiveRound,
    LoggedEvent,
    RunInfo,
    RunState,
    VersionEvaluation,
    VersionPublished,
)
from fanin.protos.plans import Plan
from fanin.protos.plans.keys import KeyField, fields_of
from fanin.server.runs.catalog import Runs
from fanin.server.storage.protocols.history import HistoryStore
from fanin.server.storage.records import FeedEntry, RoundRecord, RoundSummary, VersionRow

PAGE_ROWS: Final = 25
FEED_ROWS: Final = 50
CHART_POINTS: Final = 100
"""Versions in a chart. A longer Run is sampled evenly."""
GRID_POINTS: Final = 40
"""Rounds in the chart of the grid. Each is a read of its own."""
LOSS_SPREAD: Final = "validation_loss"
ACCURACY_SPREAD: Final = "validation_accuracy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of rows.

    Attributes:
        rows: The rows.
        older: The cursor of the next page; "" after the last one.
        is_first: Whether it is the newest page.
    """

    rows: Sequence[object]
    older: str
    is_first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityRow:
    """A published Version in the charts: its Round, and the quality of the Version from which the Round started.

    Numbers are None if they were not recorded.
    """

    number: int
    parent: int
    round: int
    time_s: float
    round_s: float
    bytes_down: int
    bytes_up: int
    train_loss: float | None
    loss: float | None
    loss_p10: float | None
    loss_p90: float | None
    accuracy: float | None
    accuracy_p10: float | None
    accuracy_p90: float | None
    accuracy_int8: float | None
    held_loss: float | None
    held_accuracy: float | None
    held_int8: float | None
    epsilon: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWork:
    """A device at work in the open Round."""

    device_id: str
    step: int
    num_steps: int
    epoch: int
    num_epochs: int
    sent_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEntry:
    """A Round in a list, with the event of its Version if it published one."""

    summary: RoundSummary
    published: VersionPublished | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPoint:
    """The grid of a Round: exponents of the steps of its blocks."""

    round: int
    finest: int
    median: int
    coarsest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRow:
    """A block of the grid: one tensor.

    Attributes:
        name: The tensor; "" if the Run is not driven here.
        num_values: Its values, 0 likewise.
        step: The exponent of its step in the newest Round.
        range: The largest magnitude that an Update can have in it, with the largest shift.
        moves: Steps in the Rounds of the chart, from old to new, without repetitions.
    """

    name: str
    num_values: int
    step: int
    range: float
    moves: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GridView:
    """The grid of a Run: its blocks in the newest Round, and how it moved."""

    points: tuple[GridPoint, ...]
    rows: tuple[BlockRow, ...]
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """A key of a Plan."""

    name: str
    value: str
    is_default: bool


async def runs_page(runs: Runs, newest_index: int | None) -> tuple[Page, int]:
    """Return a page of the Runs, newest first, and the number of all Runs.

    Args:
        runs: The Runs.
        newest_index: The page begins below this place in the order of their starts. None: with the newest Run.
    """
    run_ids = await runs.run_ids()
    end = len(run_ids) if newest_index is None else max(min(newest_index, len(run_ids)), 0)
    begin = max(end - PAGE_ROWS, 0)
    rows = [await runs.info(run_id) for run_id in reversed(run_ids[begin:end])]
    return Page(rows=rows, older=str(begin) if begin else "", is_first=end == len(run_ids)), len(run_ids)


async def quality(history: HistoryStore, info: RunInfo) -> tuple[QualityRow, ...]:
    """Return the rows of a Run's charts, oldest first."""
    logged = await history.publications(info.run_id, CHART_POINTS)
    numbers = [one.event.number for one in logged if isinstance(one.event, VersionPublished)]
    has_data = info.plan is not None and bool(info.plan.evaluation.data)
    evaluations = await history.evaluations_of(info.run_id, numbers) if has_data else ()
    held = {each.version: each for each in evaluations if not each.problem}
    return tuple(_quality_row(one, one.event, held) for one in logged if isinstance(one.event, VersionPublished))


def _quality_row(logged: LoggedEvent, event: VersionPublished, held: Mapping[int, VersionEvaluation]) -> QualityRow:
    evaluation, held_out = event.evaluation, held.get(event.number)
    loss, accuracy = event.device_spreads.get(LOSS_SPREAD), event.device_spreads.get(ACCURACY_SPREAD)
    has_labels = evaluation is not None and evaluation.has_labels
    values = {} if held_out is None else held_out.values
    return QualityRow(
        number=event.number,
        parent=event.parent,
        round=event.round,
        time_s=logged.time,
        round_s=event.round_s,
        bytes_down=event.bytes_down,
        bytes_up=event.bytes_up,
        train_loss=event.train_loss if event.train_loss_examples else None,
        loss=None if evaluation is None else evaluation.loss,
        loss_p10=None if loss is None else loss.p10,
        loss_p90=None if loss is None else loss.p90,
        accuracy=evaluation.accuracy_float if evaluation is not None and has_labels else None,
        accuracy_p10=None if accuracy is None else accuracy.p10,
        accuracy_p90=None if accuracy is None else accuracy.p90,
        accuracy_int8=evaluation.accuracy_int8 if evaluation is not None and has_labels else None,
        held_loss=values.get("loss"),
        held_accuracy=values.get("accuracy"),
        held_int8=values.get("accuracy_int8"),
        epsilon=None if event.privacy is None else event.privacy.epsilon,
    )


async def rounds_page(history: HistoryStore, run_id: str, before: int | None, num_rows: int = PAGE_ROWS) -> Page:
    """Return a page of the Rounds of a Run, newest first, with the facts of those that published a Version."""
    summaries = await history.rounds_before(run_id, before, num_rows + 1)
    shown = summaries[:num_rows]
    published = await _published(history, run_id, shown)
    rows = [RoundEntry(summary=each, published=published.get(each.version)) for each in shown]
    older = str(shown[-1].record.round) if len(summaries) > num_rows else ""
    return Page(rows=rows, older=older, is_first=before is None)


async def _published(
    history: HistoryStore, run_id: str, summaries: Sequence[RoundSummary]
) -> dict[int, VersionPublished]:
    numbers = [each.version for each in summaries if each.version]
    if not numbers:
        return {}
    rows = await history.versions_before(run_id, max(numbers) + 1, max(numbers) - min(numbers) + 1)
    return {row.version.number: row.published for row in rows if row.published is not None}


async def grid_view(history: HistoryStore, runs: Runs, info: RunInfo) -> GridView | None:
    """Return the grid of a Run, None before its first Round. A long Run is sampled evenly, up to the newest Round."""
    newest = await history.rounds_before(info.run_id, None, 1)
    if not newest or info.plan is None:
        return None
    last = newest[0].record
    numbers = {max(last.round * index // GRID_POINTS, 1) for index in range(1, GRID_POINTS)}
    sampled = [await history.rounds_before(info.run_id, number + 1, 1) for number in sorted(numbers - {last.round})]
    records = [*(each[0].record for each in sampled if each), last]
    points = tuple(_grid_point(one) for one in records)
    driver, codec = runs.drivers.find(info.run_id), info.plan.codec
    specs = driver.setup.table.specs if driver is not None else ()
    largest = (2 ** (codec.bits - 1) - 1) * 2.0**codec.max_shift
    rows = []
    for index, step in enumerate(last.grid[:FEED_ROWS]):
        steps = [one.grid[index] for one in records]
        spec = specs[index] if len(specs) == len(last.grid) else None
        rows.append(
            BlockRow(
                name="" if spec is None else spec.name,
                num_values=0 if spec is None else spec.num_values,
                step=step,
                range=largest * 2.0**step,
                moves=tuple(now for before, now in zip([None, *steps], steps, strict=False) if now != before),
            )
        )
    return GridView(points=points, rows=tuple(rows), num_blocks=len(last.grid))


def _grid_point(record: RoundRecord) -> GridPoint:
    steps = sorted(record.grid)
    return GridPoint(round=record.round, finest=steps[0], median=steps[len(steps) // 2], coarsest=steps[-1])


async def find_round(history: HistoryStore, run_id: str, number: int) -> RoundEntry | None:
    """Return a Round by its number, None if there is none."""
    page = await rounds_page(history, run_id, number + 1, 1)
    row = page.rows[0] if page.rows else None
    assert row is None or isinstance(row, RoundEntry)
    return None if row is None or row.summary.record.round != number else row


async def versions_page(
    history: HistoryStore, info: RunInfo, before: int | None
) -> tuple[Page, dict[int, VersionEvaluation]]:
    """Return a page of the Versions of a Run, newest first, and their evaluations on held-out data."""
    rows: tuple[VersionRow, ...] = await history.versions_before(info.run_id, before, PAGE_ROWS + 1)
    shown = rows[:PAGE_ROWS]
    evaluations = await history.evaluations_of(info.run_id, [row.version.number for row in shown])
    older = str(shown[-1].version.number) if len(rows) > PAGE_ROWS else ""
    page = Page(rows=shown, older=older, is_first=before is None)
    return page, {each.version: each for each in evaluations}


async def feed_page(history: HistoryStore, before: int | None, run_id: str = "") -> Page:
    """Return a page of events, newest first: of one Run, or of all of them."""
    entries: tuple[FeedEntry, ...] = await history.feed(before, FEED_ROWS + 1, run_id)
    shown = entries[:FEED_ROWS]
    older = str(shown[-1].position) if len(entries) > FEED_ROWS else ""
    return Page(rows=shown, older=older, is_first=before is None)


def work_of(live: LiveRound) -> tuple[DeviceWork, ...]:
    """Return the devices at work in the Round under way, the ones that upload first."""
    rows = []
    for device in dict.fromkeys((*sorted(live.uploads), *live.at_work)):
        progress, upload = live.progress.get(device), live.uploads.get(device)
        rows.append(
            DeviceWork(
                device_id=device,
                step=0 if progress is None else progress.step,
                num_steps=0 if progress is None else progress.num_steps,
                epoch=0 if progress is None else progress.epoch,
                num_epochs=0 if progress is None else progress.num_epochs,
                sent_bytes=0 if upload is None else upload.received_bytes,
                size_bytes=0 if upload is None else upload.size_bytes,
            )
        )
    return tuple(rows)


def plan_rows(plan: Plan) -> dict[str, tuple[PlanRow, ...]]:
    """Return the keys of a Plan by section."""
    return {name: tuple(rows) for name, rows in _plan_sections(plan).items() if rows}


def _plan_sections(plan: Plan) -> dict[str, list[PlanRow]]:
    sections: dict[str, list[PlanRow]] = {}
    for name, field in fields_of(Plan).items():
        value = getattr(plan, name)
        if isinstance(field, KeyField):
            sections.setdefault("plan", []).append(_plan_row(name, field, value))
        elif field.is_list:
            for index, item in enumerate(value):
                sections[f"{name} {index + 1}"] = _section_rows(item, "")
        else:
            sections[name] = _section_rows(value, "")
    return sections


def _section_rows(section: object, prefix: str) -> list[PlanRow]:
    rows: list[PlanRow] = []
    for name, field in fields_of(type(section)).items():
        value = getattr(section, name)
        if isinstance(field, KeyField):
            rows.append(_plan_row(f"{prefix}{name}", field, value))
        elif field.is_list:
            rows += [PlanRow(name=f"{prefix}{name}", value=_text(asdict(item)), is_default=False) for item in value]
        else:
            rows += _section_rows(value, f"{prefix}{name}.")
    return rows


def _plan_row(name: str, field: KeyField, value: object) -> PlanRow:
    return PlanRow(name=name, value=_text(value), is_default=value == field.default)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} = {_text(each)}" for name, each in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(map(_text, value))
    return "none" if value is None else str(value)


def is_open(info: RunInfo) -> bool:
    """Return whether a Run can have an open Round."""
    return info.state in (RunState.RUNNING, RunState.PAUSED)
