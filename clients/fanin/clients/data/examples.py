"""Examples: inputs and targets of a model, checked when they are created."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fanin.edge.runtimes.base import Inputs
from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.edge.tensors import Int64s
from fanin.protos.errors import InvalidInput

KINDS: Final = (np.dtype(np.float32), np.dtype(np.int32))
RAW_KINDS: Final = (*KINDS, np.dtype(np.uint8))
SLICE_VALUES: Final = 1 << 16
"""Values that are checked at once: their copies take half a megabyte, whatever the size of the data."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Examples:
    """Inputs and their targets, at least one example, every value finite.

    Attributes:
        x: Inputs (n, ...): float32, int32 tokens, or uint8 for a Bundle with ``preprocess``.
        y: Targets: labels (n,) int32, next tokens (n, T) int32 with -1 for none, or values (n, ...) float32.

    Raises:
        ValueError: Shapes, types or values differ from this.
    """

    x: Inputs
    y: Inputs

    def __post_init__(self) -> None:
        fault = shape_fault(self.x, self.y)
        if fault is None and (self.x.dtype not in RAW_KINDS or self.y.dtype not in KINDS):
            fault = f"got x {self.x.dtype} and y {self.y.dtype}, expected float32 or int32 (or x uint8)"
        fault = fault or value_fault(self.x, self.y)
        if fault is not None:
            raise ValueError(f"examples: {fault}")

    def __len__(self) -> int:
        return len(self.y)

    def take(self, indices: Int64s) -> "Examples":
        """Return the examples at these indices, in this order."""
        return Examples(x=self.x[indices], y=self.y[indices])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """Disjoint parts of a data set: ``public`` for the datacenter, ``test``, and one part for each device."""

    public: Examples
    test: Examples
    devices: tuple[Examples, ...]


def check_examples(examples: Examples, input_shape: tuple[int, ...], num_classes: int) -> None:
    """Raise InvalidInput unless a model with these inputs and classes (0: values) can use the examples."""
    if examples.x.shape[1:] != input_shape:
        raise InvalidInput(f"examples: got inputs of shape {examples.x.shape[1:]}, expected {input_shape}")
    if examples.x.dtype == np.uint8:
        raise InvalidInput("examples: got x of uint8, expected floats, scaled as the model wants them, or int32 tokens")
    if bool(num_classes) == (examples.y.dtype == np.float32):
        expected = f"int32 labels below {num_classes}" if num_classes else "float32 values"
        raise InvalidInput(f"examples: got y of {examples.y.dtype}, expected {expected}")
    if num_classes and examples.y.max() >= num_classes:
        raise InvalidInput(f"examples: got label {examples.y.max()}, expected 0 to {num_classes - 1}")


def shape_fault(x: npt.NDArray[np.generic], y: npt.NDArray[np.generic]) -> str | None:
    """Return the fault in the shapes of these arrays; None if there is none."""
    if y.ndim < 1 or x.ndim < 2:
        return f"got x {x.shape} and y {y.shape}, expected (n, ...) and (n,)"
    if len(x) != len(y):
        return f"got {len(x)} inputs and {len(y)} labels, expected as many of one as of the other"
    if len(x) == 0 or x.size == 0 or y.size == 0:
        return f"got no examples (x {x.shape}, y {y.shape}), expected at least one"
    return None


def value_fault(x: npt.NDArray[np.generic], y: npt.NDArray[np.generic]) -> str | None:
    """Return the fault in the values of these arrays; None if there is none. Only floats can be NaN or infinite."""
    for name, array in (("x", x), ("y", y)):
        if array.dtype.kind == "f":
            bad = _num_not_finite(array)
            if bad:
                return f"got {bad} values of {name} that are not finite float32 numbers, expected none"
            continue
        least = NO_TOKEN if name == "y" and y.ndim > 1 else 0
        if array.min() < least or array.max() > np.iinfo(np.int32).max:
            what = "labels" if name == "y" else "tokens"
            return f"got {what} from {array.min()} to {array.max()}, expected {least} to {np.iinfo(np.int32).max}"
    return None


def _num_not_finite(array: npt.NDArray[np.generic]) -> int:
    """Count the floats that are not finite as float32. Slices avoid a copy of all data."""
    with (
        np.errstate(over="ignore"),
        np.nditer(
            [array],
            flags=["external_loop", "buffered", "zerosize_ok"],
            op_dtypes=[np.dtype(np.float32)],
            casting="same_kind",
            buffersize=SLICE_VALUES,
        ) as slices,
    ):
        return sum(len(part) - int(np.count_nonzero(np.isfinite(part))) for part in slices)
