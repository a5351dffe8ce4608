"""Uploads: one Update from its header to its commit, and reports of failures.

An Update is received Chunk by Chunk into the spool, as long as the decision about it (``rounds.decision``) allows. A
complete one is committed (``runs.driving.updates``): the device receives ACCEPTED once the Update is durable. A
rejected Update leaves no trace. An upload whose Round closes ends with DISCARDED.

Three limits protect the coordinator: uploads at a time (``Limits.max_uploads``), uploads at full speed (``permits``),
and the time that a slow device may take (``delay_budget``).
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import ExitStack, aclosing, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Final, assert_never

from fanin.edge.scopes import LogScope, note_scope
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput, InvalidUpdate, StorageFull, StorageUnavailable, Unavailable, coded
from fanin.server.access.delay_budget import DelayBudget
from fanin.server.access.limited_log import LimitedLog
from fanin.server.access.limits import Limits
from fanin.server.access.permits import Permit, Permits
from fanin.server.fleet.activity import Activity
from fanin.server.fleet.observer import AssignedWork, FleetObserver, Unobserved, WorkOutcome
from fanin.server.fleet.payloads import MaskedPayloads
from fanin.server.rounds.decision import Accepted, Decision, Discarded, Later, Receive, Undecided
from fanin.server.rounds.troubles import cannot_write
from fanin.server.runs.driving.driver import RunDriver
from fanin.server.runs.driving.drivers import Drivers
from fanin.server.runs.view import policy_code
from fanin.server.storage.lanes import run_to_end
from fanin.server.storage.protocols.files import Upload
from fanin.server.storage.stores import Files

LOG = logging.getLogger("fanin.server.fleet.uploads")
MAX_HELD_BYTES: Final = 128 << 10
"""Bytes of a Chunk that an upload without a permit holds in memory: half of a piece of our devices, so that each is
stored at once, and enough for a thread switch to be cheap."""


class Uploads:
    """The uploads under way."""

    def __init__(self, drivers: Drivers, files: Files, limits: Limits, activity: Activity) -> None:
        self._drivers = drivers
        self.observer: FleetObserver = Unobserved()
        self._activity = activity
        self._files = files
        self._limits = limits
        self._permits = Permits()
        self._failures = LimitedLog(LOG, what="devices gave up")
        # By device: the task that serves its upload.
        self._tasks: dict[str, asyncio.Task[object]] = {}
        self._transfers: set[_Transfer] = set()
        self._masked = MaskedPayloads()

    @property
    def num_active(self) -> int:
        """Number of uploads under way."""
        return len(self._tasks)

    async def upload(
        self, device: str, header: m.UpdateHeader, pieces: AsyncIterator[m.Piece]
    ) -> AsyncIterator[m.UploadReply]:
        """Receive a device's Update and commit it to the open Round.

        The first reply reports how many bytes the coordinator has already, so send pieces from that offset on. One
        reply follows each stored Chunk. The last reply reports ACCEPTED or DISCARDED. An ACCEPTED Update is durable
        and in exactly one Round; repeating its upload returns ACCEPTED again.

        A second upload of the same device ends the first one.

        Args:
            device: The device's id.
            header: The Update's header, with the size and the digests of the payload.
            pieces: The payload from the reported offset on. Each piece starts where the one before it ended.

        Yields:
            The state of the Round, the state of the Update, and the number of bytes received.

        Raises:
            InvalidUpdate: The header does not match its Assignment, or bytes do not match the header. Nothing is kept.
            NotFound: The Assignment was not issued to this device.
            StorageFull: The disk is full. The bytes stored so far are kept.
            Unavailable: Too many uploads are under way, this one is too slow, or the Run is paused. The bytes stored so
                far are kept; upload again later.
        """
        driver, round_number = self._drivers.of_assignment(header.assignment_id, device)
        if device not in self._tasks and len(self._tasks) >= self._limits.max_uploads:
            raise Unavailable(
                f"upload: {len(self._tasks)} are under way, expected fewer; try again later", code="FN-0677"
            )
        note_scope(LogScope(run=driver.run_id, round=round_number, device=device))
        work = AssignedWork(run_id=driver.run_id, round=round_number, device=device)
        current = asyncio.current_task()
        assert current is not None, "an upload is served by a task"
        earlier = self._tasks.get(device)
        self._tasks[device] = current
        try:
            # A second upload of a device means that it reconnected: cancel the first one. Its file then has one writer,
            # and a device cannot hold permits through several Assignments.
            if earlier is not None and earlier is not current:
                earlier.cancel()
                await run_to_end(asyncio.wait({earlier}))
            async with aclosing(self._receive(driver, round_number, device, header, pieces)) as replies:
                num_replies, stored_bytes = 0, 0
                async for reply in replies:
                    num_replies += 1
                    if num_replies > 1:
                        self.observer.received(reply.received_bytes - stored_bytes)
                    stored_bytes = reply.received_bytes
                    if reply.update_state is m.UpdateState.ACCEPTED:
                        driver.course.note_storage("")
                    self._note_verdict(work, reply, is_first=num_replies == 1)
                    yield reply
        except (StorageFull, StorageUnavailable) as exc:
            driver.course.note_storage(cannot_write(exc))
            raise
        except InvalidInput as exc:
            # The same Assignment would bring the same Update. So it is over, also without a report.
            driver.updates.refuse(round_number, device, coded(exc))
            self.observer.concluded(work, WorkOutcome.REFUSED, exc.code)
            self._activity.reject(device, coded(exc))
            raise
        finally:
            if self._tasks.get(device) is current:
                del self._tasks[device]

    async def report(self, device: str, report: m.Report) -> m.UploadReply:
        """Return the state of a device's Update.

        A report of a failure frees the device's place for another one. A report of progress keeps it; of its reply only
        the state of the Round counts.

        Raises:
            NotFound: The Assignment was not issued to this device.
            Unavailable: The Run is paused between two Rounds, or waits for its operator.
        """
        driver, round_number = self._drivers.of_assignment(report.assignment_id, device)
        note_scope(LogScope(run=driver.run_id, round=round_number, device=device))
        if report.progress is not None:
            return _reply(driver.updates.note_progress(round_number, device, report.progress), driver)
        decision = await driver.updates.decide(round_number, device)
        if report.failure and isinstance(decision, Receive | Later):
            await self._discard(report.assignment_id)
            if driver.updates.give_up(round_number, device, report.failure):
                # Quoted, cut and limited, because a peer chooses this text and our log holds it.
                text = f"run {driver.run_id}: round {round_number}: device {device} gave up: {report.failure!r:.400}"
                self._failures.log("GaveUp", text)
                work = AssignedWork(run_id=driver.run_id, round=round_number, device=device)
                code = policy_code(report.failure)
                self.observer.concluded(work, WorkOutcome.GAVE_UP, code)
                if code:
                    self._activity.reject(device, report.failure)
            decision = Discarded(is_open=True)
        return _reply(decision, driver)

    def refuse(self, device: str, reason: str) -> None:
        """Free the place of a device that sent something else than an Update, with the error of its upload."""
        self._activity.reject(device, reason)
        for driver in self._drivers.running():
            driver.updates.refuse_any(device, reason)

    def progress(self, run_id: str) -> dict[str, m.UploadProgress]:
        """Return the uploads of a Run that are under way, by device."""
        return {
            each.device: m.UploadProgress(
                received_bytes=each.upload.received_bytes, size_bytes=each.upload.header.payload.size_bytes
            )
            for each in self._transfers
            if each.upload is not None and each.driver.run_id == run_id
        }

    def on_change(self) -> None:
        """End the uploads whose Updates no longer count."""
        for transfer in self._transfers:
            transfer.look()

    async def _receive(
        self, driver: RunDriver, round_number: int, device: str, header: m.UpdateHeader, pieces: AsyncIterator[m.Piece]
    ) -> AsyncGenerator[m.UploadReply, None]:
        decision = await driver.updates.admit(round_number, device, header)
        if not isinstance(decision, Receive | Later):
            yield _reply(decision, driver)
            return
        if driver.setup.protocol.is_masked:
            self._masked.check(device, header)
        transfer = _Transfer(driver, round_number, device, DelayBudget(self._limits.stall_s), decision)
        with ExitStack() as resources:
            resources.enter_context(self._listed(transfer))
            # Shielded from the device's disconnection: the file must be closed in any case.
            upload = await run_to_end(self._files.run(self._open, resources, header, device))
            transfer.upload = upload
            permit = resources.enter_context(self._permits.one())
            source = _Pieces(pieces, transfer.budget, permit)
            try:
                if not upload.is_complete():
                    with suppress(TimeoutError):
                        await source.wait_for_permit()
                # The Round may have closed while this upload waited. Then the first reply is the last one.
                if transfer.may_count():
                    with source.replying():
                        yield _progress(upload)
                while not upload.is_complete() and transfer.may_count():
                    try:
                        if not await self._store_chunk(upload, source):
                            return
                    except TimeoutError as exc:
                        if transfer.budget.is_spent and transfer.may_count():
                            raise Unavailable(self._stalled, code="FN-0678") from exc
                        # Otherwise ``on_change`` ended the wait, and the loop ends if the Update no longer counts.
                        continue
                    if not upload.is_complete() and transfer.may_count():
                        with source.replying():
                            yield _progress(upload)
                permit.give_back()
                if upload.is_complete():
                    decision = await self._conclude(transfer, upload)
                else:
                    await run_to_end(self._discard(header.assignment_id))
                    decision = Discarded()
                yield _reply(decision, driver, upload.received_bytes)
            except InvalidUpdate:
                await run_to_end(self._discard(header.assignment_id))
                raise

    def _open(self, resources: ExitStack, header: m.UpdateHeader, device: str) -> Upload:
        return resources.enter_context(closing(self._files.spool.open(header, device)))

    async def _store_chunk(self, upload: Upload, source: "_Pieces") -> bool:
        """Receive and store the next Chunk.

        Returns:
            False if the device disconnects before the Chunk is complete.

        Raises:
            TimeoutError: The device is too slow, or a Run has changed.
        """
        await source.wait_for_permit()
        num_held = 0
        while (piece := await source.next()) is not None:
            num_held += len(piece.data)
            is_complete = upload.add(piece)
            # No name may keep a stored piece in memory while the next one is awaited.
            del piece
            # Any number of uploads may run without a permit, so they hold little of a Chunk in memory.
            if is_complete or (num_held >= MAX_HELD_BYTES and not source.permit.is_held):
                await run_to_end(self._files.run(upload.store))
                num_held = 0
            if is_complete:
                return True
        return False

    async def _conclude(self, transfer: "_Transfer", upload: Upload) -> Decision:
        """Commit a complete upload.

        If the Plan allows staleness, an upload that ends while a Round ends waits for the next Round. A device that
        disconnects meanwhile ends the wait.
        """
        updates = transfer.driver.updates
        while True:
            # Before the decision, so that no change after it is missed.
            changed = transfer.driver.course.changed
            # Shielded from the device's disconnection: after a commit, no upload may remain.
            work = AssignedWork(run_id=transfer.driver.run_id, round=transfer.round, device=transfer.device)
            with self.observer.committing(work):
                decision = await run_to_end(updates.commit(transfer.device, upload))
            if not isinstance(decision, Later):
                return decision
            await changed.wait()

    def _note_verdict(self, work: AssignedWork, reply: m.UploadReply, *, is_first: bool) -> None:
        # The first reply to an Update that was accepted before is its verdict.
        if reply.update_state is m.UpdateState.ACCEPTED and not is_first:
            self.observer.concluded(work, WorkOutcome.ACCEPTED)
        elif reply.update_state is m.UpdateState.DISCARDED:
            self.observer.concluded(work, WorkOutcome.DISCARDED)

    async def _discard(self, assignment_id: str) -> None:
        await self._files.run(self._files.spool.discard, assignment_id)

    @property
    def _stalled(self) -> str:
        return (
            f"upload: the device was idle for {self._limits.stall_s:g} s, or sent less than 4 KiB/s on average; resume "
            "the upload"
        )

    @contextmanager
    def _listed(self, transfer: "_Transfer") -> Iterator[None]:
        """Let ``on_change`` reach an upload while it is under way."""
        self._transfers.add(transfer)
        try:
            yield
        finally:
            self._transfers.discard(transfer)


@dataclass(slots=True, eq=False)
class _Transfer:
    """An upload under way.

    Attributes:
        driver: The driver of its Run.
        round: The Round of its Assignment.
        device: The device.
        budget: The time that the device may take.
        decision: The decision about its Update after the last change of a Run.
        upload: Its file, None before it is open.
    """

    driver: RunDriver
    round: int
    device: str
    budget: DelayBudget
    decision: Decision
    upload: Upload | None = None

    def look(self) -> None:
        """Decide again after a change, and end the wait for the device if the Update does not count or is undecided."""
        self.decision = self.driver.updates.outlook(self.round, self.device)
        if not isinstance(self.decision, Receive | Later):
            self.budget.wake()

    def may_count(self) -> bool:
        """Return whether the Update counts, or may count in the next Round. Raises Unavailable if undecided."""
        if isinstance(self.decision, Undecided):
            raise _undecided(self.driver)
        return isinstance(self.decision, Receive | Later)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The pieces that one device sends, within its delay budget and its permit."""

    requests: AsyncIterator[m.Piece]
    budget: DelayBudget
    permit: Permit

    async def wait_for_permit(self) -> None:
        """Wait until the device may send a Chunk. Raises TimeoutError if a Run changes."""
        async with self.budget.waiting():
            await self.permit.get()

    async def next(self) -> m.Piece | None:
        """Return the next piece, or None at the end. Raises TimeoutError."""
        with self.permit.lent():
            async with self.budget.reading():
                piece = await anext(self.requests, None)
        if piece is not None:
            self.budget.gain(len(piece.data))
        return piece

    @contextmanager
    def replying(self) -> Iterator[None]:
        """Yield a reply to the device within this context: the device's time to read it is limited."""
        with self.permit.lent(), self.budget.writing():
            yield


def _reply(decision: Decision, driver: RunDriver, received_bytes: int = 0) -> m.UploadReply:
    """Return the reply to a device. Raises Unavailable if the decision is to be repeated later."""
    match decision:
        case Receive() | Later():
            is_open, state = True, m.UpdateState.RECEIVING
        case Accepted(is_open=is_open):
            state = m.UpdateState.ACCEPTED
        case Discarded(is_open=is_open):
            state = m.UpdateState.DISCARDED
        case Undecided():
            raise _undecided(driver)
        case other:
            assert_never(other)
    round_state = m.RoundState.OPEN if is_open else m.RoundState.CLOSED
    return m.UploadReply(round_state=round_state, update_state=state, received_bytes=received_bytes)


def _undecided(driver: RunDriver) -> Unavailable:
    return Unavailable(
        f"run {driver.run_id}: paused between two rounds, or the coordinator is stopping; resume the upload later",
        code="FN-0696",
    )


def _progress(upload: Upload) -> m.UploadReply:
    return m.UploadReply(
        round_state=m.RoundState.OPEN,
        update_state=m.UpdateState.RECEIVING,
        received_bytes=upload.received_bytes,
    )
