"""The driver of one Run: feeds the round machine, carries out its effects in order, opens the next Round.

The machine is stepped on the event loop, so its state is always consistent; effects go through one queue and
one worker. An effect that fails (a full disk) is tried again until it works: the Round waits, nothing is lost.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
from collections.abc import Callable
from typing import Final, assert_never

from fanin.edge.grid import first_grid
from fanin.protos import messages as m
from fanin.protos.errors import Conflict, FaninError, NotFound
from fanin.protos.runs import RoundFailed, RunEvent, RunInfo, RunState, VersionPublished
from fanin.server import rounds as r
from fanin.server.selection import unsuitable
from fanin.server.stopping import rest_of
from fanin.server.store.rounds import CommittedUpdate, RoundMark, RoundRecord, failure_of
from fanin.server.store.runs import RunRecord
from fanin.server.work import Model, RoundWork, Tools, load_parameters, whole

LOG = logging.getLogger("fanin.server.driver")
RETRY_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Pauses between tries of an effect; the last one repeats."""
TAG_CHARS: Final = 32


class RunDriver:
    """One Run, from its start or from what the store says of it."""

    def __init__(self, run: RunRecord, model: Model, tools: Tools, on_change: Callable[[], None]) -> None:
        self.run = run
        self.model = model
        self._tools = tools
        self._on_change = on_change
        self._tag_key = hashlib.sha256(b"fanin assignment" + model.run_key.private_bytes()).digest()
        self._round: r.Round | None = None
        self._work: RoundWork | None = None
        self._effects: asyncio.Queue[r.Effect] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self._worker: asyncio.Task[None] | None = None
        self._publishing = asyncio.Lock()
        self._since: list[RunEvent] = []
        self._trouble = ""
        self.changed = asyncio.Event()

    @property
    def run_id(self) -> str:
        """The Run's id."""
        return self.run.start.run_id

    async def start(self) -> None:
        """Take up the Run where the store says that it stands."""
        tools = self._tools
        history = await tools.store_lane(lambda: tools.runs.events(self.run_id, 0))
        for recorded in history:
            self._remember(recorded.event)
        if self.run.state is RunState.RUNNING:
            last = await tools.store_lane(lambda: tools.rounds.last(self.run_id))
            if last is not None and last.mark in (RoundMark.OPEN, RoundMark.CLOSED):
                await self._resume(last)
            else:
                self._effects.put_nowait(r.GoOn())
        self._worker = asyncio.create_task(self._carry_out(), name=f"run {self.run_id}")

    async def stop(self) -> None:
        """Stop at once; what is durable stays, and ``start`` takes it up again."""
        if self._timer is not None:
            self._timer.cancel()
        if self._worker is not None:
            self._worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._worker

    # What devices ask for.

    @property
    def open_round(self) -> tuple[str, int] | None:
        """The Run's id and the number of the Round that is under way."""
        return None if self._work is None else (self.run_id, self._work.record.round)

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
        if self._round is None or not self._round.is_open:
            return None
        effects = self._step(r.CheckedIn(device=device))
        return self._assignment(device) if r.Assign(device=device) in effects else None

    def check_assignment(self, assignment_id: str, device: str) -> int:
        """The Round of an Assignment of this Run. Raises NotFound unless it was made here for this device.

        The id is run.round.tag, the tag an HMAC (RFC 2104) over run, round and device under a key that never
        leaves the coordinator: nothing has to be stored for a device to keep its Assignment over a restart.
        """
        _, number, _ = assignment_id.rsplit(".", 2)
        if not number.isdecimal() or not hmac.compare_digest(self._assignment_id(int(number), device), assignment_id):
            raise NotFound(f"assignment {assignment_id}: not made for device {device}; check in again")
        return int(number)

    def open_work(self, round_number: int) -> RoundWork | None:
        """The work of this Round if it is still open to Updates."""
        if self._work is None or self._round is None or self._work.record.round != round_number:
            return None
        return self._work if self._round.is_open else None

    async def commit(self, update: CommittedUpdate) -> m.UpdateHeader | None:
        """Accept an Update whose payload is durable; the header that stands for the device in the Round's set,
        which may be an earlier one, or None."""
        tools, buffer = self._tools, self.run.start.plan.cohort.buffer
        found = await tools.store_lane(lambda: tools.rounds.commit(update, buffer=buffer))
        work = self.open_work(update.header.round)
        if found is not None and work is not None:
            work.add_committed(update.device_id, found)
            self._step(r.UpdateCommitted(device=update.device_id))
        return found

    def may_fetch(self, sha256: str) -> bool:
        """Whether a Chunk is one of the Bundle's or of the Version that the open Round starts from."""
        base = () if self._work is None else self._work.base.parameters.chunks
        return sha256 in self.model.chunks or any(sha256 == ref.sha256 for ref in base)

    async def outcome(self, round_number: int, device: str) -> m.UploadReply:
        """What became of a device's Update of this Round."""
        tools = self._tools
        accepted = await tools.store_lane(lambda: tools.rounds.has_update(self.run_id, round_number, device))
        is_open = self.open_work(round_number) is not None
        missing = m.UpdateState.RECEIVING if is_open else m.UpdateState.DISCARDED
        return m.UploadReply(
            round_state=m.RoundState.OPEN if is_open else m.RoundState.CLOSED,
            update_state=m.UpdateState.ACCEPTED if accepted else missing,
        )

    def give_up(self, round_number: int, device: str) -> None:
        """A device will not fulfil its Assignment; its place is free."""
        if self.open_work(round_number) is not None:
            self._step(r.GaveUp(device=device))
            self._on_change()

    # What operators ask for.

    async def info(self) -> RunInfo:
        """Where the Run stands."""
        tools = self._tools
        newest = await tools.store_lane(lambda: tools.runs.version(self.run_id))
        assert newest is not None, "a run has at least version 0"
        num_rounds = await tools.store_lane(lambda: tools.rounds.num_published(self.run_id))
        return RunInfo(
            run_id=self.run_id,
            state=self.run.state,
            plan=self.run.start.plan,
            bundle_sha256=self.model.bundle.manifest.sha256,
            version=newest.number,
            version_sha256=newest.sha256,
            num_rounds=num_rounds,
            reason=self.run.reason or self._trouble,
        )

    async def publish_outside(self, version: m.Version, num_rounds: int) -> None:
        """Add a Version that was made elsewhere, and run ``num_rounds`` Rounds from it. Raises Conflict."""
        # Whole: an operator who hangs up must not leave a Version without its Rounds.
        await whole(self._publish_outside(version, num_rounds))

    async def _publish_outside(self, version: m.Version, num_rounds: int) -> None:
        tools = self._tools
        async with self._publishing:
            newest = await tools.store_lane(lambda: tools.runs.version(self.run_id))
            assert newest is not None, "a run has at least version 0"
            if version == newest:
                return
            if self.run.state is RunState.RUNNING:
                raise Conflict(f"run {self.run_id}: a round is open; publish when the run rests")
            if version.number != newest.number + 1 or version.parent != newest.number:
                raise Conflict(
                    f"run {self.run_id}: got version {version.number} made from {version.parent}, "
                    f"expected {newest.number + 1} made from {newest.number}"
                )
            event = VersionPublished(number=version.number, version_sha256=version.sha256, parent=version.parent)
            now_s = tools.wall()
            await tools.store_lane(
                lambda: tools.runs.publish_outside(version, event, max_rounds=num_rounds, now_s=now_s)
            )
            await self._reload()
            self._since = []
            if num_rounds:
                # Through the queue like every effect: a full disk now must not leave a Run without a Round.
                self._effects.put_nowait(r.GoOn())
            self._announce()

    # The machine.

    def _step(self, event: r.Event) -> tuple[r.Effect, ...]:
        assert self._round is not None, f"{event} without a round"
        self._round, effects = self._round.step(event, asyncio.get_running_loop().time())
        for effect in effects:
            if not isinstance(effect, r.Assign):
                self._effects.put_nowait(effect)
        self._set_timer()
        return effects

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._round is not None and self._round.is_open and self._round.deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(self._round.deadline, self._step, r.TimePassed())

    async def _carry_out(self) -> None:
        while True:
            effect = await self._effects.get()
            for tries in range(1 << 62):
                self._tools.observer.starting(self.run_id, effect)
                try:
                    await self._do(effect)
                    break
                except Exception as exc:  # Whatever it is: a Run whose worker has died would hang without a word.
                    self._trouble = f"{type(effect).__name__} is tried again: {exc}"
                    # Of our errors the text says what to do; of others only the trace tells anything.
                    LOG.error("run %s: %s", self.run_id, self._trouble, exc_info=not isinstance(exc, FaninError))
                    await asyncio.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])
            self._trouble = ""
            self._tools.observer.finished(self.run_id, effect)

    async def _do(self, effect: r.Effect) -> None:
        if isinstance(effect, r.GoOn):
            await self._end_round()
            return
        work = self._work
        assert work is not None, f"{effect} without a round"
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
                    self._remember(failure_of(record.round, len(record.accepted), work.plan.cohort))
                    self._step(r.Missed())
                else:
                    self._step(r.Closed(accepted=record.accepted))
                self._announce()
            case r.Fold():
                await work.fold(effect.accepted)
                self._step(r.Folded())
            case r.Publish():
                self._remember(await work.publish())
                self._step(r.Published())
                self._announce()
            case _:
                assert_never(effect)

    async def _keep_deadline(self, record: RoundRecord, deadline: float) -> None:
        tools = self._tools
        at_s = tools.wall() + deadline - asyncio.get_running_loop().time()
        await tools.store_lane(lambda: tools.rounds.set_deadline(record.run_id, record.round, at_s))

    # From Round to Round.

    async def _end_round(self) -> None:
        if self._work is not None:
            await self._work.clear_spool()
        self._work, self._round = None, None
        await self._go_on()
        self._announce()

    async def _go_on(self) -> None:
        await self._reload()
        if self.run.state is not RunState.RUNNING:
            # An earlier try recorded the rest and then failed.
            return
        rested = rest_of(self._since, self.run.max_rounds, self.run.start.plan.stop)
        if rested is None:
            await self._open_next()
            return
        tools = self._tools
        await tools.store_lane(lambda: tools.runs.rest(self.run_id, rested, tools.wall()))
        await self._reload()

    async def _open_next(self) -> None:
        tools = self._tools
        base = await tools.store_lane(lambda: tools.runs.version(self.run_id))
        last = await tools.store_lane(lambda: tools.rounds.last(self.run_id))
        assert base is not None, "a run has at least version 0"
        if last is not None and last.mark in (RoundMark.OPEN, RoundMark.CLOSED):
            # An earlier try recorded it and then failed.
            await self._resume(last)
            return
        if last is not None:
            grid = last.next_grid or last.grid
        else:
            table = self.model.table
            codec = self.run.start.plan.codec
            grid = await tools.disk_lane(lambda: first_grid(table, load_parameters(tools.blobs, base, table), codec))
        record = RoundRecord(
            run_id=self.run_id,
            round=1 if last is None else last.round + 1,
            base_version=base.number,
            grid=grid,
            mark=RoundMark.OPEN,
            opened_at_s=tools.wall(),
        )
        await tools.store_lane(lambda: tools.rounds.open(record))
        self._begin(record, base, deadline=None)

    async def _resume(self, record: RoundRecord) -> None:
        """Take up a Round: its committed Updates are the machine's events, told again in their order."""
        tools = self._tools
        base = await tools.store_lane(lambda: tools.runs.version(self.run_id, record.base_version))
        updates = await tools.store_lane(lambda: tools.rounds.updates(self.run_id, record.round))
        assert base is not None, "a round has its base version"
        deadline = None
        if record.deadline_at_s is not None:
            deadline = asyncio.get_running_loop().time() + record.deadline_at_s - tools.wall()
        work = self._begin(record, base, deadline)
        for update in updates:
            work.add_committed(update.device_id, update.header)
            self._step(r.UpdateCommitted(device=update.device_id))
        if record.mark is RoundMark.CLOSED:
            # The set was named before the restart: it must not be named again, only folded.
            while not self._effects.empty():
                self._effects.get_nowait()
            self._step(r.Closed(accepted=record.accepted))

    def _begin(self, record: RoundRecord, base: m.Version, deadline: float | None) -> RoundWork:
        cohort = self.run.start.plan.cohort
        rules = r.Rules(
            concurrency=cohort.concurrency,
            buffer=cohort.buffer,
            quorum=cohort.quorum,
            deadline_s=cohort.deadline_s,
        )
        self._round = r.Round(rules=rules, deadline=deadline)
        self._work = RoundWork(record, base, self.run.start, self.model, self._tools)
        self._set_timer()
        return self._work

    def _remember(self, event: RunEvent) -> None:
        if isinstance(event, VersionPublished) and event.round == 0:
            self._since = []
        elif isinstance(event, VersionPublished | RoundFailed):
            self._since.append(event)

    async def _reload(self) -> None:
        tools = self._tools
        run = await tools.store_lane(lambda: tools.runs.run(self.run_id))
        assert run is not None, "runs are never removed"
        self.run = run

    def _announce(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()
        self._on_change()

    def _assignment_id(self, round_number: int, device: str) -> str:
        stem = f"{self.run_id}.{round_number}"
        tag = hmac.new(self._tag_key, f"{stem}.{device}".encode(), hashlib.sha256).hexdigest()[:TAG_CHARS]
        return f"{stem}.{tag}"

    def _assignment(self, device: str) -> m.Assignment:
        assert self._work is not None, "an assignment without a round"
        assert self._round is not None, "an assignment without a round"
        assert self._round.deadline is not None, "the first assignment sets the deadline"
        plan = self.run.start.plan
        return m.Assignment(
            assignment_id=self._assignment_id(self._work.record.round, device),
            run_id=self.run_id,
            round=self._work.record.round,
            bundle=self.model.bundle,
            version=self._work.base,
            grid=self._work.record.grid,
            codec=plan.codec,
            training=plan.training,
            deadline_s=max(self._round.deadline - asyncio.get_running_loop().time(), 0.001),
        )
