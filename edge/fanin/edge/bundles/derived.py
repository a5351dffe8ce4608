"""Derived tensors: sources of slot values other than the parameters of a Version. Part of the signed manifest.

A **constant** is a vector that the export froze. Examples are the statistics of a normalization layer, the bias of an
untrained layer, and the scales of a frozen weight. A Version does not contain it, so the manifest does, in base64.

A **folded** tensor is the weight or the bias of a convolution or linear layer, merged with the BatchNorm behind it, so
one product replaces two layers::

    weight'  =  weight        * gain / sqrt(variance + epsilon)
    bias'    = (bias  - mean) * gain / sqrt(variance + epsilon) + offset

Both are instances of one formula, which ``quantize`` computes. A slot names a derived tensor like a parameter.

Reference:
    Jacob et al. 2018, arXiv 1712.05877, section 3.2.
"""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np

from fanin.edge.bundles.rows import Reader
from fanin.edge.tensors import Float32s
from fanin.protos.errors import InvalidBundle

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedTensor:
    """One folded tensor: ``(value - mean) * gain / sqrt(variance + epsilon) + offset``.

    All fields except ``epsilon`` and ``axis`` name a parameter or a constant; "" selects the default.

    Attributes:
        variance: Variance per channel (channels,). Required.
        epsilon: BatchNorm's epsilon.
        value: The weight or the bias; "" for a layer without bias, as if it were zero.
        axis: Channel axis of ``value``.
        mean: Mean per channel; "" for 0.
        gain: BatchNorm's weight; "" for 1.
        offset: BatchNorm's bias; "" for 0.
    """

    variance: str
    epsilon: float
    value: str = ""
    axis: int = 0
    mean: str = ""
    gain: str = ""
    offset: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters and constants that it uses."""
        return tuple(name for name in (self.value, self.mean, self.gain, self.variance, self.offset) if name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """Constants (little-endian float32 bytes, (channels,)) and folded tensors, by name."""

    constants: Mapping[str, bytes] = field(default_factory=dict)
    folded: Mapping[str, FoldedTensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, data in self.constants.items():
            if len(data) % 4:
                raise InvalidBundle(
                    f"manifest: constant {name!r}: got {len(data)} bytes, expected a multiple of 4 for float32 numbers",
                    code="FN-0323",
                )
            if not np.isfinite(np.frombuffer(data, "<f4")).all():
                raise InvalidBundle(
                    f"manifest: constant {name!r}: got NaN or infinity, expected finite float32 numbers", code="FN-0323"
                )
        for name, folded in self.folded.items():
            if not 0.0 < folded.epsilon < float("inf"):
                raise InvalidBundle(
                    f"manifest: folded {name!r}: got epsilon {folded.epsilon}, expected more than 0.0", code="FN-0323"
                )

    def constant(self, name: str) -> Float32s:
        """Return the values of a constant (channels,)."""
        return np.frombuffer(self.constants[name], "<f4").astype(np.float32)

    def origins(self, name: str) -> tuple[str, ...]:
        """Return the parameters and constants from which a tensor is computed; for others than folded ones, itself."""
        return self.folded[name].names if name in self.folded else (name,)

    def shapes(self, own: Shapes) -> Shapes:
        """Return the shapes of all parameters and derived tensors.

        Args:
            own: Shapes of the parameters.

        Raises:
            InvalidBundle: A name is repeated or unknown, or the vectors of a folded tensor do not fit its channels.
        """
        for name in (*self.constants, *self.folded):
            if not name or name in own or (name in self.constants and name in self.folded):
                raise InvalidBundle(
                    f"manifest: derived tensor {name!r}: expected a unique, non-empty name", code="FN-0323"
                )
        known = dict(own) | {name: (len(data) // 4,) for name, data in self.constants.items()}
        folded_shapes: dict[str, tuple[int, ...]] = {}
        for name, folded in self.folded.items():
            missing = sorted({*folded.names, folded.variance} - set(known))
            if missing:
                raise InvalidBundle(f"manifest: folded {name!r} names unknown parameters {missing}", code="FN-0322")
            channels = known[folded.variance]
            shape = known.get(folded.value, channels)
            vectors = {known[part] for part in (folded.mean, folded.gain, folded.variance, folded.offset) if part}
            if len(vectors) > 1 or not 0 <= folded.axis < len(shape) or channels != (shape[folded.axis],):
                raise InvalidBundle(
                    f"manifest: folded {name!r}: got {shape} along axis {folded.axis} and vectors {sorted(vectors)}, "
                    "expected one value for each channel",
                    code="FN-0323",
                )
            folded_shapes[name] = shape
        return known | folded_shapes


NOTHING: Final = Derived()
"""No derived tensors: all slots come from parameters."""


def derived_row(derived: Derived) -> dict[str, object]:
    """Return the JSON form."""
    return {
        "constants": {name: base64.b64encode(data).decode() for name, data in derived.constants.items()},
        "folded": {
            name: {
                "value": folded.value,
                "axis": folded.axis,
                "mean": folded.mean,
                "gain": folded.gain,
                "variance": folded.variance,
                "epsilon": folded.epsilon,
                "offset": folded.offset,
            }
            for name, folded in derived.folded.items()
        },
    }


def parse_derived(reader: Reader) -> Derived:
    """Parse the JSON form. Raises InvalidBundle."""
    reader.only("constants folded")
    constants = reader.child("constants")
    return Derived(
        constants=MappingProxyType({name: _bytes(constants, name) for name in constants.row}),
        folded=MappingProxyType({name: _folded(row) for name, row in reader.children("folded")}),
    )


def _bytes(reader: Reader, name: str) -> bytes:
    try:
        return base64.b64decode(reader.text(name), validate=True)
    except (binascii.Error, ValueError) as exc:
        raise InvalidBundle(f"{reader.path}.{name}: not base64 ({exc})", code="FN-0323") from exc


def _folded(reader: Reader) -> FoldedTensor:
    reader.only("value axis mean gain variance epsilon offset")
    return FoldedTensor(
        value=reader.text("value"),
        axis=reader.integer("axis"),
        mean=reader.text("mean"),
        gain=reader.text("gain"),
        variance=reader.text("variance"),
        epsilon=reader.number("epsilon"),
        offset=reader.text("offset"),
    )
