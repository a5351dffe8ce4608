"""The ring of a masked Update: the smallest one that holds the sum, and the bytes of a payload.

A masked value is an integer modulo 2^bits, where bits is a multiple of 8. Arithmetic is done in words of 1, 2, 4 or 8
bytes. A word modulo 2^bits is what counts, and reduction commutes with sums, so it is done once, when a payload is
written or a sum is read.

    payload     num_values * bits / 8 bytes: the tensors in the order of the flat vector
                num_tail * 8 bytes: the tail, integers modulo 2^64: the weight, then the declared statistics

The head-room proof: N devices of weight at most w send magnitudes of at most w * 2^(codec bits - 1). Their signed sum
fits the ring if N * w * 2^(codec bits - 1) <= 2^(bits - 1). The largest positive code is one less, so +2^(bits - 1) is
not reached.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fanin.edge import rings
from fanin.protos.errors import InvalidInput, InvalidPlan

RING_BITS: Final = tuple(range(8, 65, 8))
TAIL_BYTES: Final = 8
Words = npt.NDArray[np.unsignedinteger]
"""Ring words (num_values,), of ``MaskedLayout.dtype``."""
SignedWords = npt.NDArray[np.signedinteger]
"""Integers (num_values,)."""


def smallest_ring(codec_bits: int, num_devices: int, max_weight: int) -> int:
    """Return the bits of the smallest ring that holds any sum.

    Args:
        codec_bits: Bits of an encoded value, with the sign.
        num_devices: N, the most devices of a sum.
        max_weight: w, the largest weight of a device.

    Raises:
        InvalidPlan: No ring holds the sum. The error names the largest number of devices.
    """
    try:
        return rings.smallest_ring(codec_bits, num_devices * max_weight).bits
    except ValueError as exc:
        largest = largest_sum(rings.MAX_BITS, codec_bits, max_weight)
        raise InvalidPlan(
            f"secure aggregation: got {num_devices} devices of weight {max_weight} with {codec_bits} bits a value, "
            f"expected at most {largest} devices; lower the largest weight or the number of devices",
            code="FN-1624",
        ) from exc


def largest_sum(ring_bits: int, codec_bits: int, max_weight: int) -> int:
    """Return the most devices whose sum fits a ring; 0 if not even one fits."""
    return (1 << max(ring_bits - codec_bits, 0)) // max_weight if ring_bits >= codec_bits else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedLayout:
    """The bytes of a masked payload.

    Attributes:
        ring_bits: Bits of a tensor value: 8, 16, .., 64.
        num_values: Values of all tensors.
        num_tail: Words of the tail.
    """

    ring_bits: int
    num_values: int
    num_tail: int

    def __post_init__(self) -> None:
        if self.ring_bits not in RING_BITS:
            raise InvalidInput(
                f"ring: got {self.ring_bits} bits, expected a multiple of 8 from 8 to 64", code="FN-1625"
            )

    @property
    def value_bytes(self) -> int:
        """Bytes of a tensor value in a payload."""
        return self.ring_bits // 8

    @property
    def word_bytes(self) -> int:
        """Bytes of a tensor value in memory and in a keystream: 1, 2, 4 or 8."""
        return 1 << (self.value_bytes - 1).bit_length()

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Type of the words of tensors."""
        return np.dtype(f"<u{self.word_bytes}")

    @property
    def payload_bytes(self) -> int:
        """Bytes of a payload."""
        return self.num_values * self.value_bytes + self.num_tail * TAIL_BYTES

    def words_of(self, values: SignedWords, weight: int) -> Words:
        """Return weighted values as words of the ring."""
        words = values.astype(self.dtype)
        if weight != 1:
            # Wrap-around of a product of words is the product in the ring.
            words *= self.dtype.type(weight % (1 << 8 * self.word_bytes))
        return words

    def packed(self, words: Words) -> bytes:
        """Return words as bytes of a payload."""
        if self.value_bytes == self.word_bytes:
            return words.tobytes()
        data: bytes = words.view(np.uint8).reshape(-1, self.word_bytes)[:, : self.value_bytes].tobytes()
        return data

    def unpacked(self, payload: memoryview) -> Words:
        """Return the words of bytes of a payload, which begin and end between values; a view where possible."""
        if self.value_bytes == self.word_bytes:
            return np.frombuffer(payload, self.dtype)
        rows = np.zeros((len(payload) // self.value_bytes, self.word_bytes), np.uint8)
        rows[:, : self.value_bytes] = np.frombuffer(payload, np.uint8).reshape(-1, self.value_bytes)
        words: Words = rows.reshape(-1).view(self.dtype)
        return words

    def signed(self, words: Words) -> npt.NDArray[np.int64]:
        """Return the integers from -2^(bits - 1) to 2^(bits - 1) - 1 that words stand for (num_values,)."""
        wide = words.astype(np.uint64) << np.uint64(64 - self.ring_bits)
        return wide.view(np.int64) >> np.int64(64 - self.ring_bits)
