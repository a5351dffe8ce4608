"""The SQLite stores and the in-memory stores keep the same contracts, and the checks find each breach."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from fanin.protos.errors import Corrupted
from fanin.server.folder import open_state
from fanin.server.storage.blobs import FolderBlobs
from fanin.server.storage.contracts.databases import check_stores
from fanin.server.storage.contracts.devices import check_devices
from fanin.server.storage.contracts.files import check_blobs, check_spool
from fanin.server.storage.contracts.history import check_history
from fanin.server.storage.disk import Durability
from fanin.server.storage.lanes import inline
from fanin.server.storage.memory.commands import MemoryCommands
from fanin.server.storage.memory.devices import MemoryDevices
from fanin.server.storage.memory.files import MemoryBlobs, MemorySpool
from fanin.server.storage.memory.rounds import MemoryRounds
from fanin.server.storage.memory.runs import MemoryEvaluations, MemoryRuns
from fanin.server.storage.memory.state import MemoryState
from fanin.server.storage.memory.writer import MemoryWriter
from fanin.server.storage.protocols.leases import RunWriter
from fanin.server.storage.records import EnrolledDevice
from fanin.server.storage.spool import FolderSpool
from fanin.server.storage.stores import CoordinatorState, Stores
from fanin.simulation import run_virtual


def sqlite(folder: Path) -> Callable[[], Stores]:
    return lambda: open_state(folder / "state", Durability.PROCESS, (inline, inline), lambda: 1.0).stores


def in_memory(_folder: Path) -> Callable[[], Stores]:
    memory = MemoryState()
    return lambda: memory.open(lambda: 1.0).stores


@pytest.mark.parametrize("implementation", [sqlite, in_memory])
def test_a_database_keeps_the_contract(tmp_path: Path, implementation: Callable[[Path], Callable[[], Stores]]) -> None:
    async def main() -> None:
        await check_stores(implementation(tmp_path))

    run_virtual(main())


@pytest.mark.parametrize("in_folder", [True, False])
def test_the_pages_of_the_record_keep_the_contract(tmp_path: Path, in_folder: bool) -> None:
    def opened() -> CoordinatorState:
        if in_folder:
            return open_state(tmp_path / "state", Durability.PROCESS, (inline, inline), lambda: 1.0)
        return memory.open(lambda: 1.0)

    async def main() -> None:
        await check_stores(lambda: opened().stores)
        state = opened()
        await check_history(state.history, state.stores)

    memory = MemoryState()
    run_virtual(main())


@pytest.mark.parametrize("in_folder", [True, False])
def test_blobs_and_a_spool_keep_the_contract(tmp_path: Path, in_folder: bool) -> None:
    check_blobs(FolderBlobs(tmp_path / "blobs", Durability.PROCESS) if in_folder else MemoryBlobs())
    spool = FolderSpool(tmp_path / "spool", tmp_path / "updates", Durability.PROCESS) if in_folder else MemorySpool()
    check_spool(spool)


class Unfenced(MemoryWriter):
    """A writer that lets the older driver write."""

    def _fenced(self) -> object:
        return self._rows


class Overfull(MemoryWriter):
    """A writer whose buffer is never full."""

    async def commit(self, update: object, *, buffer: int) -> object:
        return await super().commit(update, buffer=99)


class Undoing(MemoryWriter):
    """A writer that closes a closed Round again."""

    async def close(self, round_number: int, **keywords: object) -> object:
        record = self._rows.rounds[round_number]
        self._rows.rounds[round_number] = replace(record, mark=type(record.mark).OPEN)
        return await super().close(round_number, **keywords)


@pytest.mark.parametrize(
    ("writer", "problem"),
    [
        (Unfenced, "open: of a driver that was superseded: got .*, expected Superseded"),
        (Overfull, "commit: accepted more updates than places"),
        (Undoing, "close: got RoundMark.FAILED, expected CLOSED, for ever"),
    ],
)
def test_a_writer_that_breaks_the_contract_is_detected(writer: type[MemoryWriter], problem: str) -> None:
    class Leases:
        def __init__(self, stores: Stores) -> None:
            self.lease = stores.leases.lease
            self._stores = stores

        async def take(self, run_id: str, holder: str, now_s: float) -> RunWriter:
            lease_writer = await self._stores.leases.take(run_id, holder, now_s)
            return writer(lease_writer._rows, lease_writer.lease, lease_writer._database)

    memory = MemoryState()

    def open_stores() -> Stores:
        stores = memory.open(lambda: 1.0).stores
        return replace(stores, leases=Leases(stores))

    with pytest.raises(AssertionError, match=problem):
        run_virtual(check_stores(open_stores))


class ForgetfulRuns(MemoryRuns):
    """A store that creates a new Run key at each start."""

    async def run_key(self, run_id: str, epoch: int, new_key: bytes, now_s: float) -> bytes:
        return new_key


class UnorderedRounds(MemoryRounds):
    """A store that returns the Updates sorted by device."""

    async def updates(self, run_id: str, round_number: int) -> tuple[object, ...]:
        return tuple(sorted(await super().updates(run_id, round_number), key=lambda update: update.device_id))


class LastingRounds(MemoryRounds):
    """A store that returns Rounds of earlier lineages."""

    async def last_folded(self, run_id: str, device_id: str, *, lineage: int) -> int:
        return await super().last_folded(run_id, device_id, lineage=0)


class RepeatingCommands(MemoryCommands):
    """A store that executes a command again."""

    def _is_done(self, command: object) -> bool:
        return False


class LatestEvaluations(MemoryEvaluations):
    """A store that returns the newest evaluation as the best one."""

    async def best_evaluation(self, run_id: str) -> object:
        return await super().newest_evaluation(run_id)


class OpenDevices(MemoryDevices):
    """A store that enrolls devices with any token."""

    async def enroll(self, devices: Iterable[EnrolledDevice], now_s: float, token_sha256: str = "") -> None:
        await super().enroll(devices, now_s)


@pytest.mark.parametrize(
    ("name", "broken", "problem"),
    [
        ("runs", ForgetfulRuns, "run_key: changed the key of a run"),
        ("rounds", UnorderedRounds, "updates: got "),
        ("rounds", LastingRounds, r"last_folded: got \[1, 0, 1\] for a device"),
        ("evaluations", LatestEvaluations, "best_evaluation: returned one with a problem"),
        ("control", RepeatingCommands, "is_done: forgot a command"),
    ],
)
def test_a_store_that_breaks_the_contract_is_detected(
    name: str, broken: Callable[[object], object], problem: str
) -> None:
    memory = MemoryState()

    def open_stores() -> Stores:
        return replace(memory.open(lambda: 1.0).stores, **{name: broken(memory._database)})

    with pytest.raises(AssertionError, match=problem):
        run_virtual(check_stores(open_stores))


def test_a_device_store_that_breaks_the_contract_is_detected() -> None:
    with pytest.raises(AssertionError, match="enroll: accepts a token that is unknown"):
        run_virtual(check_devices(OpenDevices()))


def test_blobs_that_break_the_contract_are_detected() -> None:
    class Trusting(MemoryBlobs):
        def put(self, digest: str, data: bytes) -> None:
            self._chunks[digest] = data

    with pytest.raises(AssertionError, match="put: with a wrong digest: raised nothing, expected InvalidInput"):
        check_blobs(Trusting())


def test_a_spool_that_breaks_the_contract_is_detected() -> None:
    class Careless(MemorySpool):
        def clear_round(self, run_id: str, round_number: int, keep: object) -> None:
            super().clear_round(run_id, round_number, {})

    with pytest.raises(Corrupted, match="FN-0515"):
        check_spool(Careless())
