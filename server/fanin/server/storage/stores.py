"""The durable state of a coordinator: the database through ``Stores``, bytes through ``Files``.

Both consist of Protocols (``protocols``). The composition (``folder``) chooses the implementations.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

from fanin.server.storage.lanes import Durations, Lane
from fanin.server.storage.protocols.archive import MessageArchive, RoundArchive, RunArchive
from fanin.server.storage.protocols.commands import CommandStore
from fanin.server.storage.protocols.devices import DeviceStore
from fanin.server.storage.protocols.evaluations import EvaluationStore
from fanin.server.storage.protocols.files import Blobs, Spool
from fanin.server.storage.protocols.history import HistoryStore
from fanin.server.storage.protocols.leases import LeaseStore, RunWriter
from fanin.server.storage.protocols.ledger import LedgerStore
from fanin.server.storage.protocols.retention import RetentionStore
from fanin.server.storage.protocols.rounds import MessageStore, RoundRecords
from fanin.server.storage.protocols.runs import RunRecords
from fanin.server.storage.protocols.tokens import AuditStore, TokenStore
from fanin.server.storage.records import EnrolledDevice

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Blobs and spool, and the lane on which they are used."""

    blobs: Blobs
    spool: Spool
    lane: Lane

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that reads or writes files, on the disk lane.

        Returns:
            The result of ``work``. Its exceptions are raised here.
        """
        return await self.lane(partial(work, *args, **kwargs))


@dataclass(frozen=True, kw_only=True)
class Stores:
    """The stores of one database.

    Attributes:
        devices: Devices, and tokens as calls carry them.
        tokens: Tokens, as administrators manage them.
        audit: The audit log.
        runs: Bundles, Runs, Versions and events.
        rounds: Rounds and committed Updates, to read.
        messages: The messages of the phases of Rounds, to read.
        evaluations: Evaluations of Versions on held-out data.
        retention: What retention removes.
        ledger: The privacy ledgers of populations.
        leases: The leases of the Runs, and with them the writes of their drivers.
        control: The transactions of operators' commands.
        wall: The clock that dates all entries, in seconds since the Unix epoch.
        holder: The name of this process in the leases that it takes.
    """

    devices: DeviceStore
    tokens: TokenStore
    audit: AuditStore
    runs: RunRecords
    rounds: RoundRecords
    messages: MessageStore
    evaluations: EvaluationStore
    retention: RetentionStore
    ledger: LedgerStore
    leases: LeaseStore
    control: CommandStore
    wall: Callable[[], float]
    holder: str

    async def enroll(self, device: EnrolledDevice, token_sha256: str = "") -> None:
        """Record a device by an enrollment token. A known device is not changed. See ``DeviceStore.enroll``."""
        await self.devices.enroll([device], self.wall(), token_sha256)

    async def take(self, run_id: str) -> "DriverStores":
        """Take the lease of a Run, and return the stores of its driver. See ``LeaseStore.take``."""
        writer = await self.leases.take(run_id, self.holder, self.wall())
        return DriverStores(
            devices=self.devices,
            tokens=self.tokens,
            audit=self.audit,
            runs=self.runs,
            rounds=self.rounds,
            messages=self.messages,
            evaluations=self.evaluations,
            retention=self.retention,
            ledger=self.ledger,
            leases=self.leases,
            control=self.control,
            wall=self.wall,
            holder=self.holder,
            writer=writer,
        )


@dataclass(frozen=True, kw_only=True)
class DriverStores(Stores):
    """The stores of the driver that holds the lease of a Run.

    Attributes:
        writer: The driver's writes. They are refused once another driver has taken the Run.
    """

    writer: RunWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorState:
    """The durable state of a coordinator. A composition root passes its members to the parts that use them.

    Attributes:
        stores: The database, for the event loop.
        files: Blobs and spool, for the event loop.
        runs: Runs and Versions, for verification.
        rounds: Rounds and Updates, for verification.
        messages: The messages of Rounds, for verification.
        history: The record in pages, for people.
        check: Writes to the database and to the disk, without a change of the record. It raises the error of a write.
        write_times: The durations of the writes to the database.
    """

    stores: Stores
    files: Files
    runs: RunArchive
    rounds: RoundArchive
    messages: MessageArchive
    history: HistoryStore
    check: Callable[[], Awaitable[None]]
    write_times: Durations = field(default_factory=Durations)

    @property
    def devices(self) -> DeviceStore:
        """Devices and tokens."""
        return self.stores.devices

    @property
    def blobs(self) -> Blobs:
        """Chunks of Bundles and Versions."""
        return self.files.blobs

    @property
    def spool(self) -> Spool:
        """Uploads under way, and committed payloads."""
        return self.files.spool
