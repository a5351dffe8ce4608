"""The Versions of one Run for devices without an Assignment: the newest Version, and its downloads."""

from fanin.protos import messages as m
from fanin.protos.errors import NotFound
from fanin.server.rounds.assignments import Assignments
from fanin.server.rounds.setup import RunSetup
from fanin.server.storage.protocols.runs import VersionStore


class Publications:
    """The Publications of one Run.

    ``newest`` is held in memory, because a check-in without work must not cost a database access.
    """

    def __init__(self, assignments: Assignments, setup: RunSetup, versions: VersionStore) -> None:
        self._assignments = assignments
        self._setup = setup
        self._versions = versions
        self._newest: m.Version | None = None

    @property
    def newest(self) -> m.Version:
        """The Run's newest Version."""
        assert self._newest is not None, "a run that is driven has read its newest version"
        return self._newest

    async def read(self, run_id: str) -> None:
        """Read the newest Version from the record. Called whenever it may have changed."""
        self._newest = await self._versions.version(run_id)

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
            earlier = await self._versions.version(run_id, number)
            if earlier is None:
                raise NotFound(f"publication {download_id}: run {run_id} has no such version; check in again")
            version = earlier
        return self._setup.chunks | {ref.sha256 for ref in version.parameters.chunks}
