"""The driver of one Run: carries out the effects of the round machine, opens the next Round.

The machine is stepped on the event loop, so its state is always consistent; effects go through one queue and one
worker. An effect that fails is tried again while that may help. After that the Round fails with the reason in its
record, and the Run goes on with the next one or rests.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Final, assert_never

from fanin.protos.control import MAX_NUMBER, RunRested, RunState
from fanin.server.rounds import events as e
from fanin.server.rounds import machine as r
from fanin.server.rounds.effects import Model, RoundWork, Tools
from fanin.server.rounds.opening import clear_spool, next_round, recall, under_way
from fanin.server.rounds.recent import Made
from fanin.server.rounds.worker import Order
from fanin.server.runs.course import Course
from fanin.server.runs.intake import Intake
from fanin.server.runs.stopping import History
from fanin.server.storage.sqlite.rounds import RoundMark, RoundRecord
from fanin.server.storage.sqlite.runs import RunRecord

LOG: Final = logging.getLogger("fanin.server.runs.driver")
NO_SPACE: Final = "uploads wait: no space left on the coordinator's disk; free some"


class RunDriver:
    """One Run, from its start or from what the store says of it."""

    def __init__(self, run: RunRecord, model: Model, tools: Tools, on_change: Callable[[], None]) -> None:
        self.model = model
        self.course = Course(run, model, tools, on_change)
        self.intake = Intake(self.course, tools)
        self._tools = tools
        self._history = History()

    @property
    def run(self) -> RunRecord:
        """The Run as it was last read from the record."""
        return self.course.run

    @property
    def run_id(self) -> str:
        """The Run's id."""
        return self.course.run_id

    @property
    def recent_rounds(self) -> tuple[tuple[str, int], ...]:
        """The Run's id with the numbers of the Rounds whose Updates count in the one that is under way."""
        return tuple((self.run_id, made.record.round) for made in self.course.recent)

    @property
    def is_idle(self) -> bool:
        """Whether no Round is under way."""
        return self.course.work is None

    @property
    def is_stuck(self) -> bool:
        """Whether an effect has failed and is tried again."""
        return bool(self.course.worker.trouble)

    @property
    def trouble(self) -> str:
        """What the Run waits for, other than devices; empty: nothing."""
        waits = self.course.lacks_space and self.course.is_open
        return self.course.worker.trouble or (NO_SPACE if waits else "")

    async def start(self) -> None:
        """Take up the Run where the store says that it stands."""
        tools, course = self._tools, self.course
        await recall(self.run_id, course.recent, tools)
        await self.intake.publications.read(self.run_id)
        record = await under_way(self.run_id, tools)
        if record is not None:
            await self._resume(record)
        await self._clear_spool(record)
        if record is None and self.run.state is RunState.RUNNING:
            course.worker.put(None, e.GoOn())
        course.worker.start(self._do, self._give_up)

    async def stop(self) -> None:
        """Stop at once; what is durable stays, and ``start`` takes it up again."""
        self.course.is_leaving = True
        self.course.announce()
        self.course.stop_clock()
        await self.course.worker.stop()

    async def look(self) -> None:
        """Read again what is recorded of the Run, let the machine follow, and see to it that a Round is open if one
        should be. Harmless at any time."""
        await self._follow_record()
        # Through the queue like every effect: a full disk now must not leave a Run without a Round.
        self.course.worker.put(None, e.GoOn())
        self.course.worker.hurry()
        self.course.announce()

    # Effects.

    async def _do(self, order: Order) -> None:
        work, effect = order
        if isinstance(effect, e.GoOn):
            await self._end_round()
        elif work is not None and self._is_wanted(work, effect):
            await self._do_for(work, effect)

    def _is_wanted(self, work: RoundWork, effect: e.Effect) -> bool:
        machine = self.course.round
        if machine is None or machine.has_ended or work is not self.course.work:
            # Its Round was stopped.
            return False
        return machine.phase is not r.Phase.FAILING or isinstance(effect, e.Fail)

    async def _do_for(self, work: RoundWork, effect: e.Effect) -> None:
        match effect:
            case e.Assign() | e.GoOn():
                raise AssertionError("assignments are answered at once, and a next round has no work yet")
            case e.KeepDeadline():
                await self._keep_deadline(work.record, effect.deadline)
            case e.Accumulate():
                await work.accumulate(effect.device)
            case e.Close():
                self._follow(work, await work.close())
            case e.Fold():
                await work.fold(effect.accepted)
                self.course.report(work, e.Folded())
            case e.Publish():
                self._follow(work, await work.publish())
            case e.Fail():
                self._follow(work, await work.fail(effect.reason))
            case _:
                assert_never(effect)

    def _follow(self, work: RoundWork, record: RoundRecord) -> None:
        """Tell the machine how far the Round's record has come."""
        match record.mark:
            case RoundMark.OPEN:
                raise AssertionError("the record of a round that was to close or end is still open")
            case RoundMark.CLOSED:
                self.course.report(work, e.Closed(accepted=record.accepted))
            case RoundMark.PUBLISHED:
                self.course.report(work, e.Published())
            case RoundMark.FAILED:
                self.course.report(work, e.Failed())
            case _:
                assert_never(record.mark)
        self.course.announce()

    async def _give_up(self, order: Order, reason: str) -> None:
        """An effect cannot be carried out: its Round fails, or, if none is under way, the Run."""
        work, effect = order
        LOG.error("run %s: %s is given up: %s", self.run_id, type(effect).__name__, reason)
        if work is not None and self._is_wanted(work, effect):
            self.course.report(work, e.Broken(reason=reason))
            self.course.announce()
        elif isinstance(effect, e.GoOn) and (self.course.round is None or self.course.round.has_ended):
            tools, rested = self._tools, RunRested(state=RunState.FAILED, reason=reason)
            rest = partial(tools.runs.rest, self.run_id, rested, tools.wall(), next_sequence=MAX_NUMBER)
            await tools.store_lane(rest)
            await self._reload()
            self.course.announce()

    async def _keep_deadline(self, record: RoundRecord, deadline: float) -> None:
        tools, now_s = self._tools, self._tools.wall()
        at_s = now_s + deadline - self.course.now()
        await tools.store_lane(lambda: tools.rounds.set_deadline(record.run_id, record.round, at_s, now_s))

    # From Round to Round.

    async def _end_round(self) -> None:
        course = self.course
        # If it was asked for twice, the next Round is open already.
        if course.round is None or course.round.has_ended:
            course.end()
            await self._go_on()
            # An operator may have decided something in the moments between.
            await self._follow_record()
            course.announce()
        await self._clear_spool(None if course.work is None else course.work.record)

    async def _clear_spool(self, current: RoundRecord | None) -> None:
        try:
            await clear_spool(self.run, current, self.course.recent, self._tools)
        except OSError as exc:
            # It costs space only, and is tried again when the next Round ends.
            LOG.warning("run %s: files that are no longer needed stay: %s", self.run_id, exc)

    async def _follow_record(self) -> None:
        tools, course = self._tools, self.course
        await self._reload()
        last = await tools.store_lane(lambda: tools.rounds.last(self.run_id))
        if course.work is None or course.round is None or course.round.has_ended or last is None:
            return
        if last.round == course.work.record.round and last.mark is RoundMark.FAILED:
            course.step(e.Failed())
        elif self.run.state is RunState.PAUSED:
            course.step(e.Paused())
        elif self.run.state is RunState.RUNNING:
            course.step(e.Resumed())

    async def _reload(self) -> None:
        tools = self._tools
        run = await tools.store_lane(lambda: tools.runs.run(self.run_id))
        assert run is not None, "runs are never removed"
        await self.intake.publications.read(self.run_id)
        self.course.run = run

    async def _go_on(self) -> None:
        tools, history = self._tools, self._history
        while True:
            await self._reload()
            if self.run.state is not RunState.RUNNING:
                return
            while page := await tools.store_lane(lambda: tools.runs.event_page(self.run_id, history.next_sequence)):
                history.add(page)
            rested = history.rest_of(self.run.max_rounds, self.run.start.plan.stop)
            if rested is None:
                await self._open_next()
                return
            rest = partial(tools.runs.rest, self.run_id, rested, tools.wall(), next_sequence=history.next_sequence)
            await tools.store_lane(rest)

    async def _open_next(self) -> None:
        tools, course = self._tools, self.course
        record = await under_way(self.run_id, tools)
        if record is not None:
            # An earlier try recorded it and then failed.
            await self._resume(record)
            return
        course.recent.begin_at(await tools.store_lane(lambda: tools.runs.beginning(self.run_id)))
        made = await next_round(self.run, self.model, tools)
        if made is not None:
            course.begin(made)

    async def _resume(self, record: RoundRecord) -> None:
        """Take up a Round: its committed Updates are the machine's events, told again in their order."""
        tools, course = self._tools, self.course
        base = await tools.store_lane(lambda: tools.runs.version(self.run_id, record.base_version))
        updates = await tools.store_lane(lambda: tools.rounds.updates(self.run_id, record.round))
        assert base is not None, "a round has its base version"
        course.begin(Made(record=record, base=base), updates, resumes=True)
        if record.mark is RoundMark.CLOSED:
            # The set was named before the restart: it must not be named again, only folded.
            course.worker.drop_all()
            course.step(e.Closed(accepted=record.accepted))
