"""Sums modulo a power of two: the ring in which masked vectors are added.

The values of a vector are signed integers. Modulo 2^bits each has one representative from -2^(bits-1) to
2^(bits-1) - 1. A sum that fits in this range is its own representative, so masks that cancel leave the exact sum.
Integer overflow of int64 is a reduction modulo 2^64, which numpy computes without a check, and 2^bits divides 2^64.

    on the wire     bits / 8 bytes a value, little-endian two's complement
    in memory       words of 1, 2, 4 or 8 bytes, unsigned; only their value modulo 2^bits counts
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fanin.edge.tensors import Int64s

MAX_BITS: Final = 64
RING_BITS: Final = tuple(range(8, MAX_BITS + 1, 8))
TAIL_BYTES: Final = 8
Words = npt.NDArray[np.unsignedinteger]
"""Ring words (num_values,), of ``Ring.dtype``."""
SignedWords = npt.NDArray[np.signedinteger]
"""Integers (num_values,)."""
Correction = Callable[[int, int], Int64s]
"""Returns what the fold adds to the sum from a first to a last position (exclusive) of the vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The integers modulo 2^bits. ``bits`` are whole bytes, at most 64."""

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in RING_BITS:
            raise ValueError(f"ring: got {self.bits} bits, expected a multiple of 8 from 8 to {MAX_BITS}")

    @property
    def value_bytes(self) -> int:
        """Bytes of one value on the wire."""
        return self.bits // 8

    def reduce(self, values: Int64s) -> Int64s:
        """Return the representatives of integers, from -2^(bits-1) to 2^(bits-1) - 1."""
        unused = MAX_BITS - self.bits
        # The shift to the left drops the bits above the ring, and the shift to the right repeats the sign.
        representatives: Int64s = (values << unused) >> unused
        return representatives

    @property
    def word_bytes(self) -> int:
        """Bytes of a value in memory and in a keystream: 1, 2, 4 or 8."""
        return 1 << (self.value_bytes - 1).bit_length()

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Type of the words."""
        return np.dtype(f"<u{self.word_bytes}")

    def words_of(self, values: SignedWords, weight: int = 1) -> Words:
        """Return weighted values as words."""
        words = values.astype(self.dtype)
        if weight != 1:
            # Wrap-around of a product of words is the product in the ring.
            words *= self.dtype.type(weight % (1 << 8 * self.word_bytes))
        return words

    def packed(self, words: Words) -> bytes:
        """Return the bytes of words on the wire."""
        if self.value_bytes == self.word_bytes:
            return words.tobytes()
        data: bytes = words.view(np.uint8).reshape(-1, self.word_bytes)[:, : self.value_bytes].tobytes()
        return data

    def unpacked(self, payload: memoryview) -> Words:
        """Return the words of bytes that begin and end between values; a view where possible."""
        if self.value_bytes == self.word_bytes:
            return np.frombuffer(payload, self.dtype)
        rows = np.zeros((len(payload) // self.value_bytes, self.word_bytes), np.uint8)
        rows[:, : self.value_bytes] = np.frombuffer(payload, np.uint8).reshape(-1, self.value_bytes)
        words: Words = rows.reshape(-1).view(self.dtype)
        return words

    def signed(self, words: Words) -> Int64s:
        """Return the representatives of words (num_values,)."""
        return self.reduce(words.astype(np.uint64).view(np.int64))

    def encode(self, values: Int64s) -> bytes:
        """Return the bytes of integers on the wire."""
        return self.packed(self.words_of(values))

    def decode(self, payload: memoryview) -> Int64s:
        """Return the representatives of bytes that end at the boundary of a value."""
        return self.signed(self.unpacked(payload))


WIDE: Final = Ring(bits=MAX_BITS)
"""The ring of the tail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingVector:
    """The payload of a masked Update: the values in a ring, then a tail of 64-bit integers.

        [num_values x ring] [num_tail x 8 bytes]

    A device multiplies its encoded values by its weight before it masks them. The tail has the weight and the
    statistics of the device, under masks like the values.

    Attributes:
        ring: The ring of the values. It holds their sum.
        num_values: Number of values.
        num_tail: Number of integers in the tail.
    """

    ring: Ring
    num_values: int
    num_tail: int

    @property
    def size_bytes(self) -> int:
        """Bytes of a payload."""
        return self.num_values * self.ring.value_bytes + self.num_tail * TAIL_BYTES

    def encode(self, values: Int64s, tail: Int64s) -> bytes:
        """Return the payload of values (num_values,) and a tail (num_tail,), each reduced here."""
        if values.shape != (self.num_values,) or tail.shape != (self.num_tail,):
            raise ValueError(
                f"ring vector: got {values.shape} values and a tail of {tail.shape}, expected ({self.num_values},) and "
                f"({self.num_tail},)"
            )
        return self.ring.encode(values) + WIDE.encode(tail)

    def decode(self, chunks: Iterable[bytes | memoryview], tail: Int64s) -> Iterator[Int64s]:
        """Yield the values of a payload in consecutive slices. ``chunks`` may end inside a value.

        Args:
            chunks: The payload in consecutive pieces.
            tail: Filled with the tail (num_tail,) after the last slice.
        """
        width, left, rest = self.ring.value_bytes, self.num_values, b""
        for chunk in chunks:
            data = rest + bytes(chunk) if rest else chunk
            num_values = min(len(data) // width, left)
            left -= num_values
            rest = bytes(data[num_values * width :])
            if num_values:
                yield self.ring.decode(memoryview(data)[: num_values * width])
        if left or len(rest) != self.num_tail * TAIL_BYTES:
            raise ValueError(f"ring vector: got another size, expected {self.size_bytes} bytes")
        tail[:] = WIDE.decode(memoryview(rest))


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """What a round protocol, or the noise of a Run, adds to a closed sum: ``(sum + correction) modulo the ring``.

    Attributes:
        ring: The ring of the sum; None: the sum never wraps.
        correction: Returns what is added; None: nothing. The positions of a tail follow those of the values.
        tail: The names of the integers of the tail: the weight of an Update, then its statistics. Empty without one.
        denominator: The mean divides by this number of fresh weights, and no reach of an Update moves the grid; None:
            by the weights of the Updates.
    """

    ring: Ring | None = None
    correction: Correction | None = None
    tail: tuple[str, ...] = ()
    denominator: int | None = None


def largest_weight(ring: Ring, value_bits: int) -> int:
    """Return the largest total weight whose sum a ring holds; 0 if not even a weight of 1 fits."""
    return 1 << (ring.bits - value_bits) if ring.bits >= value_bits else 0


def smallest_ring(value_bits: int, total_weight: int) -> Ring:
    """Return the smallest ring that holds each sum of values with a total weight.

    A value of b bits is at least -2^(b-1) and less than 2^(b-1). With a total weight of at most 2^w, the sum is at
    least -2^(b-1+w) and less than 2^(b-1+w), so b + w bits hold it.

    Args:
        value_bits: Bits of a value, including the sign, on the coarsest grid that a device may choose.
        total_weight: The largest sum of the weights, at least 1.

    Raises:
        ValueError: No ring of at most 64 bits holds the sum.
    """
    bits = value_bits + (total_weight - 1).bit_length()
    if bits > MAX_BITS:
        raise ValueError(f"ring: got a sum of {bits} bits, expected at most {MAX_BITS}")
    return Ring(bits=-(-bits // 8) * 8)
