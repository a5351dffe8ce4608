"""Sequences of any length: one or a few lengths, each with its own graphs, and padding up to the next one.

A graph has fixed shapes. A model with ``Lengths`` has the graphs ``train``, ``evaluate`` and ``infer`` for each length.
All of them have one set of parameters. The length of a row is the position after the last one that is not padding, in
any of its arrays. So padding at the end of a row never changes its length. The data have the same form as for a model
without ``Lengths``. A row belongs to the smallest length that holds it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from fanin.edge.tensors import Int64s
from fanin.protos.errors import InvalidInput

MAX_LENGTHS: Final = 4
"""Each length has its own graphs, which a device stores and opens."""
TARGETS: Final = "y"
SLICE_ROWS: Final = 1024
"""Rows that are compared with the padding at once: the comparison of all rows would take a quarter of their memory."""
Values = TypeVar("Values", bound=npt.NDArray[np.generic])


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The lengths of a model's sequences.

    Args:
        sizes: The lengths, ascending, 1 to ``MAX_LENGTHS`` of them.
        axes: The axis of the length, at least 1, by the name of an input; ``y`` if each position has a target.
        padding: The value of positions after the end of a row, by the name of an input or ``y``. By default 0, and -1
            for ``y``.

    Raises:
        InvalidInput: A value differs from this.

    Example:
        ``Lengths(sizes=(16, 32, 64), axes={"ids": 1, "attention_mask": 1})``
    """

    sizes: Sequence[int]
    axes: Mapping[str, int]
    padding: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _are_lengths(self.sizes):
            raise InvalidInput(
                f"lengths: sizes: got {self.sizes!r}, expected 1 to {MAX_LENGTHS} different integers of at least 1, in "
                "ascending order, such as (16, 32)",
                code="FN-0395",
            )
        if not _are_axes(self.axes):
            raise InvalidInput(
                f"lengths: axes: got {self.axes!r}, expected the axis of the length, an integer of at least 1, by "
                "the name of an input, such as {'x': 1}; axis 0 is that of the samples",
                code="FN-0395",
            )
        if not _are_paddings(self.padding, self.axes):
            raise InvalidInput(
                f"lengths: padding: got {self.padding!r}, expected finite numbers by the names of axes: "
                f"{sorted(self.axes)}",
                code="FN-0395",
            )
        padding = {name: -1.0 if name == TARGETS else 0.0 for name in self.axes} | {
            name: float(value) for name, value in self.padding.items()
        }
        object.__setattr__(self, "sizes", tuple(self.sizes))
        object.__setattr__(self, "axes", MappingProxyType(dict(self.axes)))
        object.__setattr__(self, "padding", MappingProxyType(padding))

    @property
    def longest(self) -> int:
        """The largest length, whose graphs have the names of those of a model without lengths."""
        return self.sizes[-1]

    @property
    def shorter(self) -> tuple[int, ...]:
        """All lengths but the longest."""
        return tuple(self.sizes[:-1])

    def signature(self, kind: str, size: int) -> str:
        """Return the name of a Signature for one length, such as ``train@16``; ``train`` for the longest."""
        return kind if size == self.longest else f"{kind}@{size}"

    def holding(self, num: int) -> int:
        """Return the smallest length that holds ``num`` positions; 0 if none does."""
        return next((size for size in self.sizes if size >= num), 0)

    def row_lengths(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> Int64s:
        """Return the length of each row (n,).

        Args:
            arrays: Inputs (n, ...) by name, and ``y`` if its length counts.

        Raises:
            ValueError: An array lacks the axis.
        """
        lengths = np.zeros(len(next(iter(arrays.values()))), np.int64)
        for name, axis in self.axes.items():
            if name not in arrays:
                continue
            array = arrays[name]
            if array.ndim <= axis:
                raise ValueError(f"{name}: got {array.shape}, expected the length as axis {axis}")
            for start in range(0, len(array), SLICE_ROWS):
                rows = np.moveaxis(array[start : start + SLICE_ROWS], axis, 1)
                is_used = (rows != self.padding[name]).any(axis=tuple(range(2, rows.ndim)))
                positions = np.arange(1, is_used.shape[1] + 1)
                ends = np.max(is_used * positions, axis=1, initial=0)
                lengths[start : start + SLICE_ROWS] = np.maximum(lengths[start : start + SLICE_ROWS], ends)
        return lengths

    def sizes_of(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> Int64s:
        """Return the smallest length that holds each row (n,).

        Raises:
            ValueError: A row is longer than the longest length.
        """
        lengths = self.row_lengths(arrays)
        if len(lengths) and lengths.max() > self.longest:
            row = int(np.argmax(lengths > self.longest))
            raise ValueError(
                f"row {row}: got the length {lengths[row]}, expected at most {self.longest}, the longest of the "
                f"model's lengths {list(self.sizes)}; cut the row, or export the App with a longer one"
            )
        return np.array(self.sizes)[np.searchsorted(self.sizes, lengths)]

    def shape_like(self, name: str, expected: Sequence[int], actual: Sequence[int]) -> tuple[int, ...]:
        """Return the expected shape (n, ...) of an array, with the length of its actual shape."""
        axis = self.axes.get(name)
        if axis is None or len(actual) != len(expected):
            return tuple(expected)
        return (*expected[:axis], actual[axis], *expected[axis + 1 :])

    def fit(self, name: str, array: Values, size: int) -> Values:
        """Return an array (n, ...) with a length: cut, or padded at the end. An array without a length is returned."""
        axis = self.axes.get(name)
        if axis is None or array.shape[axis] == size:
            return array
        if array.shape[axis] > size:
            cut: Values = array[(*(slice(None) for _ in range(axis)), slice(size))]  # type: ignore[assignment]
            return cut
        widths = [(0, size - array.shape[axis] if dim == axis else 0) for dim in range(array.ndim)]
        padded: Values = np.pad(array, widths, constant_values=array.dtype.type(self.padding[name]))  # type: ignore[assignment]
        return padded


def _are_lengths(sizes: object) -> bool:
    if not isinstance(sizes, Sequence) or isinstance(sizes, bytes):
        return False
    if not all(type(size) is int and size >= 1 for size in sizes):
        return False
    return 1 <= len(sizes) <= MAX_LENGTHS and all(a < b for a, b in pairwise(sizes))


def _are_axes(axes: object) -> bool:
    if not isinstance(axes, Mapping) or not all(isinstance(name, str) for name in axes):
        return False
    return bool(axes.keys() - {TARGETS}) and all(type(axis) is int and axis >= 1 for axis in axes.values())


def _are_paddings(padding: object, axes: Mapping[str, int]) -> bool:
    """Return whether these are finite numbers by names of axes."""
    if not isinstance(padding, Mapping) or not padding.keys() <= axes.keys():
        return False
    return all(isinstance(value, int | float | np.number) and np.isfinite(value) for value in padding.values())
