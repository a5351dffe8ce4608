"""The graph formats as files: the functions that fill their slots from a Version and that detect slots in an assembly.

``FILE_FORMATS`` has one record for each format, for devices and assemblies. It needs neither torch nor onnx. The export
has a separate record for each format (``fanin.edge.export.formats.graphs``), because its functions need torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import PurePath
from types import MappingProxyType
from typing import Final

import numpy as np

from fanin.edge.bundles.initializers import (
    GraphNode,
    empty_constants,
    fill_constants,
    list_constants,
    list_nodes,
    without_grids,
)
from fanin.edge.bundles.quantize import SlotValue
from fanin.edge.bundles.slots import Slot, SlotKind
from fanin.edge.tensors import Float32s
from fanin.protos.errors import InvalidBundle, InvalidInput

ALIGNMENT: Final = 4
Slots = tuple[Slot, ...]
Extremes = Mapping[str, tuple[str, str]]
"""The outputs with the lowest and the highest value of each activation, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """One graph format as files. The last argument of each function is the prefix of error messages.

    Attributes:
        suffix: Extension of the files.
        has_signatures: Whether one file may have several Signatures.
        fill_slots: (file, slots, values by initializer, prefix) -> a copy of the file with the values in its slots.
        empty_slots: (file, slots, prefix) -> a copy of the file for a Bundle, without the values of its slots.
        find_slots: (file, parameters, prefix) -> a float slot for each parameter.
        check_slots: (file, slots, prefix): compares listed slots with the file.
        measuring: (file of ``infer``, slots, prefix) -> a file that computes the activations in float, and two outputs
            of each: with its lowest and with its highest value. Its Signature is ``RANGES`` if the format has
            Signatures.
        list_nodes: (file, prefix) -> the operators of the file; None if the format has no reader of them.
    """

    suffix: str
    has_signatures: bool
    fill_slots: Callable[[bytes, Sequence[Slot], Mapping[str, SlotValue], str], bytes]
    empty_slots: Callable[[bytes, Slots, str], bytes]
    find_slots: Callable[[bytes, Mapping[str, Float32s], str], Slots]
    check_slots: Callable[[bytes, Slots, str], None]
    measuring: Callable[[bytes, Slots, str], tuple[bytes, Extremes]]
    list_nodes: Callable[[bytes, str], list[GraphNode]] | None = None


def file_format(name: str) -> FileFormat:
    """Return the record of a format. Raises InvalidBundle for an unknown one."""
    if name not in FILE_FORMATS:
        raise InvalidBundle(f"graph format: got {name!r}, expected one of {sorted(FILE_FORMATS)}", code="FN-0325")
    return FILE_FORMATS[name]


def format_of(name: str) -> str:
    """Return the graph format of a file by its extension. Raises InvalidInput for an unknown one."""
    suffixes = {row.suffix: graph_format for graph_format, row in FILE_FORMATS.items()}
    graph_format = suffixes.get(PurePath(name).suffix.lower())
    if graph_format is None:
        raise InvalidInput(
            f"{name}: got a file of unknown format, expected one that ends in {sorted(suffixes)}", code="FN-0325"
        )
    return graph_format


def _fill_constants(data: bytes, slots: Sequence[Slot], values: Mapping[str, SlotValue], what: str) -> bytes:
    return fill_constants(data, values, what) if values else data


def _empty_constants(data: bytes, slots: Slots, what: str) -> bytes:
    return empty_constants(data, [slot.initializer for slot in slots], what)


def _slots_by_name(data: bytes, parameters: Mapping[str, Float32s], what: str) -> Slots:
    return tuple(
        Slot(initializer=name, kind=SlotKind.FLOAT, parameter=name, shape=value.shape)
        for name, value in parameters.items()
    )


def _check_constants(data: bytes, slots: Slots, what: str) -> None:
    """Raise InvalidBundle unless the file has a constant of the right type and shape for each slot."""
    constants = list_constants(data, what)
    for slot in slots:
        constant = constants.get(slot.initializer)
        if constant is None or (constant.dtype, constant.shape) != (slot.dtype, slot.shape):
            form = "none" if constant is None else f"{constant.dtype or 'another type'} {constant.shape}"
            raise InvalidBundle(
                f"{what}: constant {slot.initializer!r}: got {form}, expected {slot.dtype} {slot.shape}, "
                "which a Version fills; rename the constant, or list the graph's slots",
                code="FN-0335",
            )


def _without_grids(data: bytes, slots: Slots, what: str) -> tuple[bytes, Extremes]:
    """Return the file without the grids of its activations. Weights keep theirs, which hardly changes the ranges."""
    return without_grids(data, {slot.initializer: slot.activation for slot in _scales(slots)}, what)


def _own_signature(data: bytes, slots: Slots, what: str) -> tuple[bytes, Extremes]:
    """Return the file itself: it has a float graph whose outputs have the names of the activations."""
    return data, {slot.activation: (slot.activation, slot.activation) for slot in _scales(slots)}


def _scales(slots: Slots) -> list[Slot]:
    return [slot for slot in slots if slot.kind is SlotKind.ACTIVATION_SCALE]


def fill_offsets(data: bytes, slots: Sequence[Slot], values: Mapping[str, SlotValue], what: str) -> bytes:
    """Return a copy of a file with the slots' values written at their offsets.

    Args:
        data: The file of the ``infer`` graph.
        slots: Its slots.
        values: Their values by initializer.
        what: Prefix of error messages.

    Raises:
        InvalidBundle: A slot is outside the file.
    """
    if not slots:
        return data
    filled = np.frombuffer(data, np.uint8).copy()
    for slot in slots:
        value = values[slot.initializer]
        row = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"), copy=False)
        end = slot.offset + row.nbytes
        if slot.offset < 0 or end > len(data):
            raise InvalidBundle(
                f"{what}: slot {slot.initializer!r} has the bytes {slot.offset} to {end}, "
                f"expected a range within the file's {len(data)}",
                code="FN-0321",
            )
        filled[slot.offset : end] = row.reshape(-1).view(np.uint8)
    return filled.tobytes()


def _slots_by_value(data: bytes, parameters: Mapping[str, Float32s], what: str) -> Slots:
    return tuple(_slot_at(name, value, data, what) for name, value in parameters.items())


def _slot_at(name: str, value: Float32s, data: bytes, what: str) -> Slot:
    """Return the slot at the only position of a parameter's values in a file, in any order of its dimensions.

    Raises:
        InvalidBundle: The values occur at no position, or at several.
    """
    # Orders of dimensions that give the same sequence of values count once.
    rows: dict[bytes, tuple[int, ...]] = {}
    for order in permutations(range(value.ndim)):
        rows.setdefault(value.transpose(order).astype("<f4").tobytes(), order)
    matches = [(offset, order) for row, order in rows.items() for offset in _offsets(row, data)]
    if len(matches) != 1:
        raise InvalidBundle(
            f"{what}: the values of {name!r} occur at {len(matches)} positions in the file, expected one; export the "
            "model with unique values (not all zeros), or list the slot with its offset",
            code="FN-0335",
        )
    ((offset, order),) = matches
    shape = tuple(value.shape[dim] for dim in order)
    permutation = () if order == tuple(range(value.ndim)) else order
    return Slot(
        initializer=name, kind=SlotKind.FLOAT, parameter=name, shape=shape, permutation=permutation, offset=offset
    )


def _offsets(row: bytes, data: bytes) -> list[int]:
    """Return the aligned positions of a sequence of float32 values in a file."""
    offsets, offset = [], data.find(row)
    while offset >= 0:
        if offset % ALIGNMENT == 0:
            offsets.append(offset)
        offset = data.find(row, offset + 1)
    return offsets


def _same_file(data: bytes, slots: Slots, what: str) -> bytes:
    return data


def _check_nothing(data: bytes, slots: Slots, what: str) -> None:
    """Accept any slots: a TFLite file does not name its constants, and ``fill_offsets`` checks the offsets."""


FILE_FORMATS: Final[Mapping[str, FileFormat]] = MappingProxyType(
    {
        "onnx": FileFormat(
            suffix=".onnx",
            has_signatures=False,
            fill_slots=_fill_constants,
            empty_slots=_empty_constants,
            find_slots=_slots_by_name,
            check_slots=_check_constants,
            measuring=_without_grids,
            list_nodes=list_nodes,
        ),
        "tflite": FileFormat(
            suffix=".tflite",
            has_signatures=True,
            fill_slots=fill_offsets,
            empty_slots=_same_file,
            find_slots=_slots_by_value,
            check_slots=_check_nothing,
            measuring=_own_signature,
        ),
    }
)
"""The graph formats by name."""
