"""Signatures: the callable graphs of a Bundle, described by their ports.

A Bundle may have several graphs for one purpose: one for each length of its sequences, and one for each batch size. A
device chooses among them by name, so they must have the same ports. The manifest checks that with the functions here.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from fanin.edge.lengths import Lengths
from fanin.protos.errors import InvalidBundle

DEVICE_SIGNATURES: Final = ("train", "evaluate", "infer")
"""Signatures that every Bundle with graphs has, because a device needs all of them."""
RANDOM_PREFIXES: Final = ("uniform.", "normal.")
"""Prefixes of the random inputs of a train graph, one for each kind (``runtimes.randomness``)."""
TRAIN: Final = "train"
BATCH_PORTS: Final = frozenset({"y", "mask"})
"""Inputs of a train graph, besides those of ``infer``, whose first dimension is the batch."""
DTYPES: Final = ("float32", "int32", "int8", "uint8")
"""Element types of a Signature's inputs and outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One input or output of a graph. A leading dimension of -1 is a batch of any size."""

    name: str
    dtype: str
    shape: tuple[int, ...]


Ports = tuple[tuple[Port, ...], tuple[Port, ...]]
"""Inputs and outputs of a graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One callable graph: its inputs and outputs, and the name of its artifact by graph format."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    graphs: Mapping[str, str]


def check_same_ports(longest: Signature, other: Signature, lengths: Lengths, kind: str, size: int) -> None:
    """Raise InvalidBundle unless the graphs of two lengths have the same ports, and the right length on its axis.

    Shapes of outputs and of random inputs follow from the length in a way that only the graph knows. All other inputs
    have equal shapes.
    """
    what = f"manifest: signature {lengths.signature(kind, size)!r}"
    for ports, others in ((longest.inputs, other.inputs), (longest.outputs, other.outputs)):
        forms, actual = ([(port.name, port.dtype, len(port.shape)) for port in row] for row in (ports, others))
        if forms != actual:
            raise InvalidBundle(f"{what}: got the ports {actual}, expected those of {kind!r}, {forms}", code="FN-0316")
    for port, own in zip(longest.inputs, other.inputs, strict=True):
        shape, axis = port.shape, lengths.axes.get(port.name)
        if axis is not None:
            if axis >= len(shape) or shape[axis] != lengths.longest:
                raise InvalidBundle(
                    f"manifest: signature {kind!r}: got {port.name!r} of shape {shape}, expected the length "
                    f"{lengths.longest} on axis {axis}",
                    code="FN-0316",
                )
            shape = (*shape[:axis], size, *shape[axis + 1 :])
        if own.shape != shape and not port.name.startswith(RANDOM_PREFIXES):
            raise InvalidBundle(f"{what}: got {own.name!r} of shape {own.shape}, expected {shape}", code="FN-0316")
    if kind == "infer" and not set(lengths.axes) - {"y"} <= {port.name for port in longest.inputs}:
        names = [port.name for port in longest.inputs]
        raise InvalidBundle(
            f"manifest: lengths: got axes of {sorted(lengths.axes)}, expected inputs of {names} or 'y'", code="FN-0316"
        )


def check_batch_ports(own: Signature, other: Signature, batched: Collection[str], which: tuple[str, int]) -> None:
    """Raise InvalidBundle unless two train graphs have the same ports except for the batch.

    Args:
        own: The Signature for the Bundle's own batch size.
        other: The Signature for another one.
        batched: Names of the inputs whose first dimension is the batch.
        which: Name and batch size of ``other``.
    """
    name, size = which
    for ports, others in ((own.inputs, other.inputs), (own.outputs, other.outputs)):
        actual, expected = ([(port.name, port.dtype) for port in row] for row in (others, ports))
        if actual != expected:
            raise InvalidBundle(
                f"manifest: signature {name!r}: got the ports {actual}, expected {expected}", code="FN-0316"
            )
        for port, own_port in zip(others, ports, strict=True):
            shape = (size, *own_port.shape[1:]) if own_port.name in batched else own_port.shape
            # The shapes of random numbers follow from the batch in a way that only the graph knows.
            if port.shape != shape and not port.name.startswith(RANDOM_PREFIXES):
                raise InvalidBundle(
                    f"manifest: signature {name!r}: got {port.name!r} of shape {port.shape}, expected {shape}",
                    code="FN-0316",
                )
