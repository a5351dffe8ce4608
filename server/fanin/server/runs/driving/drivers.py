"""The drivers of a coordinator's Runs: which Runs it drives, and why it does not drive the others.

A Run is in one of three states here. It has a driver. Or it is broken: its record could not be continued. Or another
coordinator drives it: its driver is stopped, and a task follows its record for the devices that ask here.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from types import MappingProxyType

from fanin.edge.scopes import about_run
from fanin.protos.chunks import short
from fanin.protos.errors import Conflict, Corrupted, FaninError, NotFound, Superseded, Unavailable, public
from fanin.protos.messages import MAX_LIVE_DEVICES, RunState, UploadProgress
from fanin.protos.names import check_name
from fanin.server.rounds.troubles import RepeatedTroubles, reason_of
from fanin.server.rounds.worker import Observer, Worker
from fanin.server.runs.driving.commands import RunControl
from fanin.server.runs.driving.course import Course
from fanin.server.runs.driving.driver import RunDriver
from fanin.server.runs.driving.intake import Parked
from fanin.server.runs.publications import Followers, Publications
from fanin.server.runs.recorded_setup import Parts, check_key, check_up_to_date, setup_of
from fanin.server.runs.view import LiveRun
from fanin.server.storage.stores import Files, Stores

LOG = logging.getLogger("fanin.server.runs.driving.drivers")


class Drivers:
    """The drivers of the Runs of one coordinator.

    Args:
        stores: The record.
        files: Blobs and spool.
        observer: Sees each effect of each Run.
        parts: The parts that Plans may name, in addition to the installed ones.

    Attributes:
        troubles: Failures of work for the Runs, which operators read with them.
        starting: Held while the driver of a Run starts.
        parked: The check-ins that wait for work, by device.
        uploading: Returns the uploads of a Run that are under way, by device. The receiver of uploads sets it.
    """

    def __init__(self, stores: Stores, files: Files, observer: Observer, parts: Parts) -> None:
        self._stores, self._files, self._parts = stores, files, parts
        self._observer = observer
        self._drivers: dict[str, RunDriver] = {}
        self._controls: dict[str, RunControl] = {}
        self._publications: dict[str, Publications] = {}
        # By id: the reason why a Run could not be continued, or a note that another coordinator drives it.
        self._broken: dict[str, str] = {}
        # Drivers whose Runs another coordinator drives, and the tasks that follow the records of these Runs.
        self._superseded: list[RunDriver] = []
        self.troubles = RepeatedTroubles(LOG)
        self._followers = Followers(self._notify, self.troubles)
        self.starting = asyncio.Lock()
        self.parked: dict[str, Parked] = {}
        self.uploading: Callable[[str], Mapping[str, UploadProgress]] = lambda _run_id: {}
        self._listeners: list[Callable[[], None]] = []

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each change of a Run that devices may wait for."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Continue all Runs of the record."""
        files = self._files
        # Before any driver writes a blob.
        await files.run(files.blobs.sweep)
        for run_id in await self._stores.runs.run_ids():
            # One damaged Run must not keep the others from being served.
            with suppress(Conflict):
                await self._drive(run_id)
        recent = [one for driver in self._drivers.values() for one in driver.recent_rounds]
        try:
            # Devices resume their uploads to a broken Run when it is continued, so its last Round keeps its files.
            lasts = [await self._stores.rounds.last(run_id) for run_id in self._broken]
        except Corrupted as exc:
            LOG.error("spool: not cleaned up at this start: %s", exc)
            return
        recent += [(last.run_id, last.round) for last in lasts if last is not None]
        await files.run(files.spool.sweep, recent)

    async def stop(self) -> None:
        """Stop all drivers."""
        # A strategy that runs now must not hold the drivers.
        self._parts.strategies.close()
        await self._followers.stop()
        for driver in (*self._drivers.values(), *self._superseded):
            await driver.stop()

    def running(self) -> tuple[RunDriver, ...]:
        """Return the drivers of the Runs that open Rounds, oldest first."""
        return tuple([driver for driver in self._drivers.values() if driver.course.run.state is RunState.RUNNING])

    def publications(self) -> tuple[Publications, ...]:
        """Return the Versions of all Runs for devices, oldest Run first, also of Runs that are driven elsewhere.

        A Run of a restored backup has none until its publisher reclaims it: devices may have seen later ones.
        """
        return tuple(each for each in self._publications.values() if each.view.record.restored_at_s is None)

    def find_publications(self, run_id: str) -> Publications | None:
        """Return the Versions of a Run for devices, or None if the Run is unknown or could not be continued here."""
        return self._publications.get(run_id)

    def find(self, run_id: str) -> RunDriver | None:
        """Return the driver of a Run, or None without one."""
        return self._drivers.get(run_id)

    def driver(self, run_id: str) -> RunDriver:
        """Return the driver of a Run.

        Raises:
            NotFound: There is no such Run.
            Conflict: The Run could not be continued after a start of the coordinator, or another one drives it.
        """
        driver = self._drivers.get(run_id)
        if run_id in self._broken:
            raise Conflict(self._broken[run_id], code="FN-0615")
        if driver is None:
            raise unknown_run(run_id)
        return driver

    def of_assignment(self, assignment_id: str, device: str) -> tuple[RunDriver, int]:
        """Return the driver of the Run of a device's Assignment, and the number of the Assignment's Round.

        Raises:
            NotFound: There is no such Run, or it has not issued the Assignment to this device.
            Unavailable: The Run is broken and waits for its operator. Its devices keep their Updates.
        """
        run_id = run_of(assignment_id)
        try:
            driver = self.driver(run_id)
        except NotFound as exc:
            raise NotFound(
                f"assignment {_tag(assignment_id)} of run {run_id}: {exc}; check in again", code="FN-0613"
            ) from exc
        except Conflict as exc:
            raise Unavailable(f"assignment {_tag(assignment_id)} of run {run_id}: {exc}", code=exc.code) from exc
        return driver, driver.course.assignments.check(assignment_id, device)

    def control(self, run_id: str) -> RunControl:
        """Return the commands of a Run. Raises like ``driver``."""
        self.driver(run_id)
        return self._controls[run_id]

    @property
    def broken(self) -> Collection[str]:
        """The Runs that could not be continued here, or that another coordinator drives."""
        return self._broken.keys()

    def is_broken(self, run_id: str) -> bool:
        """Return whether a Run could not be continued here, or is driven by another coordinator."""
        return run_id in self._broken

    def live(self, run_id: str) -> LiveRun:
        """Return what only the driver of a Run knows, and its troubles."""
        driver = self._drivers.get(run_id)
        live = LiveRun(trouble=self._broken.get(run_id, "")) if driver is None else driver.live
        trouble = "; ".join(filter(None, (live.trouble, *self.troubles.of(run_id))))
        if not live.round.round:
            return replace(live, trouble=trouble)
        uploads = MappingProxyType(dict(islice(self.uploading(run_id).items(), MAX_LIVE_DEVICES)))
        return LiveRun(trouble=trouble, round=replace(live.round, uploads=uploads))

    async def take_up(self, run_id: str) -> None:
        """Start the driver of a recorded Run, unless it has one. The caller holds ``starting``. Raises Conflict."""
        if run_id not in self._drivers:
            await self._drive(run_id)
            self._notify()

    async def take_back(self, run_id: str) -> None:
        """Continue a broken Run, or one that another coordinator drives. Raises Conflict if that fails again."""
        async with self.starting:
            if run_id in self._broken:
                await self._drive(run_id)
                self._notify()

    async def replace(self, run_id: str, change: Callable[[], Awaitable[None]]) -> None:
        """Stop the driver of a Run, change the record, and start a driver that follows it. The Run may be broken.

        Raises:
            Conflict: The new driver cannot continue the Run. An error of ``change`` is raised after a driver started.
        """
        async with self.starting:
            driver = self._drivers.pop(run_id, None)
            self._controls.pop(run_id, None)
            self._broken[run_id] = f"run {run_id}: its publisher is reclaiming it; try again"
            try:
                if driver is not None:
                    await driver.stop()
                # A driver in another process must not write after the change.
                await self._stores.take(run_id)
                await change()
            finally:
                await self._drive(run_id)
                self._notify()

    async def _drive(self, run_id: str) -> None:
        """Start the driver of a recorded Run. If that is impossible now, note why and raise Conflict."""
        try:
            record = await self._stores.runs.run(run_id)
            assert record is not None, "runs are never removed"
            await check_up_to_date(run_id, self._stores, self._files)
            setup = await setup_of(record.start, record.delegation, self._stores, self._files, self._parts)
            check_key(setup)
            worker = Worker(run_id, self._observer)
            course = Course(record, setup, worker, self._notify, partial(self._leave, run_id))
            publications = Publications(setup, self._stores.runs)
            driver = RunDriver(course, publications, await self._stores.take(run_id), self._files, self.parked)
            try:
                await driver.start()
            except BaseException:
                await driver.stop()
                raise
        except Exception as exc:  # Any error: devices and operators receive a public reason, and the log has the error.
            self._broken[run_id] = f"run {run_id}: cannot be taken up: {reason_of(exc)}"
            has_text = isinstance(exc, FaninError)
            about_run(LOG, run_id).error("cannot be taken up: %s", exc, exc_info=not has_text)
            raise Conflict(self._broken[run_id], code="FN-0615") from exc
        self._drivers[run_id] = driver
        self._controls[run_id] = RunControl(driver, self._stores, self._files)
        self._publications[run_id] = publications
        self._broken.pop(run_id, None)
        self._followers.end(run_id)

    def _leave(self, run_id: str, superseded: Superseded) -> None:
        """Serve a Run no longer that another coordinator drives. The next command of an operator takes it back."""
        about_run(LOG, run_id).warning("left to another coordinator: %s", superseded)
        self._superseded.append(self._drivers.pop(run_id))
        self._controls.pop(run_id)
        self._broken[run_id] = f"run {run_id}: {public(superseded)[0]}"
        self._followers.begin(run_id, self._publications[run_id])

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()


def run_of(assignment_id: str) -> str:
    """Return the Run of an Assignment's or a Publication's id, ``run.round.tag``. Raises NotFound for another form."""
    check_name("assignment", assignment_id)
    run_id, *tail = assignment_id.rsplit(".", 2)
    if len(tail) != 2:
        raise NotFound(f"assignment {assignment_id}: got no run and round in it; check in again", code="FN-0613")
    return run_id


def _tag(assignment_id: str) -> str:
    return short(assignment_id.rsplit(".", 1)[1])


def unknown_run(run_id: str) -> NotFound:
    """Return the error for a Run that the record does not have."""
    return NotFound(f"run {run_id[:64]!r}: not found on this coordinator; fanin runs lists its runs", code="FN-0610")
