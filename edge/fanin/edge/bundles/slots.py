"""Slots: the places in an ``infer`` graph that a Version fills, and the checks that make filling them safe.

The manifest lists the slots of each graph format. ``quantize.fill_slots`` computes their values and a runtime puts them
into the graph. Neither checks a slot again: slots that passed ``check_slots`` agree with the parameters' shapes and
with each other.

The two formats are filled differently. An ONNX graph declares a slot as an initializer with external data. So a runtime
cannot fold an older Version's values into its optimized graph. A TFLite file holds zeros at ``offset``, and a runtime
opens a copy of the file with the values written there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import prod
from typing import Final

from fanin.edge.bundles.derived import NOTHING, Derived
from fanin.protos.errors import InvalidBundle

MIN_INPUT_SCALE: Final = 2.0**-60
"""Activation scales are between this and its inverse, so that their product with any weight scale is a normal float32
number."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A place in an ``infer`` graph that a Version fills.

    Attributes:
        initializer: Name of the tensor in the graph.
        kind: What the slot holds.
        parameter: Source of the value: a parameter or a derived tensor (``derived``).
        shape: Shape of the tensor in the graph.
        weight: For a bias and its scale, the source of the weight's scales: a parameter, a derived tensor, or the
            constant with the scales of a frozen weight. "" for other kinds.
        axis: Channel axis of the weight *as a parameter*, before ``permutation``. -1 for FLOAT.
        permutation: Order of dimensions in the graph: it holds ``parameter.transpose(permutation)``. Empty to keep
            the parameter's order.
        input_scale: Calibrated activation scale of the layer, for a bias and its scale. 0.0 for other kinds.
        offset: Position of the value in a TFLite file, in bytes. -1 in ONNX.
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

    @property
    def size_bytes(self) -> int:
        """Size of the slot's value."""
        return prod(self.shape) * (1 if self.kind is SlotKind.WEIGHT else 4)


def check_slots(slots: tuple[Slot, ...], own: Mapping[str, tuple[int, ...]], derived: Derived = NOTHING) -> None:
    """Check that slots agree with the parameters and with each other.

    Args:
        slots: The slots of one graph format.
        own: Shapes of the parameters, by name.
        derived: Further tensors that slots may name.

    Raises:
        InvalidBundle: A slot names an unknown tensor, has a wrong shape, axis or scale, or conflicts with another.
    """
    shapes = derived.shapes(own)
    for slot in slots:
        _check_slot(slot, shapes)
    _check_axes(slots, derived)
    scaled = {(slot.weight, slot.input_scale) for slot in slots if slot.kind is SlotKind.BIAS_SCALE}
    for slot in slots:
        if slot.kind is SlotKind.BIAS and (slot.weight, slot.input_scale) not in scaled:
            raise InvalidBundle(
                f"manifest: slot {slot.initializer!r}: got no bias_scale slot with its weight and input_scale, "
                "expected one",
                code="FN-0320",
            )
    spans = sorted((slot.offset, slot.offset + slot.size_bytes, slot.initializer) for slot in slots if slot.offset >= 0)
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise InvalidBundle(f"manifest: slots {name!r} and {other!r} overlap in the file", code="FN-0321")
    names = [slot.initializer for slot in slots]
    if len(set(names)) != len(names):
        raise InvalidBundle("manifest: two slots name the same initializer", code="FN-0321")


def _check_slot(slot: Slot, shapes: Mapping[str, tuple[int, ...]]) -> None:
    what = f"manifest: slot {slot.initializer!r}"
    missing = {slot.parameter, slot.weight} - set(shapes) - {""}
    if missing:
        raise InvalidBundle(
            f"{what} names unknown parameters {sorted(missing)}, expected names of the manifest's parameters",
            code="FN-0322",
        )
    if not slot.parameter:
        raise InvalidBundle(f"{what}: got no parameter, expected the name of one", code="FN-0322")
    if slot.kind in (SlotKind.BIAS, SlotKind.BIAS_SCALE):
        agrees = bool(slot.weight) and MIN_INPUT_SCALE <= slot.input_scale <= 1.0 / MIN_INPUT_SCALE
    else:
        agrees = not slot.weight and slot.input_scale == 0.0
    if not agrees:
        raise InvalidBundle(
            f"{what}: got weight {slot.weight!r} and input_scale {slot.input_scale}, expected both in a bias only",
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
