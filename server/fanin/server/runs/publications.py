"""The Versions of one Run for devices without an Assignment: the newest Version, and its downloads."""

import asyncio
from collections.abc import Callable
from typing import Final

from fanin.edge.ranges import RANGES
from fanin.protos import messages as m
from fanin.protos.errors import FaninError, NotFound
from fanin.server.rounds.assignments import Assignments
from fanin.server.rounds.setup import RunSetup
from fanin.server.rounds.troubles import RepeatedTroubles, pause_s
from fanin.server.runs.recorded_setup import refusal_of
from fanin.server.runs.view import RunView, read_view
from fanin.server.storage.protocols.runs import RunRecords

FOLLOW_S: Final = 1.0
"""Seconds between two reads of a Run that another coordinator drives."""
FOLLOWING: Final = "its record cannot be read"


class Publications:
    """The Publications of one Run.

    The Run's view is held in memory, because a check-in without work must not cost a database access. No driver is
    needed: a coordinator also announces the Versions of a Run that another one drives.
    """

    def __init__(self, setup: RunSetup, runs: RunRecords) -> None:
        self._setup = setup
        self._assignments = Assignments(setup)
        self._runs = runs
        self._view: RunView | None = None

    @property
    def view(self) -> RunView:
        """The Run, as it was last read."""
        assert self._view is not None, "publications are read before they are used"
        return self._view

    @property
    def newest(self) -> m.Version:
        """The Run's newest Version."""
        return self.view.newest

    @property
    def training(self) -> m.Training:
        """The settings of training of the Round that published the newest Version. Failed Rounds do not count."""
        return self._setup.plan.training_in(max(self.newest.number, 1))

    async def read(self) -> RunView:
        """Read the Run from the record, and return it. Called whenever it may have changed."""
        view = await read_view(self._setup.start.run_id, self._runs)
        assert view is not None, "runs are never removed"
        self._view = view
        return view

    def refusal(self, capabilities: m.Capabilities) -> str:
        """Return why a device with these capabilities cannot use the Run's Versions, or an empty string if it can."""
        if self._setup.manifest.query is not None:
            return "statistics: they are no model"
        return refusal_of(self._setup, capabilities)

    def is_newer(self, served: m.ServedVersion) -> bool:
        """Return whether the newest Version is newer than the one that a device serves."""
        return served.run_id != self.newest.run_id or served.order < self.newest.order

    def publish(self, device: str) -> m.Publication:
        """Return a Publication that lets a device download the newest Version."""
        return self._assignments.publish(device, self.newest)

    async def chunks(self, download_id: str, device: str) -> frozenset[str] | None:
        """Return the digests of the Chunks that a Publication lets a device download.

        A slow device may finish the download of a Version that is no longer the newest.

        Returns:
            The digests, or None if the id is that of an Assignment.

        Raises:
            NotFound: This Run has not issued the Publication to this device.
        """
        number = self._assignments.check_publication(download_id, device)
        if number is None:
            return None
        version, run_id = self.newest, self.newest.run_id
        if number != version.number:
            earlier = await self._runs.version(run_id, number)
            if earlier is None:
                raise NotFound(
                    f"publication {download_id}: run {run_id} has no such version; check in again", code="FN-0613"
                )
            version = earlier
        ranges = version.auxiliary.get(RANGES)
        artifacts = (version.parameters, *([ranges] if ranges is not None else []))
        return self._setup.chunks | {ref.sha256 for artifact in artifacts for ref in artifact.chunks}


class Followers:
    """Reads Runs that another coordinator drives again and again, so that devices hear of their Versions here too.

    Args:
        notify: Called after each change of a Run.
        troubles: Receives the reads that fail. The next read then comes later.
    """

    def __init__(self, notify: Callable[[], None], troubles: RepeatedTroubles) -> None:
        self._notify = notify
        self._troubles = troubles
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, run_id: str, publications: Publications) -> None:
        """Follow a Run."""
        self._tasks[run_id] = asyncio.create_task(self._follow(run_id, publications), name=f"follow run {run_id}")

    def end(self, run_id: str) -> None:
        """Follow a Run no longer, because it is driven here."""
        if run_id in self._tasks:
            self._tasks.pop(run_id).cancel()
            self._troubles.clear(run_id, FOLLOWING)

    async def stop(self) -> None:
        """Follow no Run any longer."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _follow(self, run_id: str, publications: Publications) -> None:
        num_failures = 0
        while True:
            # A read is a look and no work to give up: only a later one shows that the record can be read again.
            await asyncio.sleep(max(FOLLOW_S, pause_s(num_failures)) if num_failures else FOLLOW_S)
            before = publications.view
            try:
                is_new = await publications.read() != before
            except FaninError as exc:
                num_failures += 1
                self._troubles.report(run_id, FOLLOWING, exc)
                continue
            num_failures = 0
            self._troubles.clear(run_id, FOLLOWING)
            if is_new:
                self._notify()
