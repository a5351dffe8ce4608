"""What the slots of an ``infer`` graph come from besides a Version's own parameters; part of the signed manifest.

A **constant** is a vector that the export froze: the statistics of a norm that keeps them, the bias of a layer that
does not learn, the scales of a frozen weight. It has no name in a Version, and is told here, in base64.

A **folded** tensor is the weight or the bias of a convolution or linear layer with the BatchNorm behind it, so that one
product does what two layers did (Jacob et al. 2018, arXiv 1712.05877, section 3.2)::

    weight'  =  weight        * gain / sqrt(variance + epsilon)
    bias'    = (bias  - mean) * gain / sqrt(variance + epsilon) + offset

Both are one formula, ``edge.quantize`` computes it, and slots name the result as they name a parameter.
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
_NO_NAMES: Final[Mapping[str, bytes]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """One tensor: ``(value - mean) * gain / sqrt(variance + epsilon) + offset``, along the channels' ``axis``.

    Each but ``epsilon`` names a parameter or a constant. ``value`` "" is a bias that there is none of, ``mean`` and
    ``offset`` "" are 0, ``gain`` "" is 1.
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
        """What it is made of."""
        return tuple(name for name in (self.value, self.mean, self.gain, self.variance, self.offset) if name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """Constants (float32, little-endian, one for each channel) and folded tensors, by name."""

    constants: Mapping[str, bytes] = field(default_factory=lambda: _NO_NAMES)
    folded: Mapping[str, Folded] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        for name, data in self.constants.items():
            if len(data) % 4 or not np.isfinite(np.frombuffer(data, "<f4")).all():
                raise InvalidBundle(f"manifest: constant {name!r}: got {len(data)} bytes, expected finite float32s")
        for name, found in self.folded.items():
            if not 0.0 < found.epsilon < float("inf"):
                raise InvalidBundle(f"manifest: folded {name!r}: got epsilon {found.epsilon}, expected more than 0.0")

    def constant(self, name: str) -> Float32s:
        """A constant's values (channels,)."""
        return np.frombuffer(self.constants[name], "<f4").astype(np.float32)

    def origins(self, name: str) -> tuple[str, ...]:
        """The parameters and constants that a tensor is made of, or itself."""
        return self.folded[name].names if name in self.folded else (name,)

    def shapes(self, own: Shapes) -> Shapes:
        """The shapes of all that slots may come from, ``own`` being the parameters'. Raises InvalidBundle."""
        for name in (*self.constants, *self.folded):
            if not name or name in own or (name in self.constants and name in self.folded):
                raise InvalidBundle(f"manifest: derived tensor {name!r} has the name of another, or none")
        known = dict(own) | {name: (len(data) // 4,) for name, data in self.constants.items()}
        made: dict[str, tuple[int, ...]] = {}
        for name, found in self.folded.items():
            missing = sorted({*found.names, found.variance} - set(known))
            if missing:
                raise InvalidBundle(f"manifest: folded {name!r} names unknown parameters {missing}")
            channels = known[found.variance]
            shape = known.get(found.value, channels)
            vectors = {known[part] for part in (found.mean, found.gain, found.variance, found.offset) if part}
            if len(vectors) > 1 or not 0 <= found.axis < len(shape) or channels != (shape[found.axis],):
                raise InvalidBundle(
                    f"manifest: folded {name!r}: got {shape} along axis {found.axis} and vectors {sorted(vectors)}, "
                    "expected one value for each channel"
                )
            made[name] = shape
        return known | made


NOTHING: Final = Derived()
"""Slots come from parameters only."""


def derived_row(derived: Derived) -> dict[str, object]:
    """The JSON form."""
    return {
        "constants": {name: base64.b64encode(data).decode() for name, data in derived.constants.items()},
        "folded": {
            name: {
                "value": found.value,
                "axis": found.axis,
                "mean": found.mean,
                "gain": found.gain,
                "variance": found.variance,
                "epsilon": found.epsilon,
                "offset": found.offset,
            }
            for name, found in derived.folded.items()
        },
    }


def parse_derived(reader: Reader) -> Derived:
    """What the JSON form says. Raises InvalidBundle."""
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
        raise InvalidBundle(f"{reader.path}.{name}: not base64 ({exc})") from exc


def _folded(reader: Reader) -> Folded:
    reader.only("value axis mean gain variance epsilon offset")
    return Folded(
        value=reader.text("value"),
        axis=reader.integer("axis"),
        mean=reader.text("mean"),
        gain=reader.text("gain"),
        variance=reader.text("variance"),
        epsilon=reader.number("epsilon"),
        offset=reader.text("offset"),
    )
