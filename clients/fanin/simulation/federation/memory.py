"""The folder of a simulated device, in memory."""

import hashlib
from collections.abc import Callable, Collection, Iterable

from fanin.clients.device.policy.guard import PrivacyGuard
from fanin.clients.device.session.protocols import KeptExchange
from fanin.clients.device.storage.states import MAX_RUNS, StateLabel, decode_states, encode_states
from fanin.edge.codecs.pipeline import States
from fanin.protos.chunks import ChunkRef
from fanin.protos.errors import NotFound
from fanin.protos.messages import UNSEEN, Order, UpdateHeader


class MemoryChunks(dict[str, bytes]):
    """Downloaded Chunks by their SHA-256: those that ``trim`` keeps, so their number does not grow with the Rounds."""

    def has(self, ref: ChunkRef) -> bool:
        """Return whether a Chunk is stored."""
        return ref.sha256 in self

    def read(self, sha256: str) -> bytes:
        """Return a Chunk's bytes; the caller verifies them."""
        return self[sha256]

    def fetch(self, ref: ChunkRef, download: Callable[[int], Iterable[bytes]]) -> int:
        """Store a Chunk from its stream. Returns the number of bytes. Readers verify its bytes."""
        self[ref.sha256] = b"".join(download(0))
        return len(self[ref.sha256])

    def remove_damaged(self, refs: Iterable[ChunkRef]) -> None:
        """Remove those of these Chunks whose bytes do not have the digest in their name."""
        for ref in refs:
            if ref.sha256 in self and hashlib.sha256(self[ref.sha256]).hexdigest() != ref.sha256:
                del self[ref.sha256]

    def trim(self, keep: Iterable[str]) -> None:
        """Remove all other Chunks."""
        for name in self.keys() - set(keep):
            del self[name]


class MemoryUpdates:
    """At most one Update."""

    def __init__(self) -> None:
        self._update: tuple[UpdateHeader, bytes] | None = None

    def put(self, header: UpdateHeader, payload: bytes) -> None:
        """Store an Update instead of the last one."""
        self._update = (header, payload)

    def header(self, assignment_id: str) -> UpdateHeader | None:
        """Return the header of an Assignment's Update; None if there is none."""
        if self._update is None or self._update[0].assignment_id != assignment_id:
            return None
        return self._update[0]

    def read(self, assignment_id: str, offset: int, size_bytes: int) -> bytes:
        """Return a slice of an Update's payload."""
        assert self._update is not None and self._update[0].assignment_id == assignment_id, "stored before it is sent"
        return self._update[1][offset : offset + size_bytes]

    def clear(self) -> None:
        """Remove the Update."""
        self._update = None


class MemoryStates:
    """The states of stages by Run and Round, as the bytes of their files. The last used ones are at the end."""

    def __init__(self) -> None:
        self.files: dict[tuple[str, int], bytes] = {}

    def put(self, label: StateLabel, states: States) -> None:
        """Store the states of all stages."""
        self.files.pop((label.run_id, label.round), None)
        self.files[label.run_id, label.round] = encode_states(label, states)

    def get(self, label: StateLabel, first: States) -> States:
        """Return stored states. See ``StateStore.get``."""
        data = self.files.pop((label.run_id, label.round), None)
        if data is None:
            raise NotFound(f"{label}: got none in memory, expected the one of that update", code="FN-0836")
        self.files[label.run_id, label.round] = data
        return decode_states(data, label, first)

    def rounds(self, run_id: str) -> tuple[int, ...]:
        """Return the Rounds of a Run with a state, in rising order."""
        return tuple(sorted(number for run, number in self.files if run == run_id))

    def keep(self, run_id: str, rounds: Collection[int]) -> None:
        """Remove the other states of a Run, and those of Runs that were used longest ago."""
        runs = tuple(dict.fromkeys([run_id, *(name for name, _ in reversed(self.files))]))[:MAX_RUNS]
        for name, number in tuple(self.files):
            if name not in runs or (name == run_id and number not in rounds):
                del self.files[name, number]


class MemoryRecords(dict[str, Order]):
    """The highest verified (epoch, number) of each Run."""

    def highest_version(self, run_id: str) -> Order:
        """Return the highest pair; ``UNSEEN`` for none."""
        return self.get(run_id, UNSEEN)

    def raise_version(self, run_id: str, order: Order) -> None:
        """Record a pair, unless a higher one is recorded."""
        self[run_id] = max(order, self.highest_version(run_id))


class MemoryExchanges:
    """A ``StoredExchanges``."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], KeptExchange] = {}

    def put(self, assignment_id: str, phase: str, kept: KeptExchange) -> None:
        """Store an exchange."""
        self._kept[assignment_id, phase] = kept

    def get(self, assignment_id: str, phase: str) -> KeptExchange | None:
        """Return an exchange, None without one."""
        return self._kept.get((assignment_id, phase))

    def keep(self, assignment_id: str) -> None:
        """Remove the exchanges of all other Assignments; of all with an empty id."""
        self._kept = {key: each for key, each in self._kept.items() if assignment_id and key[0] == assignment_id}


class MemoryJournals:
    """A ``StoredJournals``."""

    def __init__(self) -> None:
        self._journals: dict[str, bytes] = {}

    def get(self, run_id: str) -> bytes:
        """Return the journal of a Run; empty without one."""
        return self._journals.get(run_id, b"")

    def put(self, run_id: str, data: bytes) -> None:
        """Store the journal of a Run."""
        self._journals[run_id] = data


class MemoryFolder:
    """A ``DeviceFolder``: it survives ``VirtualDevice.restart``. It has no secret, so a simulation can be repeated."""

    secret: bytes | None = None
    trainings: None = None

    def __init__(self) -> None:
        self.chunks = MemoryChunks()
        self.updates = MemoryUpdates()
        self.states = MemoryStates()
        self.exchanges = MemoryExchanges()
        self.journals = MemoryJournals()
        self.locals = MemoryStates()
        self.tuned = MemoryStates()
        self.records = MemoryRecords()
        self.guard = PrivacyGuard()
