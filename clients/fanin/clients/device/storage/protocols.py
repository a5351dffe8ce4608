"""The folder of a device as its session uses it: on disk (``cache``), or in memory in a simulation."""

from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from fanin.clients.device.models import SavedTraining
from fanin.clients.device.policy.guard import PrivacyGuard
from fanin.clients.device.session.protocols import KeptExchange
from fanin.clients.device.storage.states import StateLabel
from fanin.edge.codecs.pipeline import States
from fanin.protos.chunks import ChunkRef
from fanin.protos.messages import Assignment, Order, UpdateHeader


class StoredChunks(Protocol):
    """Downloaded Chunks, by their SHA-256. ``chunks.ChunkStore`` documents the methods."""

    def has(self, ref: ChunkRef) -> bool: ...

    def read(self, sha256: str) -> bytes: ...

    def fetch(self, ref: ChunkRef, download: Callable[[int], Iterable[bytes]]) -> int: ...

    def remove_damaged(self, refs: Iterable[ChunkRef]) -> None: ...

    def trim(self, keep: Iterable[str]) -> None: ...


class StoredUpdates(Protocol):
    """Updates by the id of their Assignment. ``updates.UpdateStore`` documents the methods."""

    def put(self, header: UpdateHeader, payload: bytes) -> None: ...

    def header(self, assignment_id: str) -> UpdateHeader | None: ...

    def read(self, assignment_id: str, offset: int, size_bytes: int) -> bytes: ...

    def clear(self) -> None: ...


class StoredStates(Protocol):
    """The states of stages, or the personal parameters, by Run and Round. ``states.StateStore`` has the methods."""

    def put(self, label: StateLabel, states: States) -> None: ...

    def get(self, label: StateLabel, first: States) -> States: ...

    def rounds(self, run_id: str) -> tuple[int, ...]: ...

    def keep(self, run_id: str, rounds: Collection[int]) -> None: ...


class StoredExchanges(Protocol):
    """The exchanges of an Assignment by phase. ``exchanges.ExchangeStore`` documents the methods."""

    def put(self, assignment_id: str, phase: str, kept: KeptExchange) -> None: ...

    def get(self, assignment_id: str, phase: str) -> KeptExchange | None: ...

    def keep(self, assignment_id: str) -> None: ...


class StoredJournals(Protocol):
    """The journals of round protocols by Run. ``journals.JournalStore`` documents the methods."""

    def get(self, run_id: str) -> bytes: ...

    def put(self, run_id: str, data: bytes) -> None: ...


class StoredTrainings(Protocol):
    """The unfinished training. ``trainings.TrainingStore`` documents the methods."""

    def open(self, assignment: Assignment) -> SavedTraining: ...

    def clear(self) -> None: ...


class HighestVersions(Protocol):
    """The highest verified (epoch, number) of each Run. ``records.Records`` documents the methods."""

    def highest_version(self, run_id: str) -> Order: ...

    def raise_version(self, run_id: str, order: Order) -> None: ...


class DeviceFolder(Protocol):
    """Everything that a session keeps: it survives the end of a process."""

    @property
    def chunks(self) -> StoredChunks: ...

    @property
    def updates(self) -> StoredUpdates: ...

    @property
    def states(self) -> StoredStates: ...

    @property
    def exchanges(self) -> StoredExchanges: ...

    @property
    def journals(self) -> StoredJournals: ...

    @property
    def locals(self) -> StoredStates: ...

    @property
    def tuned(self) -> StoredStates: ...

    @property
    def trainings(self) -> StoredTrainings | None:
        """None in a simulation, whose trainings are not killed in the middle."""
        ...

    @property
    def records(self) -> HighestVersions: ...

    @property
    def guard(self) -> PrivacyGuard:
        """Refuses Assignments below the privacy floor, and counts what leaves."""
        ...

    @property
    def secret(self) -> bytes | None:
        """The secret of the device, 32 bytes. None in a simulation, whose draws all follow from the Plan."""
        ...
