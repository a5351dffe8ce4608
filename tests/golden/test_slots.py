"""The vectors of the int8 slots: the committed file, the code of devices, and an implementation of fleet.proto's words.

``Words`` computes with Python's numbers, one value at a time. It shares no arithmetic with the code of devices.
"""

import base64
import json
import math
import struct
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, Final

import pytest
from golden import slots

HINT = "if this is meant, run `python tests/golden/slots.py` and say in CHANGELOG.md which int8 models change"
CASES: Final = json.loads(slots.FILE.read_text())
MAX: Final = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
CODES: Final = {"int8": "b", "int32": "i", "int64": "q", "float32": "f"}
OF_ACTIVATION: Final = {"activation_scale": "float32", "zero_point": "int8", "zero_point64": "int64"}


def test_the_file_is_what_the_code_of_devices_computes() -> None:
    assert slots.FILE.read_text() == slots.text(), HINT


def f32(value: float) -> float:
    """Round to float32."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def clip(value: float, low: float, high: float) -> float:
    """Limit a value."""
    return min(max(value, low), high)


class Words:
    """What fleet.proto says under SLOTS. A source is a dictionary of values by index."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.grids = dict(grids(case))
        self.slots = [
            slot | {"input_scale": self.grids[slot["activation"]][0]}
            if slot["activation"] and slot["kind"] in ("bias", "bias_scale")
            else slot
            for slot in case["slots"]
        ]
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.sources: dict[str, dict[tuple[int, ...], float]] = {}
        for name, tensor in case["parameters"].items():
            self._add(name, tuple(tensor["shape"]), tensor["values"])
        self.constants = case["derived"]["constants"]
        for name, text in self.constants.items():
            data = base64.b64decode(text)
            self._add(name, (len(data) // 4,), struct.unpack(f"<{len(data) // 4}f", data))
        for name, fields in case["derived"]["folded"].items():
            self._fold(name, **fields)

    def _add(self, name: str, shape: tuple[int, ...], values: Sequence[float]) -> None:
        self.shapes[name] = shape
        self.sources[name] = dict(zip(indices(shape), values, strict=True))

    def _fold(self, name: str, **fields: Any) -> None:
        shape, axis = self.shapes[fields["value"] or fields["variance"]], fields["axis"]

        def at(field: str, index: tuple[int, ...], default: float) -> float:
            return self.sources[fields[field]][index] if fields[field] else default

        values = []
        for index in indices(shape):
            k = (index[axis],)
            deviation = math.sqrt(max(at("variance", k, 0.0), 0.0) + fields["epsilon"])
            factor = at("gain", k, 1.0) / deviation
            value = (at("value", index, 0.0) - at("mean", k, 0.0)) * factor + at("offset", k, 0.0)
            values.append(f32(clip(value, -MAX, MAX)))
        self._add(name, shape, values)

    def scales(self, name: str) -> list[float]:
        """Return s_k."""
        if name in self.constants:
            return [max(value, 2.0**-64) for value in self.sources[name].values()]
        (axis,) = {each["axis"] for each in self.slots if (each["kind"], each["parameter"]) == ("weight_scale", name)}
        return [self._scale(name, axis, k) for k in range(self.shapes[name][axis])]

    def _scale(self, name: str, axis: int, k: int) -> float:
        largest = max(abs(value) for index, value in self.sources[name].items() if index[axis] == k)
        r = max(
            [
                abs(self.sources[slot["parameter"]][k,]) / (slot["input_scale"] * 2.0**30)
                for slot in self.slots
                if slot["kind"] == "bias" and slot["weight"] == name
            ],
            default=0.0,
        )
        return f32(clip(max(largest / 127, r), 2.0**-64, MAX))

    def value(self, slot: dict[str, Any]) -> tuple[str, list[float]]:
        """Return the element type and the values of a slot, in C order."""
        name, kind = slot["parameter"], slot["kind"]
        if kind in OF_ACTIVATION:
            return OF_ACTIVATION[kind], [self.grids[slot["activation"]][kind != "activation_scale"]]
        source = self.sources[name]
        if kind == "float":
            return "float32", self._permuted(slot, source)
        scales = self.scales(slot["weight"] or name)
        if kind == "weight_scale":
            return "float32", scales
        if kind == "weight":
            codes = {
                index: clip(rint(value / scales[index[slot["axis"]]]), -127, 127) for index, value in source.items()
            }
            return "int8", self._permuted(slot, codes)
        steps = [f32(min(scale * slot["input_scale"], MAX)) for scale in scales]
        if kind == "bias_scale":
            return "float32", steps
        return "int32", [clip(rint(source[k,] / step), -2147483647, 2147483647) for k, step in enumerate(steps)]

    def _permuted(self, slot: dict[str, Any], values: dict[tuple[int, ...], float]) -> list[float]:
        shape = self.shapes[slot["parameter"]]
        order = slot["permutation"] or range(len(shape))
        return [
            values[tuple(index[list(order).index(axis)] for axis in range(len(shape)))]
            for index in indices(tuple(shape[axis] for axis in order))
        ]


def grids(case: dict[str, Any]) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield the scale and the zero point of each activation."""
    rows, bounds = case["activations"], case["ranges"]
    spans = [
        (row["low"], row["high"]) if bounds is None else tuple(bounds[2 * index :][:2])
        for index, row in enumerate(rows)
    ]
    steps = [min((high - low) / 255, 2.0**60) for low, high in spans]
    for row, (low, _), q in zip(rows, spans, steps, strict=True):
        others = (step for other, step in zip(rows, steps, strict=True) if other["graph_format"] == row["graph_format"])
        least = max(others) / 2.0**18
        if q < 2.0**-60:
            yield row["name"], (f32(max(1.0, least)), 0.0)
        else:
            step = max(q, least)
            yield row["name"], (f32(step), clip(rint(-128 - low / step), -128, 127))


def indices(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield all indices in C order."""
    return product(*map(range, shape))


def rint(value: float) -> float:
    """Round to an integer, ties to even. Beyond 2^53 all numbers are integers."""
    return float(round(value))


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_words_of_the_protocol_give_the_same_bytes(case: dict[str, Any]) -> None:
    words = Words(case)
    for name, data in case["folded"].items():
        values = list(words.sources[name].values())
        assert struct.pack(f"<{len(values)}f", *values).hex() == data, name
    assert {slot["initializer"] for slot in case["slots"]} == set(case["values"])
    for slot in words.slots:
        dtype, values = words.value(slot)
        expected = case["values"][slot["initializer"]]
        assert (dtype, math.prod(expected["shape"])) == (expected["dtype"], len(values))
        numbers = values if dtype == "float32" else [int(value) for value in values]
        assert struct.pack(f"<{len(numbers)}{CODES[dtype]}", *numbers).hex() == expected["data"], slot["initializer"]


def test_the_cases_reach_every_kind_and_every_limit() -> None:
    kinds = {slot["kind"] for case in CASES for slot in case["slots"]}
    assert kinds == {"weight", "weight_scale", "bias", "bias_scale", "float", *OF_ACTIVATION}
    limits = next(case["values"] for case in CASES if "zeros" in case["name"])
    assert struct.unpack("<3f", bytes.fromhex(limits["ws"]["data"]))[0] == 2.0**-64
    _, grown, largest = struct.unpack("<3i", bytes.fromhex(limits["b"]["data"]))
    # The bias takes half of int32, up to the rounding of the scale to float32.
    assert grown == pytest.approx(2**30, rel=1e-6)
    assert 0 < largest < 2**31
