"""The driver of one Run: feeds the round machine, carries out its effects in order, opens the next Round.

The machine is stepped on the event loop, so its state is always consistent; effects go through one queue and
one worker. An effect that fails (a full disk) is tried again until it works: the Round waits, nothing is lost.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Final, assert_never

from fanin.protos import messages as m
from fanin.protos.errors import FaninError, Unavailable
from fanin.protos.runs import RunState
from fanin.server import rounds as r
from fanin.server.assignments import Assignments
from fanin.server.opening import Moment, begun, clear_spool, next_round, recall, under_way
from fanin.server.publications import Publications
from fanin.server.recent import AtWork, Made, RecentRounds
from fanin.server.selection import unsuitable
from fanin.server.stopping import History
from fanin.server.store.rounds import CommittedUpdate, RoundMark, RoundRecord
from fanin.server.store.runs import RunRecord
from fanin.server.work import Model, RoundWork, Tools

LOG = logging.getLogger("fanin.server.driver")
RETRY_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Pauses between tries of an effect; the last one repeats."""


class RunDriver:
    """One Run, from its start or from what the store says of it."""

    def __init__(self, run: RunRecord, model: Model, tools: Tools, on_change: Callable[[], None]) -> None:
        self.run = run
        self.model = model
        self._tools = tools
        self._on_change = on_change
        self._assignments = Assignments(run.start, model.bundle, model.run_key)
        self.publications = Publications(self._assignments, model, tools)
        self._round: r.Round | None = None
        self._work: RoundWork | None = None
        self._recent = RecentRounds(run.start.plan.aggregation.max_staleness)
        self._at_work = AtWork()
        self._is_stopped = False
        # Each with the work of the Round that asked for it.
        self._effects: asyncio.Queue[tuple[RoundWork | None, r.Effect]] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self._worker: asyncio.Task[None] | None = None
        self._history = History()
        self.trouble = ""
        self.changed = asyncio.Event()

    @property
    def _is_open(self) -> bool:
        return self._round is not None and self._round.is_open

    @property
    def run_id(self) -> str:
        """The Run's id."""
        return self.run.start.run_id

    async def start(self) -> None:
        """Take up the Run where the store says that it stands."""
        tools = self._tools
        await recall(self.run_id, self._recent, tools)
        await self.publications.read(self.run_id)
        record = await under_way(self.run_id, tools)
        if record is not None:
            await self._resume(record)
        await clear_spool(self.run, record, self._recent, tools)
        if record is None and self.run.state is RunState.RUNNING:
            self._effects.put_nowait((None, r.GoOn()))
        self._worker = asyncio.create_task(self._carry_out(), name=f"run {self.run_id}")

    async def stop(self) -> None:
        """Stop at once; what is durable stays, and ``start`` takes it up again."""
        self._is_stopped = True
        self.announce()
        if self._timer is not None:
            self._timer.cancel()
        if self._worker is not None:
            self._worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._worker

    @property
    def round(self) -> r.Round | None:
        """The machine of the Round that is under way."""
        return self._round

    # What devices ask for.

    @property
    def recent_rounds(self) -> tuple[tuple[str, int], ...]:
        """The Run's id with the numbers of the Rounds whose Updates count in the one that is under way."""
        return tuple((self.run_id, made.record.round) for made in self._recent)

    @property
    def num_places(self) -> int:
        """How many devices the open Round can still take."""
        return 0 if self._round is None else self._round.num_places

    def holds(self, device: str) -> bool:
        """Whether a device has an Assignment in the open Round."""
        return self._round is not None and device in self._round.at_work

    def may_join(self, device: str) -> bool:
        """Whether a device has not had a part in the open Round yet."""
        return self._round is not None and device not in self._round.at_work and device not in self._round.accepted

    def refusal(self, capabilities: m.Capabilities) -> str:
        """Why a device with these capabilities can take no part in the Run; empty if it can."""
        total = self.model.download_bytes(capabilities.graph_formats)
        return unsuitable(capabilities, self.run.start.plan, self.model.graph_formats, total)

    def offer(self, device: str) -> m.Assignment | None:
        """An Assignment for a suitable device, or the one it has; None if there is no place."""
        if self._work is None or self._round is None or not self._round.assigns:
            return None
        is_new = device not in self._round.at_work
        if r.Assign(device=device) not in self._step(r.CheckedIn(device=device)):
            return None
        if is_new:
            due = asyncio.get_running_loop().time() + self._round.rules.deadline_s
            self._at_work.begin(device, self._work.record.round, due)
        assert self._round.deadline is not None, "the first assignment sets the deadline"
        made = self.made(self._at_work.round_of(device) or 0)
        left_s = max(self._round.deadline - asyncio.get_running_loop().time(), 0.001)
        return self._assignments.make(device, made, left_s)

    def check_assignment(self, assignment_id: str, device: str) -> int:
        """The Round of an Assignment of this Run. Raises NotFound unless it was made here for this device."""
        return self._assignments.check(assignment_id, device)

    def takes(self, round_number: int) -> bool:
        """Whether Updates that were made for a Round count in the open one."""
        if self._work is None or self._round is None or not self._round.is_open:
            return False
        return self._recent.counts_in(round_number, self._work.record)

    def made(self, round_number: int) -> Made:
        """What the Assignments of a Round whose Updates count were made of."""
        found = self._recent.get(round_number)
        assert found is not None, "what counts is remembered"
        return found

    def may_count(self, round_number: int) -> bool:
        """Whether Updates that were made for a Round count, in the open one or, while one ends, perhaps in the next.

        Raises Unavailable while nobody can say: the Run is paused between two Rounds, or the coordinator is leaving.
        """
        if self.takes(round_number):
            return True
        made = self._recent.get(round_number)
        if made is None or not self._recent.max_staleness or not self.run.state.is_live or self._is_open:
            return False
        if self.run.state is RunState.PAUSED or self._is_stopped:
            raise Unavailable(f"run {self.run_id}: takes no updates at this moment; go on later")
        return True

    async def commit(self, device: str, header: m.UpdateHeader, resumed_bytes: int = 0) -> m.UpdateHeader | None:
        """Accept an Update whose payload is durable; the header that stands for its Assignment, which may be an earlier
        one, or None: the open Round does not take it."""
        work, plan = self._work, self.run.start.plan
        if work is None or not self.takes(header.round):
            return None
        update = CommittedUpdate(device_id=device, round=work.record.round, header=header)
        found = await self._tools.commits.commit(update, buffer=plan.cohort.buffer)
        if found is None:
            return None
        # If the Round has begun to close meanwhile, the record tells it of this Update.
        if work is self._work and found.round == work.record.round and self.takes(found.header.round):
            work.add_committed(device, found.header, resumed_bytes if found.header is header else 0)
            self._at_work.end(device)
            self._step(r.UpdateCommitted(device=device))
        return found.header

    def is_refused(self, round_number: int) -> bool:
        """Whether an Update that the open Round did not take is refused for good. Raises Unavailable if it may be taken
        after a pause."""
        if not self._recent.max_staleness or not self.may_count(round_number):
            return True
        if self.run.state is RunState.PAUSED or self._is_stopped:
            raise Unavailable(f"run {self.run_id}: takes no updates at this moment; go on later")
        return False

    def may_fetch(self, sha256: str) -> bool:
        """Whether a Chunk is one of the Bundle's or of a Version that a Round whose Updates count starts from."""
        return sha256 in self.model.chunks or self._recent.begins_with(sha256)

    async def outcome(self, round_number: int, device: str) -> m.UploadReply:
        """What became of a device's Update of this Round."""
        tools = self._tools
        accepted = await tools.store_lane(lambda: tools.rounds.has_update(self.run_id, round_number, device))
        is_open = self.may_count(round_number)
        missing = m.UpdateState.RECEIVING if is_open else m.UpdateState.DISCARDED
        return m.UploadReply(
            round_state=m.RoundState.OPEN if is_open else m.RoundState.CLOSED,
            update_state=m.UpdateState.ACCEPTED if accepted else missing,
        )

    def give_up(self, round_number: int, device: str) -> None:
        """A device will not fulfil its Assignment; its place is free."""
        if self._at_work.round_of(device) != round_number:
            return
        self._at_work.end(device)
        if self.takes(round_number):
            self._step(r.GaveUp(device=device))
            self._on_change()

    # What commands of operators are carried out with (``control``).

    async def look(self) -> None:
        """Read again what is recorded of the Run, let the machine follow, and see to it that a Round is open if one
        should be. Harmless at any time."""
        await self._follow_record()
        # Through the queue like every effect: a full disk now must not leave a Run without a Round.
        self._effects.put_nowait((None, r.GoOn()))
        self.announce()

    @property
    def is_idle(self) -> bool:
        """Whether no Round is under way."""
        return self._work is None

    def announce(self) -> None:
        """Wake those who watch the Run, and those who wait for work."""
        self.changed.set()
        self.changed = asyncio.Event()
        self._on_change()

    # The machine.

    def _step(self, event: r.Event) -> tuple[r.Effect, ...]:
        assert self._round is not None, f"{event} without a round"
        self._round, effects = self._round.step(event, asyncio.get_running_loop().time())
        self._queue(effects)
        self._set_timer()
        return effects

    def _queue(self, effects: tuple[r.Effect, ...]) -> None:
        for effect in effects:
            if not isinstance(effect, r.Assign):
                self._effects.put_nowait((self._work, effect))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_at = None if self._round is None else self._round.wake_at
        if wake_at is not None:
            self._timer = asyncio.get_running_loop().call_at(wake_at, self._step, r.TimePassed())

    async def _carry_out(self) -> None:
        while True:
            work, effect = await self._effects.get()
            for tries in range(1 << 62):
                self._tools.observer.starting(self.run_id, effect)
                try:
                    await self._do(work, effect)
                    break
                except Exception as exc:  # Whatever it is: a Run whose worker has died would hang without a word.
                    self.trouble = f"{type(effect).__name__} is tried again: {exc}"
                    # Of our errors the text says what to do; of others only the trace tells anything.
                    LOG.error("run %s: %s", self.run_id, self.trouble, exc_info=not isinstance(exc, FaninError))
                    await asyncio.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])
            self.trouble = ""
            self._tools.observer.finished(self.run_id, effect)

    async def _do(self, work: RoundWork | None, effect: r.Effect) -> None:
        if isinstance(effect, r.GoOn):
            await self._end_round()
            return
        if work is None or work is not self._work:
            # Its Round was stopped, and has been cleared away.
            return
        match effect:
            case r.Assign():
                raise AssertionError("assignments are answered at once, never queued")
            case r.KeepDeadline():
                await self._keep_deadline(work.record, effect.deadline)
            case r.Accumulate():
                await work.accumulate(effect.device)
            case r.Close():
                record = await work.close()
                if record.mark is RoundMark.FAILED:
                    self._step(r.Missed())
                else:
                    self._step(r.Closed(accepted=record.accepted))
                self.announce()
            case r.Fold():
                await work.fold(effect.accepted)
                self._step(r.Folded())
            case r.Publish():
                await work.publish()
                self._step(r.Published())
                self.announce()
            case _:
                assert_never(effect)

    async def _keep_deadline(self, record: RoundRecord, deadline: float) -> None:
        tools, now_s = self._tools, self._tools.wall()
        at_s = now_s + deadline - asyncio.get_running_loop().time()
        await tools.store_lane(lambda: tools.rounds.set_deadline(record.run_id, record.round, at_s, now_s))

    # From Round to Round.

    async def _end_round(self) -> None:
        # If it was asked for twice, the next Round is open already.
        if self._round is None or self._round.has_ended:
            if self._round is not None and self._round.phase is r.Phase.FAILED:
                # Who missed a deadline does not keep a place.
                self._at_work = AtWork()
            self._work, self._round = None, None
            await self._go_on()
            # An operator may have decided something in the moments between.
            await self._follow_record()
            self.announce()
        current = None if self._work is None else self._work.record
        await clear_spool(self.run, current, self._recent, self._tools)

    async def _follow_record(self) -> None:
        tools = self._tools
        await self._reload()
        last = await tools.store_lane(lambda: tools.rounds.last(self.run_id))
        if self._work is None or self._round is None or self._round.has_ended or last is None:
            return
        if last.round == self._work.record.round and last.mark is RoundMark.FAILED:
            self._step(r.Stopped())
        elif self.run.state is RunState.PAUSED:
            self._step(r.Paused())
        elif self.run.state is RunState.RUNNING:
            self._step(r.Resumed())

    async def _reload(self) -> None:
        tools = self._tools
        run = await tools.store_lane(lambda: tools.runs.run(self.run_id))
        assert run is not None, "runs are never removed"
        await self.publications.read(self.run_id)
        self.run = run

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
        tools = self._tools
        record = await under_way(self.run_id, tools)
        if record is not None:
            # An earlier try recorded it and then failed.
            await self._resume(record)
            return
        self._recent.begin_at(await tools.store_lane(lambda: tools.runs.beginning(self.run_id)))
        made = await next_round(self.run, self.model, tools)
        if made is not None:
            self._begin(made)

    async def _resume(self, record: RoundRecord) -> None:
        """Take up a Round: its committed Updates are the machine's events, told again in their order."""
        tools = self._tools
        base = await tools.store_lane(lambda: tools.runs.version(self.run_id, record.base_version))
        updates = await tools.store_lane(lambda: tools.rounds.updates(self.run_id, record.round))
        assert base is not None, "a round has its base version"
        work = self._begin(Made(record=record, base=base))
        for update in updates:
            work.add_committed(update.device_id, update.header)
            # If time has closed it while nobody was here, the record tells it of the rest.
            if self._round is not None and self._round.is_open:
                self._step(r.UpdateCommitted(device=update.device_id))
        if record.mark is RoundMark.CLOSED:
            # The set was named before the restart: it must not be named again, only folded.
            while not self._effects.empty():
                self._effects.get_nowait()
            self._step(r.Closed(accepted=record.accepted))

    def _begin(self, made: Made) -> RoundWork:
        self._recent.add(made)
        now = asyncio.get_running_loop().time()
        carried = self._at_work.carry(self._recent, made.record, now)
        self._work = RoundWork(made, self._recent, self.run.start, self.model, self._tools)
        self._round, effects = begun(self.run, made.record, carried, Moment(now=now, wall_s=self._tools.wall()))
        self._queue(effects)
        self._set_timer()
        return self._work
