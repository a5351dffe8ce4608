"""Codecs: an update as integers on the grid, and as bytes.

A payload has the values in the order of the ``TensorTable``, as little-endian integers. These are the codecs:

    fixed32              32 bits per value, rounded to the nearest step: the error is at most half a (shifted) step
    int16, int8, int4    16, 8 or 4 bits per value, rounded stochastically: less than one step, and 0 in expectation
    topk                 some of the values, and their positions (``sparse``)

Two values of 4 bits share a byte, the first of them in its low bits. Blocks follow each other without a gap, so a byte
may have values of two blocks. The high bits of the last byte are zero if the number of values is odd.

With few bits, rounding to nearest would lose every change that stays below half a step, Round after Round. Stochastic
rounding needs no memory on the device: its errors are independent, so they average out over devices and Rounds.
docs/decisions/0006 has the measurements.

A codec of another distribution has the same members (``codec``).

A device encodes its *unweighted* update; the coordinator applies the weight.

Reference:
    Stochastic quantization: Alistarh et al. 2017, arXiv 1610.02132, section 3.1.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos.errors import InvalidUpdate

SLICE_VALUES: Final = 1 << 14
"""Values that are encoded at a time, so that intermediate results fit the second-level cache of a processor."""
LARGE: Final = 2.0**100
HALF_BYTE: Final = 4
"""Bits of a value that shares its byte with another one."""
Floats = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Integers = npt.NDArray[np.signedinteger]
"""Encoded values (num_values,)."""


def largest_value(bits: int) -> int:
    """Return the largest encoded value. The range is symmetric: a negated update encodes to negated values.

    A peer may also send the value one below the range, -2^(bits-1), which no encoder writes. It is harmless. A Plan's
    headroom is for 2^(bits-1), and the fold is exact for it. On another grid it is clipped like any other value.
    """
    return (1 << (bits - 1)) - 1


DIVERGED: Final = "update: got NaN or infinity, expected finite values; the training diverged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """An update on the grid.

    Attributes:
        payload: The encoded values.
        shifts: For each block, the number of bits by which it is coarser than the grid (num_blocks,).
        num_rounded: Values that were not on the grid and were rounded to a neighboring step.
        num_saturated: Values outside the range, which were limited to its ends.
        clip_bit: 1 if the norm of the update was within the clip norm, -1 if the update was scaled down; 0 for a codec
            that does not clip.
    """

    payload: bytes
    shifts: tuple[int, ...]
    num_rounded: int
    num_saturated: int
    clip_bit: int = 0


@runtime_checkable
class Codec(Protocol):
    """Conversion between flat float32 updates and payloads. All values have the same number of bits.

    ``fanin.edge.codecs.contract.check_codec`` checks an implementation.
    """

    @property
    def bits(self) -> int:
        """Bits of one value, including the sign: 4, or whole bytes."""
        ...

    @property
    def is_stochastic(self) -> bool:
        """Whether rounding uses the random generator."""
        ...

    def encode(
        self, table: TensorTable, update: Float32s, grid: Sequence[int], max_shift: int, rng: np.random.Generator
    ) -> Encoded:
        """Encode an update.

        For each block the codec chooses the smallest shift from 0 to ``max_shift`` with which all values fit. If none
        fits, it takes ``max_shift`` and saturates.

        Args:
            table: Layout of the update.
            update: The unweighted change of the parameters (num_values,).
            grid: Exponent of each block's step (num_blocks,).
            max_shift: W, the number of bits by which a block may be coarser than the grid.
            rng: Generator for stochastic rounding.

        Raises:
            ValueError: The update holds NaN or infinity, or the update or the grid has a wrong length.
        """
        ...

    def decode(self, payload: memoryview) -> Integers:
        """Decode whole bytes of a payload that begin and end at the boundary of a value.

        ``decoded``, ``decoded_pieces`` and ``decoded_part`` read any values.

        Returns:
            The integers (num_values_of_slice,) in the smallest dtype of at least ``bits`` bits, a view of ``payload``
            where possible. With 4 bits, two for each byte. The value of an integer q in a block with exponent e and
            shift s is q * 2^(e + s).

        Raises:
            InvalidUpdate: The slice ends inside a value.
        """
        ...


@runtime_checkable
class SparseCodec(Protocol):
    """A codec whose payload has a part for each slice of ``SLICE_VALUES`` values. A part is decoded without the others.

    ``bits`` is for one sent value. The members are those of ``Codec``, but for ``decode``.
    """

    @property
    def bits(self) -> int:
        """See ``Codec.bits``."""
        ...

    @property
    def is_stochastic(self) -> bool:
        """See ``Codec.is_stochastic``."""
        ...

    def encode(
        self, table: TensorTable, update: Float32s, grid: Sequence[int], max_shift: int, rng: np.random.Generator
    ) -> Encoded:
        """See ``Codec.encode``."""
        ...

    def slice_bytes(self, num_values: int) -> int:
        """Return the exact size of the part of a slice of 1 to ``SLICE_VALUES`` values, in bytes."""
        ...

    def decode_slice(self, payload: memoryview, num_values: int) -> Integers:
        """Return all values of a slice (num_values,), zero where none was sent.

        Raises:
            InvalidUpdate: No encoder writes these bytes.
        """
        ...


AnyCodec = Codec | SparseCodec


def round_to_nearest(scaled: Floats) -> Floats:
    """Round to the nearest integer, ties to even."""
    nearest: Floats = np.rint(scaled)
    return nearest


def round_stochastically(scaled: Floats, rng: np.random.Generator) -> Floats:
    """Round stochastically: away from zero with a probability equal to the fraction.

    The expected value of the result is ``scaled``.
    """
    magnitude = np.abs(scaled)
    below = np.floor(magnitude)
    outcome: Floats = np.copysign(below + (rng.random(magnitude.size) < magnitude - below), scaled)
    return outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TwosComplement:
    """A codec whose values are two's complement integers, rounded to nearest or stochastically."""

    name: str
    bits: int
    is_stochastic: bool

    def encode(
        self, table: TensorTable, update: Float32s, grid: Sequence[int], max_shift: int, rng: np.random.Generator
    ) -> Encoded:
        """See ``Codec.encode``."""
        if len(grid) != len(table.specs):
            raise ValueError(f"grid: got {len(grid)} blocks, expected {len(table.specs)}")
        limit = largest_value(self.bits)
        values = np.empty(table.num_values, dtype_of(self.bits))
        shifts, num_rounded, num_saturated = [], 0, 0
        for view, start, exponent in zip(table.views(update).values(), table.offsets, grid, strict=True):
            flat = view.ravel()
            largest = largest_magnitude_of(flat)
            # On the finest grids that an Assignment may have, large values overflow to infinity and saturate.
            with np.errstate(over="ignore", invalid="ignore"):
                shift = smallest_shift(float(np.ldexp(largest, -exponent)), limit, max_shift)
                per_value = math.ldexp(1.0, -exponent - shift)
                is_cut = largest * per_value > limit
                # Only the rounding rule may round. A float32 times a power of two is exact in float64. It is exact in
                # float32 too if it does not shrink, does not exceed the limit, and float32 has that power.
                is_narrow = 1.0 <= per_value < LARGE and not is_cut and not self.is_stochastic
                exact = np.dtype(np.float32 if is_narrow else np.float64)
                for first in range(0, flat.size, SLICE_VALUES):
                    scaled: Floats = np.multiply(flat[first : first + SLICE_VALUES], per_value, dtype=exact)
                    rounded = round_stochastically(scaled, rng) if self.is_stochastic else round_to_nearest(scaled)
                    num_rounded += int(np.count_nonzero(rounded != scaled))
                    if is_cut:
                        num_saturated += int(np.count_nonzero(np.abs(rounded) > limit))
                        np.clip(rounded, -limit, limit, out=rounded)
                    values[start + first : start + first + rounded.size] = rounded
            shifts.append(shift)
        return Encoded(
            payload=self.packed(values), shifts=tuple(shifts), num_rounded=num_rounded, num_saturated=num_saturated
        )

    def packed(self, values: Integers) -> bytes:
        """Return the payload of encoded values (num_values,)."""
        narrow = values.astype(dtype_of(self.bits), copy=False)
        return _packed(narrow) if self.bits == HALF_BYTE else narrow.tobytes()

    def decode(self, payload: memoryview) -> Integers:
        """See ``Codec.decode``; returns a view, except of 4 bits."""
        if self.bits == HALF_BYTE:
            return _unpacked(payload)
        dtype = dtype_of(self.bits)
        if len(payload) % dtype.itemsize:
            raise InvalidUpdate(
                f"{self.name}: got a payload of {len(payload)} bytes, expected a multiple of {dtype.itemsize}",
                code="FN-0639",
            )
        return np.frombuffer(payload, dtype)


def dtype_of(bits: int) -> np.dtype[np.signedinteger]:
    """Return the dtype of decoded values: the smallest with at least so many bits."""
    return np.dtype(f"<i{max(bits // 8, 1)}")


def _packed(values: Integers) -> bytes:
    """Return values of 4 bits (num_values,), two in a byte."""
    pairs = np.zeros(-(-values.size // 2), np.uint8)
    pairs[: values.size // 2] = values[1::2].view(np.uint8) << HALF_BYTE
    pairs |= values[::2].view(np.uint8) & 15
    return pairs.tobytes()


def _unpacked(payload: memoryview) -> Integers:
    """Return the values of 4 bits of a payload, two for each byte."""
    pairs = np.frombuffer(payload, np.int8)
    values = np.empty(2 * pairs.size, np.int8)
    # A right shift of a signed integer repeats its sign.
    values[::2] = (pairs << HALF_BYTE) >> HALF_BYTE
    values[1::2] = pairs >> HALF_BYTE
    return values


def payload_bytes(bits: int, num_values: int) -> int:
    """Return the bytes of so many values, each with so many bits."""
    return -(-num_values * bits // 8)


def encoded_bytes(codec: AnyCodec, num_values: int) -> int:
    """Return the exact size of every payload of so many values, in bytes."""
    if not isinstance(codec, SparseCodec):
        return payload_bytes(codec.bits, num_values)
    num_slices, rest = divmod(num_values, SLICE_VALUES)
    whole = num_slices * codec.slice_bytes(SLICE_VALUES) if num_slices else 0
    return whole + (codec.slice_bytes(rest) if rest else 0)


def decoded(codec: AnyCodec, payload: bytes, num_values: int) -> Integers:
    """Return the values of a payload (num_values,)."""
    if isinstance(codec, SparseCodec):
        return np.concatenate([np.empty(0, np.int8), *_decoded_slices(codec, (payload,), num_values)])
    return codec.decode(memoryview(payload))[:num_values]


def decoded_pieces(codec: AnyCodec, pieces: Iterable[bytes | memoryview], num_values: int) -> Iterator[Integers]:
    """Yield the values of a payload in consecutive slices, (num_values,) together.

    Args:
        codec: The codec. Only the bytes of a sparse one can be wrong: then it raises InvalidUpdate.
        pieces: The payload in consecutive pieces, which may end inside a value.
        num_values: Number of values of the payload.
    """
    if isinstance(codec, SparseCodec):
        yield from _decoded_slices(codec, pieces, num_values)
        return
    size, left, rest = max(codec.bits // 8, 1), num_values, b""
    for piece in pieces:
        data = memoryview(rest + bytes(piece) if rest else piece)
        end = len(data) - len(data) % size
        rest = bytes(data[end:])
        values = codec.decode(data[:end])
        # Half of the last byte may be no value.
        yield values[:left] if values.size == left + 1 and codec.bits == HALF_BYTE else values
        left -= values.size


def _decoded_slices(codec: SparseCodec, pieces: Iterable[bytes | memoryview], num_values: int) -> Iterator[Integers]:
    rest, position, num_bytes = b"", 0, 0
    for piece in pieces:
        num_bytes += len(piece)
        data, first = memoryview(rest + bytes(piece) if rest else piece), 0
        while position < num_values:
            size = min(SLICE_VALUES, num_values - position)
            last = first + codec.slice_bytes(size)
            if last > len(data):
                break
            yield codec.decode_slice(data[first:last], size)
            first, position = last, position + size
        rest = bytes(data[first:])
    if position < num_values or rest:
        raise InvalidUpdate(
            f"update: got a payload of {num_bytes} bytes, expected {encoded_bytes(codec, num_values)} for "
            f"{num_values} values",
            code="FN-0639",
        )


def decoded_part(
    codec: AnyCodec, read: Callable[[int, int], bytes], part: tuple[int, int], num_values: int
) -> Integers:
    """Return some consecutive values of a payload.

    Args:
        codec: The codec.
        read: Returns bytes of the payload. Its arguments are the first byte and the number of bytes.
        part: The first and the last position (exclusive) of the values.
        num_values: Number of values of the payload.
    """
    first, last = part
    if isinstance(codec, SparseCodec):
        # From the beginning of a slice to the end of one, or of the values.
        start = first - first % SLICE_VALUES
        stop = min(last + -last % SLICE_VALUES, num_values) if first < last else start
        data = read(encoded_bytes(codec, start), encoded_bytes(codec, stop - start)) if start < stop else b""
        return decoded(codec, data, stop - start)[first - start : last - start]
    offset = first * codec.bits // 8
    values = codec.decode(memoryview(read(offset, payload_bytes(codec.bits, last) - offset)))
    skipped = first - 8 * offset // codec.bits
    return values[skipped : skipped + last - first]


CODECS: Final[Mapping[str, Codec]] = MappingProxyType(
    {
        "fixed32": TwosComplement(name="fixed32", bits=32, is_stochastic=False),
        "int16": TwosComplement(name="int16", bits=16, is_stochastic=True),
        "int8": TwosComplement(name="int8", bits=8, is_stochastic=True),
        "int4": TwosComplement(name="int4", bits=HALF_BYTE, is_stochastic=True),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCodec:
    """The codec of a Run.

    Attributes:
        codec: The codec.
        max_shift: W, the number of bits by which a block may be coarser than the grid.
    """

    codec: AnyCodec
    max_shift: int

    @property
    def bits(self) -> int:
        """Bits of one value, including the sign."""
        return self.codec.bits

    def payload_bytes(self, table: TensorTable) -> int:
        """Return the exact size of every payload for this table, in bytes."""
        return encoded_bytes(self.codec, table.num_values)


def largest_magnitude_of(values: Float32s) -> float:
    """Return the largest magnitude. Raises ValueError for NaN and infinity, which show in the minimum or maximum."""
    highest, lowest = float(values.max(initial=0.0)), float(values.min(initial=0.0))
    if not (math.isfinite(highest) and math.isfinite(lowest)):
        raise ValueError(DIVERGED)
    return max(highest, -lowest)


def smallest_shift(largest: float, limit: int, max_shift: int) -> int:
    """Return the smallest shift with which a magnitude fits; ``max_shift`` if none does."""
    return next((shift for shift in range(max_shift) if math.ldexp(largest, -shift) <= limit), max_shift)
