"""From Round to Round: the record of the next one, and what a restart has to know of those before it."""

from dataclasses import dataclass
from functools import partial

from fanin.protos.control import RunState
from fanin.protos.errors import Corrupted, NotFound
from fanin.server.rounds import events as e
from fanin.server.rounds import machine as r
from fanin.server.rounds.effects import Model, Tools
from fanin.server.rounds.grids import first_grid_from, recorded_grid
from fanin.server.rounds.recent import Made, RecentRounds
from fanin.server.rounds.troubles import Damaged
from fanin.server.storage.sqlite.rounds import RoundMark, RoundRecord
from fanin.server.storage.sqlite.runs import RunRecord


async def under_way(run_id: str, tools: Tools) -> RoundRecord | None:
    """The Round of a Run that was opened and has not ended."""
    last = await tools.store_lane(lambda: tools.rounds.last(run_id))
    return last if last is not None and last.mark in (RoundMark.OPEN, RoundMark.CLOSED) else None


async def next_round(run: RunRecord, model: Model, tools: Tools) -> Made | None:
    """Record the next Round of a Run, from its newest Version; None if it was paused or stopped in this moment."""
    run_id = run.start.run_id
    base = await tools.store_lane(lambda: tools.runs.version(run_id))
    last = await tools.store_lane(lambda: tools.rounds.last(run_id))
    assert base is not None, "a run has at least version 0"
    grid = await tools.store_lane(lambda: recorded_grid(base, tools.runs, tools.rounds))
    if grid is None:
        table, codec = model.table, run.start.plan.codec
        try:
            grid = await tools.disk_lane(lambda: first_grid_from(base, table, codec, tools.blobs))
        except (Corrupted, NotFound) as exc:
            raise Damaged(f"version {base.number} is damaged on the coordinator's disk") from exc
    record = RoundRecord(
        run_id=run_id,
        round=1 if last is None else last.round + 1,
        base_version=base.number,
        grid=grid,
        mark=RoundMark.OPEN,
        opened_at_s=tools.wall(),
    )
    is_open = await tools.store_lane(lambda: tools.rounds.open(record))
    return Made(record=record, base=base) if is_open else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One moment on two clocks: the monotonic one of the machine, and the wall's, by which deadlines are recorded."""

    now: float
    wall_s: float


def begun(
    run: RunRecord, record: RoundRecord, at_work: frozenset[str], moment: Moment, *, resumes: bool
) -> tuple[r.Round, tuple[e.Effect, ...]]:
    """The machine of a Round as its record has it, and what to do now.

    ``resumes``: the Round was under way in a process that ended.
    """
    cohort = run.start.plan.cohort
    rules = r.Rules(
        concurrency=cohort.concurrency,
        buffer=cohort.buffer,
        quorum=cohort.quorum,
        deadline_s=cohort.deadline_s,
        min_report_s=cohort.min_report_s,
    )
    is_paused = run.state is RunState.PAUSED and record.mark is RoundMark.OPEN
    left_s = record.left_s
    if not is_paused and record.deadline_at_s is not None:
        left_s = record.deadline_at_s - moment.wall_s
    if left_s is not None:
        # A wall clock that was set back meanwhile must not put the deadline off.
        left_s = min(left_s, cohort.deadline_s)
    if is_paused:
        paused = r.Round(rules=rules, phase=r.Phase.PAUSED, at_work=at_work, left_s=left_s, was_resumed=resumes)
        return paused, ()
    deadline = None if left_s is None else moment.now + left_s
    return r.opened(r.Round(rules=rules, deadline=deadline, at_work=at_work, was_resumed=resumes), moment.now)


async def recall(run_id: str, recent: RecentRounds, tools: Tools) -> None:
    """Put the Rounds whose Updates may count after a restart into ``recent``, and those just before them, which the
    process that ended may not have cleared."""
    newest = await tools.store_lane(lambda: tools.runs.version(run_id))
    assert newest is not None, "a run has at least version 0"
    recent.begin_at(await tools.store_lane(lambda: tools.runs.beginning(run_id)))
    oldest = recent.oldest_base(newest.number) - 1
    for earlier in await tools.store_lane(lambda: tools.rounds.since(run_id, oldest)):
        base = await tools.store_lane(partial(tools.runs.version, run_id, earlier.base_version))
        assert base is not None, "a round has its base version"
        recent.add(Made(record=earlier, base=base))


async def clear_spool(run: RunRecord, current: RoundRecord | None, recent: RecentRounds, tools: Tools) -> None:
    """Forget the Rounds whose Updates no longer count, and what devices sent for them in vain.

    Between two Rounds of a Run that goes on, those stay that will count in the next one.
    """
    run_id = run.start.run_id
    newest = await tools.store_lane(lambda: tools.runs.version(run_id))
    assert newest is not None, "a run has at least version 0"
    for made in recent:
        number = made.record.round
        if current is not None:
            counts = recent.counts_in(number, current)
        else:
            counts = run.state.is_live and recent.counts_from(number, newest.number)
        if not counts:
            keep = await tools.store_lane(partial(tools.rounds.made_for, run_id, number))
            await tools.disk_lane(partial(tools.spool.clear_round, run_id, number, keep))
            recent.forget(made.record)
