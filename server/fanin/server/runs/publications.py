"""The Versions of one Run for devices that have no Assignment: the newest one, and what they may download of it."""

from fanin.protos import messages as m
from fanin.protos.errors import NotFound
from fanin.server.rounds.assignments import Assignments
from fanin.server.rounds.effects import Model, Tools


class Publications:
    """Those of one Run. ``newest`` is in memory: a check-in without work must not cost an access to the database."""

    def __init__(self, assignments: Assignments, model: Model, tools: Tools) -> None:
        self._assignments = assignments
        self._model = model
        self._tools = tools
        self._newest: m.Version | None = None

    @property
    def newest(self) -> m.Version:
        """The Run's newest Version."""
        assert self._newest is not None, "a run that is driven has read its newest version"
        return self._newest

    async def read(self, run_id: str) -> None:
        """Read the newest Version again; called whenever it may have changed."""
        self._newest = await self._tools.store_lane(lambda: self._tools.runs.version(run_id))

    def is_newer(self, served: m.ServedVersion) -> bool:
        """Whether the newest Version is news for a device that serves this one."""
        return served.run_id != self.newest.run_id or served.number < self.newest.number

    def publish(self, device: str) -> m.Publication:
        """The newest Version, for a device that may download it."""
        return self._assignments.publish(device, self.newest)

    async def chunks(self, download_id: str, device: str) -> frozenset[str] | None:
        """The digests of all Chunks that a Publication lets a device download; None for an Assignment's id.

        A slow device may still download a Version that is no longer the newest. Raises NotFound.
        """
        number = self._assignments.check_publication(download_id, device)
        if number is None:
            return None
        version, run_id = self.newest, self.newest.run_id
        if number != version.number:
            found = await self._tools.store_lane(lambda: self._tools.runs.version(run_id, number))
            if found is None:
                raise NotFound(f"publication {download_id}: run {run_id} has no such version; check in again")
            version = found
        return self._model.chunks | {ref.sha256 for ref in version.parameters.chunks}
