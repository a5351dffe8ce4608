"""Uploads: one Update from its header to its commit, and reports of failures.

An Update is received Chunk by Chunk into the spool. When it is complete, ``acceptance`` decides its fate: the device
receives ACCEPTED once the Update is durable. A rejected Update leaves no trace. An upload whose Round closes ends with
DISCARDED.

Three limits protect the coordinator: uploads at a time (``Limits.max_uploads``), uploads at full speed (``permits``),
and the time that a slow device may take (``delay_budget``).
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import ExitStack, aclosing, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Final, assert_never

from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput, InvalidUpdate, StorageFull, StorageUnavailable, Unavailable
from fanin.server.access.delay_budget import DelayBudget
from fanin.server.access.limited_log import LimitedLog
from fanin.server.access.limits import Limits
from fanin.server.access.permits import Permit, Permits
from fanin.server.fleet.acceptance import Accepted, CompleteUpload, Discarded, Later, accept
from fanin.server.fleet.lookup import driver_of
from fanin.server.fleet.validation import Expected, check_header
from fanin.server.rounds.troubles import cannot_write
from fanin.server.runs.catalog import Runs
from fanin.server.runs.driving.driver import RunDriver
from fanin.server.runs.driving.intake import Prospect
from fanin.server.storage.lanes import run_to_end
from fanin.server.storage.protocols.files import Upload
from fanin.server.storage.stores import Files

LOG = logging.getLogger("fanin.server.fleet.uploads")
MAX_HELD_BYTES: Final = 128 << 10
"""Bytes of a Chunk that an upload without a permit holds in memory: half of a piece of our devices, so that each is
stored at once, and enough for a thread switch to be cheap."""


class Uploads:
    """The uploads under way."""

    def __init__(self, runs: Runs, files: Files, limits: Limits) -> None:
        self._runs = runs
        self._files = files
        self._limits = limits
        self._permits = Permits()
        self._failures = LimitedLog(LOG, what="devices gave up")
        # By device: the task that serves its upload.
        self._tasks: dict[str, asyncio.Task[object]] = {}
        self._transfers: set[_Transfer] = set()

    async def upload(
        self, device: str, header: m.UpdateHeader, pieces: AsyncIterator[m.Piece]
    ) -> AsyncIterator[m.UploadReply]:
        """See ``Coordinator.upload``."""
        driver = driver_of(self._runs, header.assignment_id)
        round_number = driver.intake.check_assignment(header.assignment_id, device)
        if device not in self._tasks and len(self._tasks) >= self._limits.max_uploads:
            raise Unavailable(f"upload: {len(self._tasks)} are under way, expected fewer; try again later")
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
            async with aclosing(self._receive(_Request(driver, round_number, device, header, pieces))) as replies:
                num_replies = 0
                async for reply in replies:
                    num_replies += 1
                    if num_replies > 1:
                        # The disk has stored something since the first reply.
                        driver.intake.note_storage("")
                    yield reply
        except (StorageFull, StorageUnavailable) as exc:
            driver.intake.note_storage(cannot_write(exc))
            raise
        except InvalidInput as exc:
            # The same Assignment would bring the same Update. So it is over, also without a report.
            driver.intake.refuse(round_number, device, str(exc))
            raise
        finally:
            if self._tasks.get(device) is current:
                del self._tasks[device]

    async def report(self, device: str, report: m.Report) -> m.UploadReply:
        """See ``Coordinator.report``."""
        driver = driver_of(self._runs, report.assignment_id)
        round_number = driver.intake.check_assignment(report.assignment_id, device)
        if report.progress is not None:
            return driver.intake.note_progress(round_number, device, report.progress)
        outcome = await driver.intake.outcome(round_number, device)
        if report.failure and outcome.update_state is m.UpdateState.RECEIVING:
            await self._discard(report.assignment_id)
            if driver.intake.give_up(round_number, device, report.failure):
                # Quoted, cut and limited, because a peer chooses this text and our log holds it.
                text = f"run {driver.run_id}: round {round_number}: device {device} gave up: {report.failure!r:.400}"
                self._failures.log("GaveUp", text)
            return m.UploadReply(round_state=outcome.round_state, update_state=m.UpdateState.DISCARDED)
        return outcome

    def refuse(self, device: str, reason: str) -> None:
        """See ``Coordinator.refuse``."""
        for driver in self._runs.running():
            driver.intake.refuse_any(device, reason)

    def on_change(self) -> None:
        """End the uploads whose Updates no longer count."""
        for transfer in self._transfers:
            if not transfer.is_known_to_count():
                transfer.budget.wake()

    async def _receive(self, request: "_Request") -> AsyncGenerator[m.UploadReply, None]:
        driver, header, device = request.driver, request.header, request.device
        outcome = await driver.intake.outcome(request.round, device)
        if outcome.update_state is not m.UpdateState.RECEIVING or not request.may_count():
            yield outcome
            return
        check_header(header, _expected(driver, request.round))
        with ExitStack() as resources:
            # Shielded from the device's disconnection: the file must be closed in any case.
            upload = await run_to_end(self._files.run(self._open, resources, header, device))
            transfer = _Transfer(request, upload, DelayBudget(self._limits.stall_s))
            resources.enter_context(self._listed(transfer))
            permit = resources.enter_context(self._permits.one())
            source = _Pieces(request.pieces, transfer.budget, permit)
            try:
                if not upload.is_complete():
                    with suppress(TimeoutError):
                        await source.wait_for_permit()
                # The Round may have closed while this upload waited. Then the first reply is the last one.
                if request.may_count():
                    with source.replying():
                        yield _progress(upload)
                while not upload.is_complete() and request.may_count():
                    try:
                        if not await self._store_chunk(upload, source):
                            return
                    except TimeoutError as exc:
                        if transfer.budget.is_spent and request.may_count():
                            raise Unavailable(self._stalled) from exc
                        # Otherwise ``on_change`` ended the wait, and the loop asks whether the Update still counts.
                        continue
                    if not upload.is_complete() and request.may_count():
                        with source.replying():
                            yield _progress(upload)
                permit.give_back()
                if upload.is_complete():
                    yield await self._conclude(request, upload)
                else:
                    await run_to_end(self._discard(header.assignment_id))
                    yield _last_reply(request, upload, m.UpdateState.DISCARDED)
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

    async def _conclude(self, request: "_Request", upload: Upload) -> m.UploadReply:
        """Let a complete upload meet its fate.

        If the Plan allows staleness, an upload that ends while a Round ends waits for the next Round. A device that
        disconnects meanwhile ends the wait.
        """
        update = CompleteUpload(device=request.device, header=request.header, upload=upload)
        while True:
            # Shielded from the device's disconnection: after a commit, no upload may remain.
            match await run_to_end(accept(update, request.driver.intake, self._files)):
                case Accepted():
                    return _last_reply(request, upload, m.UpdateState.ACCEPTED)
                case Discarded():
                    return _last_reply(request, upload, m.UpdateState.DISCARDED)
                case Later(changed=changed):
                    await changed.wait()
                case other:
                    assert_never(other)

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


@dataclass(frozen=True, slots=True)
class _Request:
    """One call of ``upload`` whose Assignment was checked. ``round`` is the Assignment's."""

    driver: RunDriver
    round: int
    device: str
    header: m.UpdateHeader
    pieces: AsyncIterator[m.Piece]

    def may_count(self) -> bool:
        """Return whether the Update counts, or may count in the next Round. Raises Unavailable if undecided."""
        return self.driver.intake.prospect(self.round, self.device) is not Prospect.NEVER


@dataclass(frozen=True, slots=True, eq=False)
class _Transfer:
    """An upload under way."""

    request: _Request
    upload: Upload
    budget: DelayBudget

    def is_known_to_count(self) -> bool:
        """Return whether the Update counts. False if that is undecided: the upload then ends with Unavailable."""
        try:
            return self.request.may_count()
        except Unavailable:
            return False


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


def _expected(driver: RunDriver, round_number: int) -> Expected:
    setup = driver.setup
    return Expected(
        run_id=driver.run_id,
        round=round_number,
        version_sha256=driver.intake.opened(round_number).base.sha256,
        codec=setup.plan.codec,
        table=setup.layout.total_table,
        num_labels=setup.num_labels,
        statistics=setup.statistics,
    )


def _last_reply(request: _Request, upload: Upload, state: m.UpdateState) -> m.UploadReply:
    return m.UploadReply(
        round_state=request.driver.intake.round_state(request.round, request.device),
        update_state=state,
        received_bytes=upload.received_bytes,
    )


def _progress(upload: Upload) -> m.UploadReply:
    return m.UploadReply(
        round_state=m.RoundState.OPEN,
        update_state=m.UpdateState.RECEIVING,
        received_bytes=upload.received_bytes,
    )
