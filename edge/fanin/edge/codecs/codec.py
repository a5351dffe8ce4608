"""The codec that a Plan names: one of fanin, or one of another distribution, whose results are checked.

An installed distribution adds codecs by the entry point group ``fanin.codecs``. It must be installed at the coordinator
and on the devices. It rounds each value by less than one step, and has the same number of bits for each value. So the
coordinator can read any slice of a payload. docs/howto/codecs.md has an example.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np

from fanin.edge.codecs.fixed import (
    CODECS,
    DIVERGED,
    AnyCodec,
    Codec,
    Encoded,
    Integers,
    RunCodec,
    dtype_of,
    payload_bytes,
)
from fanin.edge.codecs.pipeline import form_of
from fanin.edge.codecs.sparse import topk
from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos.errors import InvalidPlan
from fanin.protos.plans import TOPK, CodecSpec
from fanin.protos.plans.keys import shown
from fanin.protos.plans.named import Choice, blamed, created, wrong_object

GROUP: Final = "fanin.codecs"
"""The entry point group of codecs in other distributions. An entry is a function of options."""
BITS: Final = (4, 8, 16, 32)
"""Bits of a value: half a byte or whole bytes, and at most those for which a Plan has head-room."""


def _factory(codec: Codec) -> Callable[[], Codec]:
    return lambda: codec


FACTORIES: Final[Mapping[str, Callable[..., AnyCodec]]] = MappingProxyType(
    {**{name: _factory(codec) for name, codec in CODECS.items()}, TOPK: topk}
)
"""The codecs of fanin. Only ``topk`` has options."""


def codec_of(spec: CodecSpec) -> RunCodec:
    """Return the codec that a Plan or an Assignment names.

    Raises:
        InvalidPlan: No codec has this name, its options are wrong, or its package returned something else.
    """
    choice = Choice(key="codec.name", name=spec.name, options_key="codec.options", options=spec.options)
    return RunCodec(codec=created(choice, FACTORIES, GROUP, checked=guarded_codec), max_shift=spec.max_shift)


def guarded_codec(codec: AnyCodec, where: str) -> Codec:
    """Return a codec of another package with its checks.

    Args:
        codec: The codec.
        where: Begins the error of an object that is no codec.

    Raises:
        InvalidPlan: This is no codec, or its values have another number of bits than 4, 8, 16 or 32.
    """
    with blamed(where, "correct it"):
        if isinstance(codec, type) or not isinstance(codec, Codec):
            raise wrong_object(where, codec, "an object with the members of Codec")
        bits: object = codec.bits
        if isinstance(bits, bool) or bits not in BITS:
            raise InvalidPlan(f"{where}: bits: got {shown(bits)}, expected 4, 8, 16 or 32; correct it", code="FN-0214")
        return _CheckedCodec(codec)


class _CheckedCodec:
    """A ``Codec`` whose errors name it."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._name = f"codec {type(codec).__name__}"
        self.bits = int(codec.bits)
        self.is_stochastic = bool(codec.is_stochastic)

    def encode(
        self, table: TensorTable, update: Float32s, grid: Sequence[int], max_shift: int, rng: np.random.Generator
    ) -> Encoded:
        """See ``Codec.encode``."""
        if not np.isfinite(update).all():
            raise ValueError(DIVERGED)
        with blamed(f"{self._name}: encode", "correct the codec"):
            encoded: object = self._codec.encode(table, update, grid, max_shift, rng)
        if not isinstance(encoded, Encoded) or not isinstance(encoded.payload, bytes):
            raise self._error(f"encode returned {form_of(encoded)}, expected an Encoded with a payload of bytes")
        size = payload_bytes(self.bits, table.num_values)
        if len(encoded.payload) != size:
            raise self._error(f"encode returned {len(encoded.payload)} bytes, expected {size}")
        shifts = encoded.shifts
        if len(shifts) != len(table.specs) or not all(shift in range(max_shift + 1) for shift in shifts):
            raise self._error(
                f"encode returned the shifts {shown(shifts)}, expected one from 0 to {max_shift} for each of "
                f"{len(table.specs)} blocks"
            )
        return encoded

    def decode(self, payload: memoryview) -> Integers:
        """See ``Codec.decode``."""
        with blamed(f"{self._name}: decode", "correct the codec"):
            values = self._codec.decode(payload)
        expected = f"{dtype_of(self.bits)} ({8 * len(payload) // self.bits},)"
        if form_of(values) != expected:
            raise self._error(f"decode returned {form_of(values)}, expected {expected}")
        return values

    def _error(self, text: str) -> InvalidPlan:
        return InvalidPlan(f"{self._name}: {text}; correct the codec", code="FN-0214")
