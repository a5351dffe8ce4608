"""The bytes of each message of an attempt. docs/explanation/secure-aggregation.md has the tables.

A message begins with its number, 1 byte, and the digest of the terms. Numbers are little-endian. Lists have rising
indexes, so one content has one form. A message with anything else is refused, and fails its sender alone.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from fanin.edge.masking.agreement import DIGEST_BYTES, KEY_BYTES, TAG_BYTES
from fanin.edge.masking.sharing import SHARE_BYTES
from fanin.protos.errors import InvalidInput

SIGNATURE_BYTES: Final = 64
SEALED_BYTES: Final = 2 * SHARE_BYTES + TAG_BYTES
_U32: Final = struct.Struct("<I")
MAX_INDEX: Final = 1 << 20


class Kind(IntEnum):
    """The number of a message."""

    ADVERTISEMENT = 1
    ROSTER = 2
    SEALED_SHARES = 3
    DELIVERY = 4
    SURVIVORS = 5
    CONFIRMATION = 6
    PROOF = 7
    SHARES = 8


class ShareOf(IntEnum):
    """Which secret of its owner a share is of: b for the self mask, or s for the masks of pairs."""

    SELF_MASK = 1
    PAIR_MASKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterEntry:
    """The keys that a device advertises.

    Attributes:
        device: A, its Ed25519 key.
        sealing: C, the X25519 key with which others seal shares for it.
        masking: S, the X25519 key of its pair masks.
        commitment: The commitment of its seed b.
        signature: By A over the digest of the terms and the three before.
        certificate: By the authority over A; empty unless the threat is active.
    """

    device: bytes
    sealing: bytes
    masking: bytes
    commitment: bytes
    signature: bytes
    certificate: bytes = b""

    def encoded(self) -> bytes:
        """Return the bytes of the entry."""
        keys = (self.device, self.sealing, self.masking, self.commitment)
        return b"".join((*keys, self.signature, self.certificate))


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterMessage:
    """What a device learns of the roster: parameters, the digest, and the entries of its neighbors."""

    num_devices: int
    index: int
    degree: int
    threshold: int
    digest: bytes
    peers: Mapping[int, RosterEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedMessage:
    """Sealed shares by receiver; in a delivery by sender, with the sharers as a bitmap."""

    digest: bytes
    sealed: Mapping[int, bytes]
    members: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivorsMessage:
    """The survivors as a bitmap, with the digest of the sharers."""

    digest: bytes
    members: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofMessage:
    """Confirmations of the survivors by index."""

    digest: bytes
    signatures: Mapping[int, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesMessage:
    """One share for each owner, with the digest of the survivors."""

    digest: bytes
    shares: Mapping[int, tuple[ShareOf, bytes]]


class ByteReader:
    """Reads a message from front to back. Raises InvalidInput for anything that is not there."""

    def __init__(self, kind: Kind, terms_digest: bytes, data: bytes) -> None:
        self._kind, self._data, self._offset = kind, data, 0
        number = self.take(1)[0]
        if number != kind:
            raise self.fault(f"the number {number}, expected {kind.value}")
        if self.take(DIGEST_BYTES) != terms_digest:
            raise InvalidInput(
                f"{self._name}: got other terms than those of this attempt; it is of another attempt, Round or Run",
                code="FN-1629",
            )

    def fault(self, received: str) -> InvalidInput:
        """Return the error of a malformed message."""
        return InvalidInput(f"{self._name}: got {received}", code="FN-1625")

    def take(self, size: int) -> bytes:
        """Return the next bytes."""
        part = self._data[self._offset : self._offset + size]
        if len(part) != size:
            raise self.fault(f"{len(self._data)} bytes, expected more")
        self._offset += size
        return part

    def number(self) -> int:
        """Return the next 4 bytes as a number."""
        value: int = _U32.unpack(self.take(_U32.size))[0]
        return value

    def rows(self, size: int) -> dict[int, bytes]:
        """Return a list: its length, then rising indexes with ``size`` bytes each."""
        count, rows, last = self.number(), {}, -1
        if count * (size + _U32.size) > len(self._data):
            raise self.fault(f"{count} rows in {len(self._data)} bytes")
        for _ in range(count):
            index = self.number()
            if not last < index < MAX_INDEX:
                raise self.fault(f"the index {index} after {last}, expected rising ones")
            rows[index] = self.take(size)
            last = index
        return rows

    def end(self) -> None:
        """Raise InvalidInput if bytes are left."""
        if self._offset != len(self._data):
            raise self.fault(f"{len(self._data)} bytes, expected {self._offset}")

    @property
    def _name(self) -> str:
        return f"secure aggregation, {self._kind.name.lower().replace('_', ' ')}"


def kind_of(data: bytes) -> Kind:
    """Return the kind of a message. Raises InvalidInput for another number."""
    try:
        return Kind(data[0])
    except (IndexError, ValueError) as exc:
        raise InvalidInput(f"secure aggregation: got a message that begins with {data[:1]!r}", code="FN-1625") from exc


def framed(kind: Kind, terms_digest: bytes, *parts: bytes) -> bytes:
    """Return a message of its parts."""
    return b"".join((bytes((kind,)), terms_digest, *parts))


def u32(number: int) -> bytes:
    """Return a number as 4 bytes."""
    return _U32.pack(number)


def listed(rows: Mapping[int, bytes]) -> bytes:
    """Return a list with rising indexes."""
    return b"".join((u32(len(rows)), *(u32(index) + rows[index] for index in sorted(rows))))


def entry_bytes(is_active: bool) -> int:
    """Return the bytes of an entry."""
    return 4 * KEY_BYTES + SIGNATURE_BYTES * (2 if is_active else 1)


def decoded_entry(data: bytes) -> RosterEntry:
    """Return the entry of bytes of the right length."""
    keys = [data[start : start + KEY_BYTES] for start in range(0, 4 * KEY_BYTES, KEY_BYTES)]
    signature, certificate = data[4 * KEY_BYTES :][:SIGNATURE_BYTES], data[4 * KEY_BYTES + SIGNATURE_BYTES :]
    return RosterEntry(
        device=keys[0],
        sealing=keys[1],
        masking=keys[2],
        commitment=keys[3],
        signature=signature,
        certificate=certificate,
    )


def read_advertisement(terms_digest: bytes, data: bytes, is_active: bool) -> RosterEntry:
    """Return the entry of message 1."""
    reader = ByteReader(Kind.ADVERTISEMENT, terms_digest, data)
    entry = decoded_entry(reader.take(entry_bytes(is_active)))
    reader.end()
    return entry


def roster_bytes(terms_digest: bytes, message: RosterMessage) -> bytes:
    """Return message 2."""
    numbers = (message.num_devices, message.index, message.degree, message.threshold)
    entries = {index: entry.encoded() for index, entry in message.peers.items()}
    return framed(Kind.ROSTER, terms_digest, *map(u32, numbers), message.digest, listed(entries))


def read_roster(terms_digest: bytes, data: bytes, is_active: bool) -> RosterMessage:
    """Return message 2."""
    reader = ByteReader(Kind.ROSTER, terms_digest, data)
    num_devices, index, degree, threshold = (reader.number() for _ in range(4))
    roster_digest = reader.take(DIGEST_BYTES)
    rows = reader.rows(entry_bytes(is_active))
    reader.end()
    return RosterMessage(
        num_devices=num_devices,
        index=index,
        degree=degree,
        threshold=threshold,
        digest=roster_digest,
        peers={peer: decoded_entry(row) for peer, row in rows.items()},
    )


def sealed_bytes(terms_digest: bytes, roster_digest: bytes, sealed: Mapping[int, bytes]) -> bytes:
    """Return message 3."""
    return framed(Kind.SEALED_SHARES, terms_digest, roster_digest, listed(sealed))


def delivery_bytes(terms_digest: bytes, message: SealedMessage) -> bytes:
    """Return message 4."""
    return framed(Kind.DELIVERY, terms_digest, message.digest, message.members, listed(message.sealed))


def read_sealed(terms_digest: bytes, data: bytes, kind: Kind, num_devices: int = 0) -> SealedMessage:
    """Return message 3, or message 4 of a roster of ``num_devices``."""
    reader = ByteReader(kind, terms_digest, data)
    roster_digest = reader.take(DIGEST_BYTES)
    members = reader.take(bitmap_bytes(num_devices)) if kind is Kind.DELIVERY else b""
    rows = reader.rows(SEALED_BYTES)
    reader.end()
    return SealedMessage(digest=roster_digest, sealed=rows, members=members)


def survivors_bytes(terms_digest: bytes, message: SurvivorsMessage) -> bytes:
    """Return message 5."""
    return framed(Kind.SURVIVORS, terms_digest, message.digest, message.members)


def read_survivors(terms_digest: bytes, data: bytes, num_devices: int) -> SurvivorsMessage:
    """Return message 5."""
    reader = ByteReader(Kind.SURVIVORS, terms_digest, data)
    message = SurvivorsMessage(digest=reader.take(DIGEST_BYTES), members=reader.take(bitmap_bytes(num_devices)))
    reader.end()
    return message


def confirmation_bytes(terms_digest: bytes, survivors_digest: bytes, signature: bytes) -> bytes:
    """Return message 6."""
    return framed(Kind.CONFIRMATION, terms_digest, survivors_digest, signature)


def read_confirmation(terms_digest: bytes, data: bytes) -> tuple[bytes, bytes]:
    """Return the digest of the survivors and the signature of message 6."""
    reader = ByteReader(Kind.CONFIRMATION, terms_digest, data)
    parts = reader.take(DIGEST_BYTES), reader.take(SIGNATURE_BYTES)
    reader.end()
    return parts


def proof_bytes(terms_digest: bytes, message: ProofMessage) -> bytes:
    """Return message 7."""
    return framed(Kind.PROOF, terms_digest, message.digest, listed(message.signatures))


def read_proof(terms_digest: bytes, data: bytes) -> ProofMessage:
    """Return message 7."""
    reader = ByteReader(Kind.PROOF, terms_digest, data)
    message = ProofMessage(digest=reader.take(DIGEST_BYTES), signatures=reader.rows(SIGNATURE_BYTES))
    reader.end()
    return message


def shares_bytes(terms_digest: bytes, message: SharesMessage) -> bytes:
    """Return message 8."""
    rows = {owner: bytes((kind,)) + share for owner, (kind, share) in message.shares.items()}
    return framed(Kind.SHARES, terms_digest, message.digest, listed(rows))


def read_shares(terms_digest: bytes, data: bytes) -> SharesMessage:
    """Return message 8."""
    reader = ByteReader(Kind.SHARES, terms_digest, data)
    survivors_digest, rows = reader.take(DIGEST_BYTES), reader.rows(1 + SHARE_BYTES)
    reader.end()
    if not {row[0] for row in rows.values()} <= set(ShareOf):
        raise reader.fault("a share of an unknown kind, expected 1 or 2")
    shares = {owner: (ShareOf(row[0]), row[1:]) for owner, row in rows.items()}
    return SharesMessage(digest=survivors_digest, shares=shares)


def bitmap_bytes(num_devices: int) -> int:
    """Return the bytes of a bitmap."""
    return -(-num_devices // 8)


def bitmap(num_devices: int, members: Iterable[int]) -> bytes:
    """Return a set of indexes as a bitmap, the lowest bit first."""
    data = bytearray(bitmap_bytes(num_devices))
    for index in members:
        data[index // 8] |= 1 << index % 8
    return bytes(data)


def members_of(data: bytes, num_devices: int) -> Sequence[int]:
    """Return the indexes of a bitmap, in rising order. Raises InvalidInput if an unused bit is set."""
    indexes = [8 * place + bit for place, byte in enumerate(data) for bit in range(8) if byte >> bit & 1]
    if len(data) != bitmap_bytes(num_devices) or (indexes and indexes[-1] >= num_devices):
        raise InvalidInput(
            f"secure aggregation: got a bitmap of {len(data)} bytes with an index of {num_devices} or more",
            code="FN-1625",
        )
    return indexes
