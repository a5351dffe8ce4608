"""Slots: the places in an ``infer`` graph that a Version fills, and the checks that make filling them safe.

The manifest lists the slots of each graph format. ``quantize.fill_slots`` computes their values and a runtime puts them
into the graph. Neither checks a slot again: slots that passed ``check_slots`` agree with the parameters' shapes, with
the activations and with each other.

The two formats are filled differently. An ONNX graph declares a slot as an initializer with external data. So a runtime
cannot fold an older Version's values into its optimized graph. A TFLite file holds zeros at ``offset``, and a runtime
opens a copy of the file with the values written there.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Final

from fanin.edge.bundles.derived import NOTHING, Derived
from fanin.edge.ranges import MIN_INPUT_SCALE
from fanin.protos.errors import InvalidBundle


class SlotKind(StrEnum):
    """The content of a slot; ``quantize`` computes it."""

    WEIGHT = "weight"
    """int8 codes, symmetric, one scale per channel along ``axis``."""
    WEIGHT_SCALE = "weight_scale"
    """float32 (channels,): the scales of a weight."""
    BIAS = "bias"
    """int32 codes (channels,) whose step is input scale x weight scale."""
    BIAS_SCALE = "bias_scale"
    """float32 (channels,): input scale x weight scale."""
    FLOAT = "float"
    """float32: the parameter unchanged."""
    ACTIVATION_SCALE = "activation_scale"
    """float32, one value: the scale of an activation."""
    ZERO_POINT = "zero_point"
    """int8, one value: the zero point of an activation in ONNX."""
    ZERO_POINT64 = "zero_point64"
    """int64, one value: the zero point of an activation in TFLite."""


DTYPES: Final = MappingProxyType(
    {
        SlotKind.WEIGHT: "int8",
        SlotKind.BIAS: "int32",
        SlotKind.ZERO_POINT: "int8",
        SlotKind.ZERO_POINT64: "int64",
    }
)
"""Element types of the kinds that are not float32."""
OF_BIAS: Final = (SlotKind.BIAS, SlotKind.BIAS_SCALE)
OF_ACTIVATION: Final = (SlotKind.ACTIVATION_SCALE, SlotKind.ZERO_POINT, SlotKind.ZERO_POINT64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A place in an ``infer`` graph that a Version fills.

    Attributes:
        initializer: Name of the tensor in the graph.
        kind: What the slot holds.
        parameter: Source of the value: a parameter or a derived tensor (``derived``). "" for a value of an activation.
        shape: Shape of the tensor in the graph.
        weight: For a bias and its scale, the source of the weight's scales: a parameter, a derived tensor, or the
            constant with the scales of a frozen weight. "" for other kinds.
        axis: Channel axis of the weight *as a parameter*, before ``permutation``. -1 for FLOAT and for an activation.
        permutation: Order of dimensions in the graph: it holds ``parameter.transpose(permutation)``. Empty to keep
            the parameter's order.
        activation: The activation whose grid the slot holds. For a bias and its scale, the input of the layer, or "" if
            its grid is fixed. "" for other kinds.
        input_scale: Scale of a fixed grid of the layer's input, for a bias and its scale. 0.0 for an input that is an
            activation, and for other kinds.
        offset: Position of the value in a TFLite file, in bytes. -1 in ONNX.
    """

    initializer: str
    kind: SlotKind
    parameter: str
    shape: tuple[int, ...]
    weight: str = ""
    axis: int = -1
    permutation: tuple[int, ...] = ()
    activation: str = ""
    input_scale: float = 0.0
    offset: int = -1

    @property
    def dtype(self) -> str:
        """numpy's name of the element type."""
        return DTYPES.get(self.kind, "float32")

    @property
    def size_bytes(self) -> int:
        """Size of the slot's value."""
        return prod(self.shape) * {"int8": 1, "int64": 8}.get(self.dtype, 4)


def check_slots(
    slots: tuple[Slot, ...],
    own: Mapping[str, tuple[int, ...]],
    derived: Derived = NOTHING,
    activations: Collection[str] = (),
) -> None:
    """Check that slots agree with the parameters, with the activations and with each other.

    Args:
        slots: The slots of one graph format.
        own: Shapes of the parameters, by name.
        derived: Further tensors that slots may name.
        activations: Names of the activations of this format. Each needs slots for its scale and its zero point.

    Raises:
        InvalidBundle: A slot names an unknown tensor, has a wrong shape, axis or scale, or conflicts with another. Or
            an activation lacks a slot.
    """
    shapes = derived.shapes(own)
    for slot in slots:
        _check_slot(slot, shapes)
    _check_axes(slots, derived)
    scaled = {_grid_of(slot) for slot in slots if slot.kind is SlotKind.BIAS_SCALE}
    for slot in slots:
        if slot.kind is SlotKind.BIAS and _grid_of(slot) not in scaled:
            raise InvalidBundle(
                f"manifest: slot {slot.initializer!r}: got no bias_scale slot with its weight, activation and "
                "input_scale, expected one",
                code="FN-0320",
            )
    _check_activations(slots, activations)
    spans = sorted((slot.offset, slot.offset + slot.size_bytes, slot.initializer) for slot in slots if slot.offset >= 0)
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise InvalidBundle(f"manifest: slots {name!r} and {other!r} overlap in the file", code="FN-0321")
    names = [slot.initializer for slot in slots]
    if len(set(names)) != len(names):
        raise InvalidBundle("manifest: two slots name the same initializer", code="FN-0321")


def _grid_of(slot: Slot) -> tuple[str, str, float]:
    """Return the facts on which the scale of a bias depends."""
    return slot.weight, slot.activation, slot.input_scale


def _check_activations(slots: tuple[Slot, ...], activations: Collection[str]) -> None:
    """Raise InvalidBundle unless exactly the activations have slots, each for its scale and for its zero point."""
    scaled = {slot.activation for slot in slots if slot.kind is SlotKind.ACTIVATION_SCALE}
    placed = {slot.activation for slot in slots if slot.kind in (SlotKind.ZERO_POINT, SlotKind.ZERO_POINT64)}
    named = {slot.activation for slot in slots} - {""}
    if not scaled == placed == set(activations) >= named:
        wrong = sorted((scaled ^ placed) | (scaled ^ set(activations)) | (named - set(activations)))
        raise InvalidBundle(
            f"manifest: got the activations {sorted(activations)}, and slots that do not fit them: {wrong}, expected a "
            "slot for the scale and one for the zero point of each",
            code="FN-0319",
        )


def _check_slot(slot: Slot, shapes: Mapping[str, tuple[int, ...]]) -> None:
    what = f"manifest: slot {slot.initializer!r}"
    missing = {slot.parameter, slot.weight} - set(shapes) - {""}
    if missing:
        raise InvalidBundle(
            f"{what} names unknown parameters {sorted(missing)}, expected names of the manifest's parameters",
            code="FN-0322",
        )
    if slot.kind in OF_ACTIVATION:
        if slot != Slot(
            initializer=slot.initializer,
            kind=slot.kind,
            parameter="",
            shape=slot.shape,
            activation=slot.activation or "?",
            offset=slot.offset,
        ):
            raise InvalidBundle(
                f"{what}: got {slot.kind}, expected an activation and no fact of a parameter", code="FN-0320"
            )
        if prod(slot.shape) != 1:
            raise InvalidBundle(f"{what}: got shape {slot.shape}, expected one value", code="FN-0320")
        return
    if not slot.parameter:
        raise InvalidBundle(f"{what}: got no parameter, expected the name of one", code="FN-0322")
    if slot.kind in OF_BIAS:
        is_fixed = not slot.activation and MIN_INPUT_SCALE <= slot.input_scale <= 1.0 / MIN_INPUT_SCALE
        agrees = bool(slot.weight) and (is_fixed or (bool(slot.activation) and slot.input_scale == 0.0))
    else:
        agrees = not slot.weight and not slot.activation and slot.input_scale == 0.0
    if not agrees:
        raise InvalidBundle(
            f"{what}: got weight {slot.weight!r}, activation {slot.activation!r} and input_scale {slot.input_scale}, "
            "expected a weight, and either an activation or an input_scale, in a bias only",
            code="FN-0320",
        )
    expected = _slot_shape(slot, shapes)
    # A TFLite graph may add dimensions of 1, or split one for a broadcast. The order of the values stays the same.
    is_reshapable = slot.kind in (SlotKind.WEIGHT, SlotKind.FLOAT) and slot.offset >= 0
    if slot.shape != expected and not (is_reshapable and prod(slot.shape) == prod(expected)):
        raise InvalidBundle(f"{what}: got shape {slot.shape}, expected {expected}", code="FN-0320")


def _check_axes(slots: tuple[Slot, ...], derived: Derived) -> None:
    """Check that all slots of a weight have the axis of its scales."""
    axes = {slot.parameter: slot.axis for slot in slots if slot.kind is SlotKind.WEIGHT_SCALE}
    for slot in slots:
        is_of_weight = slot.kind in (SlotKind.WEIGHT, SlotKind.WEIGHT_SCALE)
        weight = slot.parameter if is_of_weight else slot.weight
        # The scales of a frozen weight have one dimension, the channels.
        frozen = 0 if weight in derived.constants and not is_of_weight else None
        if weight and axes.get(weight, frozen) != slot.axis:
            raise InvalidBundle(
                f"manifest: slot {slot.initializer!r}: got axis {slot.axis}, "
                f"expected that of the weight_scale slot of {weight!r}, {axes.get(weight)}",
                code="FN-0320",
            )


def _slot_shape(slot: Slot, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape in the graph that follows from a slot's other fields."""
    own = shapes[slot.parameter]
    if slot.permutation:
        if slot.kind not in (SlotKind.WEIGHT, SlotKind.FLOAT) or sorted(slot.permutation) != list(range(len(own))):
            raise InvalidBundle(
                f"manifest: slot {slot.initializer!r}: got permutation {slot.permutation}, "
                f"expected one of {len(own)} dimensions, and of a weight or a float only",
                code="FN-0320",
            )
        own = tuple(own[dim] for dim in slot.permutation)
    if slot.kind is SlotKind.FLOAT:
        return own
    channelled = shapes[slot.weight or slot.parameter]
    if not 0 <= slot.axis < len(channelled):
        raise InvalidBundle(
            f"manifest: slot {slot.initializer!r}: got axis {slot.axis}, expected one of {len(channelled)} dimensions",
            code="FN-0320",
        )
    if slot.kind is SlotKind.WEIGHT:
        return own
    channels = (channelled[slot.axis],)
    if slot.kind is SlotKind.BIAS and own != channels:
        raise InvalidBundle(
            f"manifest: slot {slot.initializer!r}: got a bias of shape {own}, expected {channels} as its weight has",
            code="FN-0320",
        )
    return channels
