"""Test vectors of the int8 slots: what a Version writes into an ``infer`` graph. Their arithmetic is in fleet.proto.

    python tests/golden/slots.py

writes ``slots.json``: a list of cases, each with

    name          what it shows
    parameters    {NAME: {"shape": [dim, ..], "values": [number, ..]}} in C order; each number is a float32 value
    derived       as in a manifest
    slots         as one format in a manifest
    activations   as in a manifest
    ranges        low and high of each activation in a Version; null for those of the manifest
    folded        {NAME: hex of its float32 values}
    values        {INITIALIZER: {"dtype", "shape", "data": hex}}: what the slots hold

All bytes are little-endian and in C order. A change there changes every int8 model that devices run.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from fanin.edge.bundles.derived import NOTHING, Derived, FoldedTensor, derived_row
from fanin.edge.bundles.manifest_json import activation_row, slot_row
from fanin.edge.bundles.quantize import fill_slots, with_derived
from fanin.edge.bundles.slots import Slot, SlotKind, check_slots
from fanin.edge.ranges import Activation, grids_of
from fanin.edge.tensors import Float32s, TensorTable

FILE: Final = Path(__file__).with_name("slots.json")
LARGEST: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One vector."""

    name: str
    parameters: Mapping[str, Float32s]
    slots: Sequence[Slot]
    derived: Derived = NOTHING
    activations: tuple[Activation, ...] = ()
    ranges: Float32s | None = None


def layer(
    weight: str, bias: str, shape: tuple[int, ...], *, axis: int = 0, permutation: tuple[int, ...] = ()
) -> tuple[Slot, ...]:
    """Return the slots of a layer: its weight, the scales, and a bias for the input scale 0.0625."""
    inside = tuple(shape[dim] for dim in permutation) or shape
    own = {"weight": weight, "axis": axis, "shape": (shape[axis],), "input_scale": 0.0625}
    return (
        Slot(initializer="w", kind=SlotKind.WEIGHT, parameter=weight, shape=inside, axis=axis, permutation=permutation),
        Slot(initializer="ws", kind=SlotKind.WEIGHT_SCALE, parameter=weight, shape=(shape[axis],), axis=axis),
        Slot(initializer="b", kind=SlotKind.BIAS, parameter=bias, **own),
        Slot(initializer="bs", kind=SlotKind.BIAS_SCALE, parameter=bias, **own),
    )


def refreshed() -> tuple[Slot, ...]:
    """Return the slots of a layer whose input is the activation ``a``, and of the grids of four activations."""
    of_a = {"input_scale": 0.0, "activation": "a"}
    own = tuple(replace(slot, **of_a) if slot.initializer in ("b", "bs") else slot for slot in layer("w", "b", (3, 2)))
    kinds = ((SlotKind.ACTIVATION_SCALE, ()), (SlotKind.ZERO_POINT, ()), (SlotKind.ZERO_POINT64, (1,)))
    return (
        *own,
        *(
            Slot(initializer=f"{name}.{kind}", kind=kind, parameter="", shape=shape, activation=name)
            for name in "abcd"
            for kind, shape in kinds
        ),
    )


def array(*values: float, shape: tuple[int, ...] = (-1,)) -> Float32s:
    """Return float32 values in a shape."""
    return np.array(values, np.float32).reshape(shape)


def cases() -> tuple[Case, ...]:
    """Return all vectors."""
    dense = array(*(0.1 * index - 0.55 for index in range(12)), shape=(4, 3))
    # 0.5, 1.5, 2.5 and -2.5 codes: ties go to the even number.
    ties = array(127.0, 0.5, 1.5, 2.5, -2.5, -127.0, shape=(1, 6))
    folding = FoldedTensor(
        value="w", axis=0, mean="mean", gain="gain", variance="variance", epsilon=0.001, offset="offset"
    )
    batch_norm = {
        "w": array(0.3, -0.2, 0.1, 0.7, -0.9, 0.05, shape=(3, 2)),
        "mean": array(0.1, -0.2, 0.3),
        "gain": array(1.5, -0.5, 2.0),
        "offset": array(0.25, 0.5, -0.75),
        # The mean over devices is rounded, so a small variance can become negative.
        "variance": array(0.8, 0.01, -0.0000001),
    }
    folded = {
        "w:folded": FoldedTensor(value="w", axis=0, gain="gain", variance="variance", epsilon=0.001),
        "b:folded": FoldedTensor(mean="mean", gain="gain", variance="variance", epsilon=0.001, offset="offset"),
        "all": folding,
    }
    activations = tuple(
        Activation(name=name, graph_format="onnx", low=low, high=high)
        for name, low, high in (("a", -1.0, 1.0), ("b", 0.0, 6.0), ("c", -3.5, 0.0), ("d", 0.0, 0.0))
    )
    quantized = {"w": array(0.3, -0.2, 0.1, 0.7, -0.9, 0.05, shape=(3, 2)), "b": array(1.0, -0.3, 25.0)}
    frozen = Derived(constants={"scales": np.array([0.5, 0.0], "<f4").tobytes()})
    return (
        Case(
            name="a dense layer whose weight is transposed in the graph, and a float",
            parameters={"w": dense, "b": array(1.0, -0.3, 0.0), "gain": array(2.5, shape=())},
            slots=(
                *layer("w", "b", (4, 3), axis=1, permutation=(1, 0)),
                Slot(initializer="g", kind=SlotKind.FLOAT, parameter="gain", shape=()),
                Slot(initializer="wt", kind=SlotKind.FLOAT, parameter="w", shape=(3, 4), permutation=(1, 0)),
            ),
        ),
        Case(name="ties", parameters={"w": ties, "b": array(0.15625)}, slots=layer("w", "b", (1, 6))),
        Case(
            name="a channel of zeros, one whose scale grows for its bias, and one at the end of float32",
            parameters={
                "w": array(0.0, 0.0, 1e-12, -1e-12, LARGEST, -LARGEST, shape=(3, 2)),
                "b": array(0.0, 12.5, LARGEST),
            },
            slots=layer("w", "b", (3, 2)),
        ),
        Case(
            name="a BatchNorm folded into the layer before it",
            parameters=batch_norm,
            derived=Derived(folded=folded),
            slots=(
                *layer("w:folded", "b:folded", (3, 2)),
                Slot(initializer="f", kind=SlotKind.FLOAT, parameter="all", shape=(3, 2)),
            ),
        ),
        Case(
            name="a layer whose input is an activation, with the ranges of the export",
            parameters=quantized,
            slots=refreshed(),
            activations=activations,
        ),
        Case(
            name="the same layer with the ranges of a Version: one in the middle of a step, and small ones",
            parameters=quantized,
            slots=refreshed(),
            activations=activations,
            ranges=array(-0.3, 2.7, 0.0, 1e-30, -0.00001, 0.000002, -127.5, 127.5),
        ),
        Case(
            name="the same layer with ranges at the end of float32",
            parameters=quantized,
            slots=refreshed(),
            activations=activations,
            ranges=array(-0.3, 2.7, -LARGEST, LARGEST, 0.0, 0.0, -127.5, 127.5),
        ),
        Case(
            name="the bias of a frozen weight, whose scales are a constant",
            parameters={"b": array(3.0, -7.0)},
            derived=frozen,
            slots=(
                Slot(
                    initializer="b",
                    kind=SlotKind.BIAS,
                    parameter="b",
                    shape=(2,),
                    weight="scales",
                    axis=0,
                    input_scale=0.3,
                ),
                Slot(
                    initializer="bs",
                    kind=SlotKind.BIAS_SCALE,
                    parameter="b",
                    shape=(2,),
                    weight="scales",
                    axis=0,
                    input_scale=0.3,
                ),
            ),
        ),
    )


def row_of(case: Case) -> dict[str, object]:
    """Return the JSON form of a case, computed by the code of devices."""
    shapes = {name: value.shape for name, value in case.parameters.items()}
    check_slots(tuple(case.slots), shapes, case.derived, [row.name for row in case.activations])
    table = TensorTable.of(shapes)
    flat = table.flatten(case.parameters)
    sources = with_derived(table.views(flat), case.derived)
    values = fill_slots(case.slots, table, flat, case.derived, grids_of(case.activations, case.ranges))
    return {
        "name": case.name,
        "parameters": {
            name: {"shape": list(value.shape), "values": [float(number) for number in value.reshape(-1)]}
            for name, value in case.parameters.items()
        },
        "derived": derived_row(case.derived),
        "slots": [slot_row(slot) for slot in case.slots],
        "activations": [activation_row(row) for row in case.activations],
        "ranges": None if case.ranges is None else [float(bound) for bound in case.ranges],
        "folded": {name: sources[name].astype("<f4").tobytes().hex() for name in case.derived.folded},
        "values": {
            name: {
                "dtype": value.dtype.name,
                "shape": list(value.shape),
                "data": value.astype(value.dtype.newbyteorder("<")).tobytes().hex(),
            }
            for name, value in values.items()
        },
    }


def text() -> str:
    """Return the content of the file."""
    return json.dumps([row_of(case) for case in cases()], indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
