"""The manifest: the facts of a Bundle, their JSON form, and how they are checked.

The JSON is read strictly (``rows``), because the bytes are signed as a whole and a reader that skips what it does not
know would run less than was signed.
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

from fanin.edge.bundles.derived import NOTHING, Derived, derived_row, parse_derived
from fanin.edge.bundles.rows import Reader
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

    ``initializer`` is its name in the graph, ``shape`` its shape there. ``parameter`` is the parameter, or the tensor
    derived from some, that it comes from; ``weight`` is the weight whose scales a bias uses ("" elsewhere), quantized
    along ``axis`` of the *parameter* (-1 where it does not apply), or the constant that a frozen weight's scales are.
    The graph holds ``parameter.transpose(permutation)``, or the parameter as it is where that is empty, in the shape of
    the slot. ``input_scale`` is the activation scale that was calibrated (0.0 where it does not apply).

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

    ``num_classes`` is the number of labels (or of tokens), 0 for a model that gives values; ``num_tokens`` that of the
    tokens that it may be given, 0 where x is something else or any number may be; ``slots`` are those of
    the ``infer`` graph in each graph format, and ``derived`` is what they come from besides parameters. ``table`` is
    the layout of the parameters that travel; ``batch_size`` the batch that the ``train`` and ``evaluate`` graphs were
    traced for; ``initial`` names the artifact with the parameters of Version 0.
    """

    name: str
    batch_size: int
    num_classes: int
    table: TensorTable
    signatures: Mapping[str, Signature]
    slots: Mapping[str, tuple[Slot, ...]]
    artifacts: Mapping[str, Artifact]
    initial: str
    derived: Derived = NOTHING
    num_tokens: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.num_classes < 0 or self.num_tokens < 0:
            raise InvalidBundle(
                f"manifest: got batch_size {self.batch_size}, num_classes {self.num_classes} and num_tokens "
                f"{self.num_tokens}, expected at least 1, 0 and 0"
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
        self.derived.shapes(shapes)
        for graph_format, slots in self.slots.items():
            if graph_format not in self.signatures["infer"].graphs:
                raise InvalidBundle(f"manifest: slots in {graph_format!r}, expected only in formats of the infer graph")
            check_slots(slots, shapes, self.derived)
        for graph_format in self.signatures["infer"].graphs:
            if shapes and not self.slots.get(graph_format):
                raise InvalidBundle(
                    f"manifest: got no slots in {graph_format!r}, expected some: it would follow no Version"
                )


def check_slots(slots: tuple[Slot, ...], own: Mapping[str, tuple[int, ...]], derived: Derived = NOTHING) -> None:
    """Slots must agree with the parameters' shapes and with each other, so that they can be filled blindly."""
    shapes = derived.shapes(own)
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
        # Frozen scales have one dimension, that of the channels.
        frozen = 0 if weight in derived.constants and not is_of_weight else None
        if weight and axes.get(weight, frozen) != slot.axis:
            raise InvalidBundle(
                f"manifest: slot {slot.initializer!r}: got axis {slot.axis}, "
                f"expected that of the weight_scale slot of {weight!r}, {axes.get(weight)}"
            )
    scaled = {(slot.weight, slot.input_scale) for slot in slots if slot.kind is SlotKind.BIAS_SCALE}
    for slot in slots:
        if slot.kind is SlotKind.BIAS and (slot.weight, slot.input_scale) not in scaled:
            raise InvalidBundle(f"manifest: slot {slot.initializer!r}: got no bias_scale slot, expected one beside it")
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
        "num_tokens": manifest.num_tokens,
        "parameters": {spec.name: list(spec.shape) for spec in manifest.table.specs},
        "signatures": {
            name: {
                "inputs": [_port_row(port) for port in found.inputs],
                "outputs": [_port_row(port) for port in found.outputs],
                "graphs": dict(found.graphs),
            }
            for name, found in manifest.signatures.items()
        },
        "derived": derived_row(manifest.derived),
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
        return _manifest(Reader(root, "manifest"))
    except InvalidBundle:
        raise
    except (InvalidInput, ValueError) as exc:
        raise InvalidBundle(f"manifest: {exc}") from exc


def _manifest(reader: Reader) -> Manifest:
    reader.only("format name batch_size num_classes num_tokens parameters derived signatures slots artifacts initial")
    parameters = reader.child("parameters")
    return Manifest(
        name=reader.text("name"),
        batch_size=reader.integer("batch_size"),
        num_classes=reader.integer("num_classes"),
        num_tokens=reader.integer("num_tokens"),
        table=TensorTable.of({name: parameters.shape(name) for name in parameters.row}),
        signatures=MappingProxyType({name: _signature(row) for name, row in reader.children("signatures")}),
        slots=MappingProxyType(
            {
                name: tuple(parse_slot(row) for row in slots.rows(name))
                for slots in [reader.child("slots")]
                for name in slots.row
            }
        ),
        artifacts=MappingProxyType({name: _artifact(row) for name, row in reader.children("artifacts")}),
        initial=reader.text("initial"),
        derived=parse_derived(reader.child("derived")),
    )


def _signature(reader: Reader) -> Signature:
    reader.only("inputs outputs graphs")
    graphs = reader.child("graphs")
    return Signature(
        inputs=tuple(_port(row) for row in reader.rows("inputs")),
        outputs=tuple(_port(row) for row in reader.rows("outputs")),
        graphs=MappingProxyType({key: graphs.text(key) for key in graphs.row}),
    )


def _port(reader: Reader) -> Port:
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


def parse_slot(reader: Reader) -> Slot:
    """A slot of its row. Raises InvalidBundle."""
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


def _artifact(reader: Reader) -> Artifact:
    reader.only("sha256 size_bytes chunks")
    chunks = []
    for row in reader.rows("chunks"):
        row.only("sha256 size_bytes url")
        chunks.append(ChunkRef(sha256=row.text("sha256"), size_bytes=row.integer("size_bytes"), url=row.text("url")))
    return Artifact(sha256=reader.text("sha256"), size_bytes=reader.integer("size_bytes"), chunks=tuple(chunks))
