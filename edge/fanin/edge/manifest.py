"""The manifest: the facts of a Bundle, their JSON form, and how they are checked.

The JSON is read strictly: an unknown key, a missing one or a wrong type is refused with its path, because
the bytes are signed as a whole and a reader that skips what it does not know would run less than was signed.
A newer format has a higher format number, and that is said before anything else.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Final

from fanin.edge.tensors import TensorTable
from fanin.protos.chunks import Artifact, ChunkRef
from fanin.protos.errors import InvalidBundle, InvalidInput

FORMAT: Final = 1
DEVICE_SIGNATURES: Final = ("train", "evaluate", "infer")
"""What every Bundle has; a device needs all of them."""
DTYPES: Final = ("float32", "int32", "int8", "uint8")
MIN_INPUT_SCALE: Final = 2.0**-60
"""Activation scales lie between this and its inverse: times any weight's scale they are normal float32 numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One input or output of a graph. A leading dimension of -1 is the batch where it may vary."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One callable graph: its ports, and the artifact that holds it in each graph format."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    graphs: Mapping[str, str]


class SlotKind(StrEnum):
    """What ``edge.quantize`` puts into a slot."""

    WEIGHT = "weight"
    """int8, symmetric, one scale per channel along ``axis``."""
    WEIGHT_SCALE = "weight_scale"
    """float32, the scales of the weight, (channels,)."""
    BIAS = "bias"
    """int32 on the grid input scale x weight scale, (channels,)."""
    BIAS_SCALE = "bias_scale"
    """float32, input scale x weight scale, (channels,)."""
    FLOAT = "float"
    """float32, the parameter as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A place in an ``infer`` graph that a Version fills.

    ``initializer`` is its name in the graph, ``shape`` its shape there. ``parameter`` is the parameter it
    comes from; ``weight`` is the weight whose scales a bias uses ("" elsewhere), quantized along ``axis`` of
    the *parameter* (-1 where it does not apply). The graph holds ``parameter.transpose(permutation)``, or the
    parameter as it is where that is empty, in the shape of the slot. ``input_scale`` is the activation scale that was
    calibrated (0.0 where it does not apply).

    How a slot is filled is its format's way. An ONNX initializer that is one has its data outside the file, so
    that a runtime cannot fold an older Version's numbers into its optimized graph. A TFLite file holds zeros at
    ``offset`` (-1 in ONNX), and a runtime opens a copy of the file with the values there.
    """

    initializer: str
    kind: SlotKind
    parameter: str
    shape: tuple[int, ...]
    weight: str = ""
    axis: int = -1
    permutation: tuple[int, ...] = ()
    input_scale: float = 0.0
    offset: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a Bundle says of itself.

    ``num_classes`` is the number of labels (or of tokens), 0 for a model that gives values; ``slots`` are those of
    the ``infer`` graph in each graph format. ``table`` is the layout of the parameters that travel; ``batch_size``
    the batch that the ``train`` and ``evaluate`` graphs were traced for; ``initial`` names the artifact with the
    parameters of Version 0.
    """

    name: str
    batch_size: int
    num_classes: int
    table: TensorTable
    signatures: Mapping[str, Signature]
    slots: Mapping[str, tuple[Slot, ...]]
    artifacts: Mapping[str, Artifact]
    initial: str

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.num_classes < 0:
            raise InvalidBundle(
                f"manifest: got batch_size {self.batch_size} and num_classes {self.num_classes}, "
                "expected at least 1 and at least 0"
            )
        if lacking := sorted(set(DEVICE_SIGNATURES) - set(self.signatures)):
            raise InvalidBundle(f"manifest: got signatures {sorted(self.signatures)}, expected also {lacking}")
        for name, signature in self.signatures.items():
            for artifact in signature.graphs.values():
                if artifact not in self.artifacts:
                    raise InvalidBundle(
                        f"manifest: signature {name!r} names artifact {artifact!r}, which is not listed"
                    )
        if self.initial not in self.artifacts:
            raise InvalidBundle(f"manifest: initial parameters {self.initial!r} are not among the artifacts")
        shapes = {spec.name: spec.shape for spec in self.table.specs}
        for graph_format, slots in self.slots.items():
            if graph_format not in self.signatures["infer"].graphs:
                raise InvalidBundle(f"manifest: slots in {graph_format!r}, expected only in formats of the infer graph")
            check_slots(slots, shapes)


def check_slots(slots: tuple[Slot, ...], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Slots must agree with the parameters' shapes and with each other, so that they can be filled blindly."""
    axes: dict[str, int] = {}
    for slot in slots:
        what = f"manifest: slot {slot.initializer!r}"
        missing = {slot.parameter, slot.weight} - set(shapes) - {""}
        if missing or not slot.parameter:
            raise InvalidBundle(f"{what} names unknown parameters {sorted(missing)}")
        if slot.kind in (SlotKind.BIAS, SlotKind.BIAS_SCALE):
            agrees = bool(slot.weight) and MIN_INPUT_SCALE <= slot.input_scale <= 1.0 / MIN_INPUT_SCALE
        else:
            agrees = not slot.weight and slot.input_scale == 0.0
        if not agrees:
            raise InvalidBundle(
                f"{what}: got weight {slot.weight!r} and input_scale {slot.input_scale}, expected both in a bias only"
            )
        if slot.kind is SlotKind.WEIGHT_SCALE:
            axes[slot.parameter] = slot.axis
        expected = _slot_shape(slot, shapes)
        # A graph may give a parameter dimensions of 1, or split one for a broadcast: the order of values stays.
        is_whole = slot.kind in (SlotKind.WEIGHT, SlotKind.FLOAT) and slot.offset >= 0
        if slot.shape != expected and not (is_whole and prod(slot.shape) == prod(expected)):
            raise InvalidBundle(f"{what}: got shape {slot.shape}, expected {expected}")
    for slot in slots:
        is_of_weight = slot.kind in (SlotKind.WEIGHT, SlotKind.WEIGHT_SCALE)
        weight = slot.parameter if is_of_weight else slot.weight
        if weight and axes.get(weight) != slot.axis:
            raise InvalidBundle(
                f"manifest: slot {slot.initializer!r}: got axis {slot.axis}, "
                f"expected that of the weight_scale slot of {weight!r}, {axes.get(weight)}"
            )
    spans = sorted(
        (slot.offset, slot.offset + slot_bytes(slot), slot.initializer) for slot in slots if slot.offset >= 0
    )
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise InvalidBundle(f"manifest: slots {name!r} and {other!r} share bytes of the file, expected none to")
    names = [slot.initializer for slot in slots]
    if len(set(names)) != len(names):
        raise InvalidBundle("manifest: two slots name the same initializer")


def slot_bytes(slot: Slot) -> int:
    """How many bytes a slot's value takes."""
    return prod(slot.shape) * (1 if slot.kind is SlotKind.WEIGHT else 4)


def _slot_shape(slot: Slot, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape in the graph that a slot's other facts imply."""
    own = shapes[slot.parameter]
    if slot.permutation:
        if slot.kind not in (SlotKind.WEIGHT, SlotKind.FLOAT) or sorted(slot.permutation) != list(range(len(own))):
            raise InvalidBundle(
                f"manifest: slot {slot.initializer!r}: got permutation {slot.permutation}, "
                f"expected one of {len(own)} dimensions, and of a weight or a float only"
            )
        own = tuple(own[dim] for dim in slot.permutation)
    if slot.kind is SlotKind.FLOAT:
        return own
    channelled = shapes[slot.weight or slot.parameter]
    if not 0 <= slot.axis < len(channelled):
        raise InvalidBundle(
            f"manifest: slot {slot.initializer!r}: got axis {slot.axis}, expected one of {len(channelled)} dimensions"
        )
    if slot.kind is SlotKind.WEIGHT:
        return own
    channels = (channelled[slot.axis],)
    if slot.kind is SlotKind.BIAS and own != channels:
        raise InvalidBundle(
            f"manifest: slot {slot.initializer!r}: got a bias of shape {own}, expected {channels} as its weight has"
        )
    return channels


def dump_manifest(manifest: Manifest) -> bytes:
    """The JSON bytes to sign."""
    row = {
        "format": FORMAT,
        "name": manifest.name,
        "batch_size": manifest.batch_size,
        "num_classes": manifest.num_classes,
        "parameters": {spec.name: list(spec.shape) for spec in manifest.table.specs},
        "signatures": {
            name: {
                "inputs": [_port_row(port) for port in found.inputs],
                "outputs": [_port_row(port) for port in found.outputs],
                "graphs": dict(found.graphs),
            }
            for name, found in manifest.signatures.items()
        },
        "slots": {name: [_slot_row(slot) for slot in slots] for name, slots in manifest.slots.items()},
        "artifacts": {
            name: {
                "sha256": artifact.sha256,
                "size_bytes": artifact.size_bytes,
                "chunks": [
                    {"sha256": ref.sha256, "size_bytes": ref.size_bytes, "url": ref.url} for ref in artifact.chunks
                ],
            }
            for name, artifact in manifest.artifacts.items()
        },
        "initial": manifest.initial,
    }
    return json.dumps(row, indent=1, sort_keys=True).encode() + b"\n"


def parse_manifest(data: bytes) -> Manifest:
    """The facts in a manifest's bytes. Raises InvalidBundle."""
    try:
        root = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise InvalidBundle(f"manifest: not JSON ({exc})") from exc
    if not isinstance(root, dict):
        raise InvalidBundle(f"manifest: got {type(root).__name__}, expected an object")
    if root.get("format") != FORMAT:
        raise InvalidBundle(
            f"manifest: got format {root.get('format')!r}, expected {FORMAT}; "
            "install a fanin that knows this format, or export the Bundle again"
        )
    try:
        return _manifest(_Reader(root, "manifest"))
    except InvalidBundle:
        raise
    except (InvalidInput, ValueError) as exc:
        raise InvalidBundle(f"manifest: {exc}") from exc


def _manifest(reader: "_Reader") -> Manifest:
    reader.only("format name batch_size num_classes parameters signatures slots artifacts initial")
    parameters = reader.child("parameters")
    return Manifest(
        name=reader.text("name"),
        batch_size=reader.integer("batch_size"),
        num_classes=reader.integer("num_classes"),
        table=TensorTable.of({name: parameters.shape(name) for name in parameters.row}),
        signatures=MappingProxyType({name: _signature(row) for name, row in reader.children("signatures")}),
        slots=MappingProxyType(
            {
                name: tuple(_slot(row) for row in slots.rows(name))
                for slots in [reader.child("slots")]
                for name in slots.row
            }
        ),
        artifacts=MappingProxyType({name: _artifact(row) for name, row in reader.children("artifacts")}),
        initial=reader.text("initial"),
    )


def _signature(reader: "_Reader") -> Signature:
    reader.only("inputs outputs graphs")
    graphs = reader.child("graphs")
    return Signature(
        inputs=tuple(_port(row) for row in reader.rows("inputs")),
        outputs=tuple(_port(row) for row in reader.rows("outputs")),
        graphs=MappingProxyType({key: graphs.text(key) for key in graphs.row}),
    )


def _port(reader: "_Reader") -> Port:
    reader.only("name dtype shape")
    port = Port(name=reader.text("name"), dtype=reader.text("dtype"), shape=reader.shape("shape", least=-1))
    if port.dtype not in DTYPES:
        raise InvalidBundle(f"{reader.path}.dtype: got {port.dtype!r}, expected one of {list(DTYPES)}")
    return port


def _port_row(port: Port) -> dict[str, object]:
    return {"name": port.name, "dtype": port.dtype, "shape": list(port.shape)}


def _slot_row(slot: Slot) -> dict[str, object]:
    return {
        "initializer": slot.initializer,
        "kind": slot.kind.value,
        "parameter": slot.parameter,
        "shape": list(slot.shape),
        "weight": slot.weight,
        "axis": slot.axis,
        "permutation": list(slot.permutation),
        "input_scale": slot.input_scale,
        "offset": slot.offset,
    }


def _slot(reader: "_Reader") -> Slot:
    reader.only("initializer kind parameter shape weight axis permutation input_scale offset")
    kind = reader.text("kind")
    if kind not in set(SlotKind):
        raise InvalidBundle(f"{reader.path}.kind: got {kind!r}, expected one of {[str(known) for known in SlotKind]}")
    return Slot(
        initializer=reader.text("initializer"),
        kind=SlotKind(kind),
        parameter=reader.text("parameter"),
        shape=reader.shape("shape"),
        weight=reader.text("weight"),
        axis=reader.integer("axis"),
        permutation=reader.shape("permutation"),
        input_scale=reader.number("input_scale"),
        offset=reader.integer("offset"),
    )


def _artifact(reader: "_Reader") -> Artifact:
    reader.only("sha256 size_bytes chunks")
    chunks = []
    for row in reader.rows("chunks"):
        row.only("sha256 size_bytes url")
        chunks.append(ChunkRef(sha256=row.text("sha256"), size_bytes=row.integer("size_bytes"), url=row.text("url")))
    return Artifact(sha256=reader.text("sha256"), size_bytes=reader.integer("size_bytes"), chunks=tuple(chunks))


class _Reader:
    """One JSON object and its path, read key by key with one clear error each."""

    def __init__(self, row: object, path: str) -> None:
        if not isinstance(row, dict):
            raise InvalidBundle(f"{path}: got {type(row).__name__}, expected an object")
        self.row: dict[str, object] = row
        self.path = path

    def only(self, keys: str) -> None:
        """Refuse unknown and missing keys."""
        if set(self.row) != set(keys.split()):
            raise InvalidBundle(f"{self.path}: got keys {sorted(self.row)}, expected {sorted(keys.split())}")

    def _value(self, key: str, kind: type) -> object:
        value = self.row[key]
        if type(value) is not kind:
            raise InvalidBundle(f"{self.path}.{key}: got {type(value).__name__}, expected {kind.__name__}")
        return value

    def text(self, key: str) -> str:
        return str(self._value(key, str))

    def integer(self, key: str) -> int:
        value = self._value(key, int)
        assert isinstance(value, int)
        return value

    def number(self, key: str) -> float:
        value = self._value(key, float)
        assert isinstance(value, float)
        return value

    def shape(self, key: str, *, least: int = 0) -> tuple[int, ...]:
        value = self._value(key, list)
        assert isinstance(value, list)
        if not all(type(dim) is int and dim >= least for dim in value):
            raise InvalidBundle(f"{self.path}.{key}: got {value!r}, expected integers of at least {least}")
        return tuple(value)

    def child(self, key: str) -> "_Reader":
        return _Reader(self.row[key], f"{self.path}.{key}")

    def children(self, key: str) -> list[tuple[str, "_Reader"]]:
        return [(name, _Reader(row, f"{self.path}.{key}.{name}")) for name, row in self.child(key).row.items()]

    def rows(self, key: str) -> list["_Reader"]:
        value = self._value(key, list)
        assert isinstance(value, list)
        return [_Reader(row, f"{self.path}.{key}[{index}]") for index, row in enumerate(value)]
