"""The coordinator towards devices: enroll, check in, download, upload, report.

It holds a driver for each Run and the polls that wait for work. Nothing here knows gRPC: ``service`` turns
calls into these methods, and tests and simulations call them directly.
"""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, aclosing, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from fanin.protos import messages as m
from fanin.protos.chunks import short
from fanin.protos.errors import Conflict, InvalidUpdate, NotFound, StorageFull, Unavailable
from fanin.protos.names import check_name
from fanin.server.access.patience import Patience
from fanin.server.access.permits import Permit, Permits
from fanin.server.fleet.bulletin import Bulletin
from fanin.server.fleet.downloads import pieces_of
from fanin.server.fleet.selection import choose, retry_window
from fanin.server.fleet.validation import Expected, check_header, labels_of
from fanin.server.rounds.effects import Tools, whole
from fanin.server.runs.catalog import Runs
from fanin.server.runs.driver import RunDriver
from fanin.server.storage.spool import Upload

T = TypeVar("T")
LOG = logging.getLogger("fanin.server.fleet.coordinator")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much the coordinator takes on.

    ``max_parked`` polls wait at the same time (each costs some 10 kB), for at most ``max_wait_s``, which stays
    under the 60 s after which common proxies cut an idle line. ``max_uploads`` are under way at the same time, each
    with an open file. A transfer whose device sends or reads nothing for ``stall_s``, or on the whole next to nothing
    (``patience``), is ended; the device goes on with it later.
    """

    max_parked: int = 10_000
    max_uploads: int = 4_096
    max_wait_s: float = 45.0
    stall_s: float = 60.0


@dataclass(slots=True)
class _Poll:
    check_in: m.CheckIn
    answer: asyncio.Future[m.CheckInAnswer]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transfer:
    driver: RunDriver
    round: int
    patience: Patience


class Coordinator:
    """What the Fleet service does."""

    def __init__(self, runs: Runs, tools: Tools, limits: Limits, rng: random.Random) -> None:
        self._runs = runs
        self._bulletin = Bulletin(runs)
        self._tools = tools
        self._limits = limits
        self._rng = rng
        self._parked: dict[str, _Poll] = {}
        self._uploading: dict[str, asyncio.Task[object]] = {}
        self._receiving: set[_Transfer] = set()
        self._permits = Permits()
        runs.on_change = self._on_change

    async def check_in(self, device: str, check_in: m.CheckIn) -> m.CheckInAnswer:
        """An Assignment as soon as there is one, or when to come back, with a newer Version than the device serves."""
        answer = await self._answer(device, check_in)
        if isinstance(answer, m.Assigned):
            return answer
        return replace(answer, newest=self._bulletin.newer(device, check_in))

    async def _answer(self, device: str, check_in: m.CheckIn) -> m.CheckInAnswer:
        if not m.OLDEST_PROTOCOL <= check_in.protocol <= m.PROTOCOL:
            known = f"{m.OLDEST_PROTOCOL} to {m.PROTOCOL}"
            text = f"protocol: got {check_in.protocol}, expected {known}; install another fanin"
            return m.Rejected(reason=m.RejectReason.UPGRADE, text=text)
        refusals = [driver.intake.refusal(check_in.capabilities) for driver in self._runs.running()]
        if refusals and all(refusals):
            return m.Rejected(reason=m.RejectReason.UNSUITABLE, text="; ".join(refusals))
        earlier = self._parked.pop(device, None)
        if earlier is not None and not earlier.answer.done():
            # Two processes with one key would else chase each other as fast as the line allows.
            earlier.answer.set_result(m.Wait(retry_min_s=1.0, retry_max_s=5.0))
        if len(self._parked) >= self._limits.max_parked:
            return self._turn_away()
        poll = _Poll(check_in, asyncio.get_running_loop().create_future())
        self._parked[device] = poll
        self._hand_out(asking=device)
        self._tell_newest([device])
        try:
            # Not wait_for: before Python 3.12 it forgets that it was cancelled if the answer came at that moment.
            async with asyncio.timeout(min(check_in.wait_s, self._limits.max_wait_s)):
                return await poll.answer
        except TimeoutError:
            # It has waited its turn on the line and may ask again at once.
            return m.Wait(retry_min_s=0.0, retry_max_s=1.0)
        finally:
            if self._parked.get(device) is poll:
                del self._parked[device]

    def download(self, device: str, download: m.Download) -> AsyncIterator[bytes]:
        """The bytes of a Chunk from an offset on, then those of more, in pieces. Raises NotFound, Corrupted."""
        return pieces_of(device, download, self._driver, self._tools, self._limits.stall_s)

    async def upload(
        self, device: str, header: m.UpdateHeader, pieces: AsyncIterator[m.Piece]
    ) -> AsyncIterator[m.UploadReply]:
        """Take an Update; the first reply says where to go on.

        Raises InvalidUpdate, NotFound, StorageFull, Unavailable while too many others upload.
        """
        driver = self._driver(header.assignment_id)
        driver.intake.check_assignment(header.assignment_id, device)
        if device not in self._uploading and len(self._uploading) >= self._limits.max_uploads:
            raise Unavailable(f"upload: {len(self._uploading)} are under way, expected fewer; try again later")
        current = asyncio.current_task()
        assert current is not None, "an upload is served by a task"
        earlier = self._uploading.get(device)
        self._uploading[device] = current
        try:
            # One upload of a device at a time, from the first look at what became of it to its end: it has reconnected,
            # its file has one writer, and nobody has many permits by many Assignments.
            if earlier is not None and earlier is not current:
                earlier.cancel()
                await whole(asyncio.wait({earlier}))
            async with aclosing(self._receive(driver, device, header, pieces)) as replies:
                num_replies = 0
                async for reply in replies:
                    num_replies += 1
                    if num_replies > 1:
                        # Something was stored since the first one.
                        driver.intake.note_space(is_lacking=False)
                    yield reply
        except StorageFull:
            driver.intake.note_space(is_lacking=True)
            raise
        finally:
            if self._uploading.get(device) is current:
                del self._uploading[device]

    async def _receive(
        self, driver: RunDriver, device: str, header: m.UpdateHeader, pieces: AsyncIterator[m.Piece]
    ) -> AsyncGenerator[m.UploadReply, None]:
        round_number = driver.intake.check_assignment(header.assignment_id, device)
        outcome = await driver.intake.outcome(round_number, device)
        if outcome.update_state is not m.UpdateState.RECEIVING or not driver.intake.may_count(round_number):
            yield outcome
            return
        plan = driver.run.start.plan
        expected = Expected(
            run_id=driver.run_id,
            round=round_number,
            version_sha256=driver.intake.made(round_number).base.sha256,
            codec=plan.codec,
            table=driver.model.table,
            num_labels=labels_of(driver.model.manifest),
        )
        check_header(header, expected)
        tools = self._tools
        # Whole, whatever the lane is at when the device hangs up: the file must not outlive its writer.
        patience = Patience(self._limits.stall_s)
        with ExitStack() as files:
            upload = await whole(
                tools.disk_lane(lambda: files.enter_context(closing(tools.spool.open(header, device))))
            )
            files.enter_context(self._told(_Transfer(driver=driver, round=round_number, patience=patience)))
            permit = files.enter_context(self._permits.one())
            if not upload.is_whole():
                with suppress(TimeoutError):
                    async with patience.waiting():
                        await permit.get()
            try:
                # The Round may have closed while this one waited: then the first reply says so.
                if driver.intake.may_count(round_number):
                    with permit.lent(), patience.writing():
                        yield _receiving(upload)
                while not upload.is_whole() and driver.intake.may_count(round_number):
                    try:
                        if not await self._store_chunk(upload, _Pieces(pieces, patience, permit)):
                            return
                    except TimeoutError as exc:
                        # Else something happened to the Run: whether it still wants these bytes is asked above.
                        if patience.is_over and driver.intake.may_count(round_number):
                            raise Unavailable(self._stalled) from exc
                        continue
                    if not upload.is_whole() and driver.intake.may_count(round_number):
                        with permit.lent(), patience.writing():
                            yield _receiving(upload)
                permit.give_back()
                yield await self._accepted(driver, device, upload)
            except InvalidUpdate:
                await whole(tools.disk_lane(lambda: tools.spool.discard(header.assignment_id)))
                raise

    async def report(self, device: str, report: m.Report) -> m.UploadReply:
        """What became of a device's Update; with a failure, its place is given to another. Raises NotFound."""
        driver = self._driver(report.assignment_id)
        round_number = driver.intake.check_assignment(report.assignment_id, device)
        outcome = await driver.intake.outcome(round_number, device)
        if report.failure and outcome.update_state is m.UpdateState.RECEIVING:
            tools = self._tools
            await tools.disk_lane(lambda: tools.spool.discard(report.assignment_id))
            driver.intake.give_up(round_number, device)
            # In quotes and cut: it is a peer's text, in our log.
            LOG.warning(
                "run %s: round %d: device %s gave up: %r", driver.run_id, round_number, device, report.failure[:400]
            )
            return m.UploadReply(round_state=outcome.round_state, update_state=m.UpdateState.DISCARDED)
        return outcome

    async def stop(self) -> None:
        """Answer all polls; devices come back when there is a coordinator again."""
        for poll in self._parked.values():
            if not poll.answer.done():
                poll.answer.set_result(m.Wait(retry_min_s=1.0, retry_max_s=5.0))
        self._parked.clear()

    async def _accepted(self, driver: RunDriver, device: str, upload: Upload) -> m.UploadReply:
        """What becomes of an upload that is whole, or no longer needed. Where stale Updates count, one that comes while
        a Round ends waits for the next; a device that hangs up meanwhile is let go."""
        number = upload.header.round
        while upload.is_whole() and driver.intake.may_count(number):
            changed = driver.course.changed
            if driver.intake.takes(number):
                reply = await whole(self._commit(driver, device, upload))
                if reply is not None:
                    return reply
            await changed.wait()
        return await whole(self._finish(driver, upload, None))

    async def _commit(self, driver: RunDriver, device: str, upload: Upload) -> m.UploadReply | None:
        """One try; None if the open Round does not take the Update, but the next one may."""
        tools, header = self._tools, upload.header
        await tools.disk_lane(lambda: tools.spool.commit(upload, device))
        found = await driver.intake.commit(device, header, upload.resumed_bytes)
        if found is None and not driver.intake.is_refused(header.round):
            return None
        if found is None or found.payload != header.payload:
            await tools.disk_lane(lambda: tools.spool.withdraw(header, device))
        return await self._finish(driver, upload, found)

    async def _finish(self, driver: RunDriver, upload: Upload, found: m.UpdateHeader | None) -> m.UploadReply:
        tools, header = self._tools, upload.header
        await tools.disk_lane(lambda: tools.spool.discard(header.assignment_id))
        is_open = driver.intake.may_count(header.round)
        return m.UploadReply(
            round_state=m.RoundState.OPEN if is_open else m.RoundState.CLOSED,
            update_state=m.UpdateState.ACCEPTED if found is not None else m.UpdateState.DISCARDED,
            received_bytes=upload.received_bytes,
        )

    async def _store_chunk(self, upload: Upload, pieces: "_Pieces") -> bool:
        """Take the next Chunk; False if the device hangs up before it is whole. Raises TimeoutError."""
        async with pieces.patience.waiting():
            await pieces.permit.get()
        while (piece := await pieces.next()) is not None:
            if upload.take(piece):
                await whole(self._tools.disk_lane(upload.store))
                return True
        return False

    @property
    def _stalled(self) -> str:
        return f"upload: nothing came for {self._limits.stall_s:g} s, or next to nothing for longer; go on later"

    @contextmanager
    def _told(self, transfer: _Transfer) -> Iterator[None]:
        """While an upload is under way: it hears at once that its Update is no longer needed."""
        self._receiving.add(transfer)
        try:
            yield
        finally:
            self._receiving.discard(transfer)

    def _turn_away(self) -> m.Wait:
        retry_min_s, retry_max_s = retry_window(self._tools.devices.num_devices)
        return m.Wait(retry_min_s=retry_min_s, retry_max_s=retry_max_s)

    def _driver(self, assignment_id: str) -> RunDriver:
        check_name("assignment", assignment_id)
        run_id, *rest = assignment_id.rsplit(".", 2)
        if len(rest) != 2:
            raise NotFound(f"assignment {assignment_id}: got no run and round in it; check in again")
        try:
            return self._runs.driver(run_id)
        except NotFound as exc:
            raise NotFound(f"assignment {short(rest[1])} of run {run_id}: {exc}; check in again") from exc
        except Conflict as exc:
            # The Run waits for its operator. Its devices keep what they have until it is taken up.
            raise Unavailable(f"assignment {short(rest[1])} of run {run_id}: {exc}") from exc

    def _on_change(self) -> None:
        self._hand_out()
        if self._bulletin.has_changed():
            self._tell_newest(list(self._parked))
        for transfer in self._receiving:
            if not _may_count(transfer):
                transfer.patience.wake()

    def _hand_out(self, asking: str = "") -> None:
        """Answer devices that wait: the one that is ``asking``, or, when places have become free, all.

        A device that holds an Assignment, in whichever Run, is given that one again; only then are free places
        given out, by chance.
        """
        looked_at = [asking] if asking else list(self._parked)
        running = self._runs.running()
        for driver in running:
            self._offer(driver, [device for device in looked_at if driver.intake.holds(device)])
        for driver in running:
            if driver.intake.num_places:
                waiting = [one for one in looked_at if self._waits_for(one, driver) and driver.intake.may_join(one)]
                self._offer(driver, choose(waiting, driver.intake.num_places, self._rng))

    def _tell_newest(self, devices: Sequence[str]) -> None:
        """Answer those of these devices that wait and serve an older Version of a Run that opens no Round."""
        for device in devices:
            poll = self._parked.get(device)
            if poll is not None and not poll.answer.done():
                answer = self._bulletin.due(poll.check_in, len(devices))
                if answer is not None:
                    poll.answer.set_result(answer)

    def _offer(self, driver: RunDriver, devices: Sequence[str]) -> None:
        for device in devices:
            poll = self._parked.get(device)
            assignment = None if poll is None or poll.answer.done() else driver.intake.offer(device)
            if poll is not None and assignment is not None:
                del self._parked[device]
                poll.answer.set_result(m.Assigned(assignment=assignment))

    def _waits_for(self, device: str, driver: RunDriver) -> bool:
        poll = self._parked.get(device)
        return poll is not None and not poll.answer.done() and not driver.intake.refusal(poll.check_in.capabilities)


def _receiving(upload: Upload) -> m.UploadReply:
    return m.UploadReply(
        round_state=m.RoundState.OPEN,
        update_state=m.UpdateState.RECEIVING,
        received_bytes=upload.received_bytes,
    )


def _may_count(transfer: _Transfer) -> bool:
    try:
        return transfer.driver.intake.may_count(transfer.round)
    except Unavailable:
        # The upload asks too, and is told so.
        return False


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What one device sends."""

    requests: AsyncIterator[m.Piece]
    patience: Patience
    permit: Permit

    async def next(self) -> m.Piece | None:
        """The next piece, None at the end. Raises TimeoutError."""
        with self.permit.lent():
            async with self.patience.reading():
                piece = await anext(self.requests, None)
        if piece is not None:
            self.patience.gain(len(piece.data))
        return piece
