"""Lengths of sequences: whether they fit the data of an App, and its rows by length."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fanin.edge.export.app.optimizers.optimizer import Tensors
from fanin.edge.lengths import TARGETS, Lengths
from fanin.protos.errors import UnsupportedModel


def check_lengths(what: str, lengths: object, arrays: Tensors) -> None:
    """Raise UnsupportedModel unless the lengths of an App fit its calibration data.

    Args:
        what: Prefix of error messages.
        lengths: The lengths, or a value of another type.
        arrays: The inputs by name, and the targets, if they are declared.
    """
    if not isinstance(lengths, Lengths):
        raise UnsupportedModel(
            f"{what}: got {lengths!r}, expected Lengths(sizes=(16, 32), axes={{'x': 1}}) of fanin.edge.export",
            code="FN-0740",
        )
    names = [*(name for name in arrays if name != TARGETS), TARGETS]
    if unknown := sorted(lengths.axes.keys() - {*names}):
        raise UnsupportedModel(f"{what}: got axes of {unknown}, expected names of {names}", code="FN-0740")
    for name, axis in lengths.axes.items():
        if name not in arrays:
            continue
        shape = tuple(arrays[name].shape)
        if axis >= len(shape) or shape[axis] != lengths.longest:
            raise UnsupportedModel(
                f"{what}: got {name} of shape {shape}, expected the longest length {lengths.longest} on axis {axis}; "
                "pad the rows to it",
                code="FN-0740",
            )
        padding = lengths.padding[name]
        if not arrays[name].is_floating_point() and (padding % 1 or (padding < 0 and name != TARGETS)):
            raise UnsupportedModel(
                f"{what}: got the padding {padding:g} of {name}, whose values are integers; expected an integer of at "
                "least 0",
                code="FN-0740",
            )


def groups_of(lengths: Lengths | None, arrays: Tensors) -> Iterator[tuple[int, Tensor]]:
    """Yield each length with the indices of its rows (k,); 0 with all rows for an App without lengths.

    Args:
        lengths: The lengths of the App.
        arrays: Its inputs and, if their length counts, the targets ``y``, each (n, ...).

    Raises:
        ValueError: A row is longer than the longest length.
    """
    if lengths is None:
        yield 0, torch.arange(len(next(iter(arrays.values()))))
        return
    sizes = lengths.sizes_of({name: value.numpy() for name, value in arrays.items()})
    for size in lengths.sizes:
        if (sizes == size).any():
            yield size, torch.from_numpy((sizes == size).nonzero()[0])
