"""The Versions of one Run for devices without an Assignment: the newest Version, and its downloads."""

from fanin.protos import messages as m
from fanin.protos.errors import NotFound
from fanin.server.rounds.assignments import Assignments
from fanin.server.rounds.setup import RunSetup
from fanin.server.runs.setups import refusal_of
from fanin.server.runs.view import RunView, read_view
from fanin.server.storage.protocols.runs import RunRecords


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

    async def read(self) -> RunView:
        """Read the Run from the record, and return it. Called whenever it may have changed."""
        view = await read_view(self._setup.start.run_id, self._runs)
        assert view is not None, "runs are never removed"
        self._view = view
        return view

    def refusal(self, capabilities: m.Capabilities) -> str:
        """Return why a device with these capabilities cannot use the Run's Versions, or an empty string if it can."""
        return refusal_of(self._setup, capabilities)

    def is_newer(self, served: m.ServedVersion) -> bool:
        """Return whether the newest Version is newer than the one that a device serves."""
        return served.run_id != self.newest.run_id or served.number < self.newest.number

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
                raise NotFound(f"publication {download_id}: run {run_id} has no such version; check in again")
            version = earlier
        return self._setup.chunks | {ref.sha256 for ref in version.parameters.chunks}
