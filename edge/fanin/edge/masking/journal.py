"""The durable facts of a device, and the effects that a shell carries out.

A device is a fold over its journal. A shell carries out effects in their order. It makes a ``Remember`` durable before
it continues: only then is a response sent. A record of the journal, whose numbers are little-endian:

    1 byte      number of the fact
    4 bytes     L: length of the content
    L bytes     the fields, each with its length, 4 bytes, before it
    32 bytes    SHA-256 of the bytes before

A record with another digest, or that ends too early, is damage: the device gives up the attempt. The store of the
journal notices the loss of whole records.
"""

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from types import MappingProxyType
from typing import Final

from fanin.protos.errors import Corrupted

_U32: Final = struct.Struct("<I")
_HEAD: Final = struct.Struct("<BI")
DIGEST_BYTES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysDrawn:
    """The secrets of an attempt. The answer is message 1.

    Attributes:
        terms: The encoded terms.
        sealing: c, the private key with which others seal shares for this device.
        masking: s, the private key of the pair masks.
        seed: b, the seed of the self mask.
        answer: Message 1.
    """

    terms: bytes
    sealing: bytes = field(repr=False)
    masking: bytes = field(repr=False)
    seed: bytes = field(repr=False)
    answer: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesSealed:
    """The roster, message 2, and the sealed shares, message 3. In a complete graph also the own share of b."""

    received: bytes
    own_share: bytes = field(repr=False)
    answer: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesOpened:
    """The delivery, message 4."""

    received: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadMasked:
    """SHA-256 of the masked payload, 32 bytes."""

    sha256: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivorsNamed:
    """The survivors, message 5, and under the threat ``active`` message 6."""

    received: bytes
    answer: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesGiven:
    """Message 8, which has for each peer the kind of share."""

    answer: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded:
    """The end of an attempt, which replaces its other facts.

    Attributes:
        terms: The encoded terms.
        gave_shares: One byte: 1 if the device gave shares.
    """

    terms: bytes
    gave_shares: bytes


Fact = KeysDrawn | SharesSealed | SharesOpened | PayloadMasked | SurvivorsNamed | SharesGiven | AttemptEnded
FACTS: Final[Mapping[int, type[Fact]]] = MappingProxyType(
    {
        1: KeysDrawn,
        2: SharesSealed,
        3: SharesOpened,
        4: PayloadMasked,
        5: SurvivorsNamed,
        6: SharesGiven,
        7: AttemptEnded,
    }
)
"""The facts by their number on disk."""
_NUMBERS: Final = {kind: number for number, kind in FACTS.items()}


@dataclass(frozen=True, slots=True)
class Remember:
    """Append a fact to the journal, and make it durable before the next effect."""

    fact: Fact


@dataclass(frozen=True, slots=True)
class Respond:
    """Send a message of this attempt to the coordinator. It may be repeated."""

    message: bytes


@dataclass(frozen=True, slots=True)
class Forget:
    """Replace the journal by this fact, and remove the masked payload."""

    fact: AttemptEnded


MaskEffect = Remember | Respond | Forget


def record_of(fact: Fact) -> bytes:
    """Return a fact as a record of the journal."""
    parts: Sequence[bytes] = astuple(fact)
    content = b"".join(_U32.pack(len(part)) + part for part in parts)
    data = _HEAD.pack(_NUMBERS[type(fact)], len(content)) + content
    return data + hashlib.sha256(data).digest()


def read_journal(data: bytes) -> tuple[Fact, ...]:
    """Return the facts of a journal.

    The file is replaced whole, so a record that ends too early is damage, too: without it a key would serve twice.

    Raises:
        Corrupted: A record is damaged or cut.
    """
    return tuple(_facts(data))


def _facts(data: bytes) -> Iterator[Fact]:
    start = 0
    while start < len(data):
        number, length = _HEAD.unpack_from(data.ljust(start + _HEAD.size, b"\0"), start)
        end = start + _HEAD.size + length
        digest = data[end : end + DIGEST_BYTES]
        if hashlib.sha256(data[start:end]).digest() != digest or number not in FACTS:
            raise Corrupted(
                f"journal of a secure aggregation: the record at byte {start} is damaged or cut; give up the attempt",
                code="FN-1634",
            )
        parts = _parts(data[start + _HEAD.size : end])
        yield FACTS[number](**dict(zip((each.name for each in fields(FACTS[number])), parts, strict=True)))
        start = end + DIGEST_BYTES


def _parts(content: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(content):
        end = start + _U32.size + _U32.unpack_from(content, start)[0]
        yield content[start + _U32.size : end]
        start = end
