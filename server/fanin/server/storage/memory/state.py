"""The state of a coordinator in memory."""

from collections.abc import Callable

from fanin.server.storage.lanes import inline
from fanin.server.storage.memory.commands import MemoryCommands
from fanin.server.storage.memory.database import MemoryDatabase
from fanin.server.storage.memory.devices import MemoryDevices
from fanin.server.storage.memory.files import MemoryBlobs, MemorySpool
from fanin.server.storage.memory.history import MemoryHistory
from fanin.server.storage.memory.ledger import MemoryLedger
from fanin.server.storage.memory.retention import MemoryRetention
from fanin.server.storage.memory.rounds import MemoryMessages, MemoryRoundArchive, MemoryRounds
from fanin.server.storage.memory.runs import MemoryEvaluations, MemoryRunArchive, MemoryRuns
from fanin.server.storage.memory.writer import MemoryLeases
from fanin.server.storage.stores import CoordinatorState, Files, Stores


class MemoryState:
    """The rows and bytes of a coordinator. They outlive the coordinator, as a folder would, but not the process."""

    def __init__(self) -> None:
        self._database = MemoryDatabase()
        self._devices = MemoryDevices(self._database)
        self._blobs = MemoryBlobs()
        self._spool = MemorySpool()

    def open(self, wall: Callable[[], float], holder: str = "memory") -> CoordinatorState:
        """Return the state, for one life of a coordinator.

        Args:
            wall: The clock that dates the record, in seconds since the Unix epoch.
            holder: The name of this coordinator in the leases that it takes.
        """
        database = self._database
        stores = Stores(
            devices=self._devices,
            tokens=self._devices.tokens,
            audit=self._devices.audit,
            runs=MemoryRuns(database),
            rounds=MemoryRounds(database),
            messages=MemoryMessages(database),
            evaluations=MemoryEvaluations(database),
            retention=MemoryRetention(database),
            ledger=MemoryLedger(database),
            leases=MemoryLeases(database),
            control=MemoryCommands(database),
            wall=wall,
            holder=holder,
        )
        return CoordinatorState(
            stores=stores,
            files=Files(blobs=self._blobs, spool=self._spool, lane=inline),
            runs=MemoryRunArchive(database),
            rounds=MemoryRoundArchive(database),
            messages=MemoryRoundArchive(database),
            history=MemoryHistory(database),
            check=_written,
        )


async def _written() -> None:
    """Memory can always be written."""
