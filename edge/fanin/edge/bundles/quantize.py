"""Int8 quantization of a Version: from parameters to the values of an ``infer`` graph's slots, in numpy alone.

This is the normative arithmetic. It is the symmetric scheme of ONNX's QuantizeLinear and DequantizeLinear, with zero
point 0::

    real value = scale * code            weight: one scale per channel, code in -127..127, so that -code exists
                                         bias:   scale = input scale * weight scale, code in int32

Results are bit-identical on all machines, because IEEE 754 defines every operation. Quotients are computed in float64
from float32 values and rounded half to even. Scales are rounded to float32 once, and codes are computed from the
rounded scales. So the int8 model is a function of the Version's parameters, its ranges and the manifest.

Activations have asymmetric grids (``edge.ranges.grid_of``). Their scales and zero points are slots. The input scale of
a bias is that of its layer's activation, or a number of the slot if the graph fixes the grid. A Version without
ranges of its own uses those of the manifest.

The scale of a weight's channel is max|w| / 127. There is one exception: if the channel's bias would then overflow
int32, the scale grows until the bias fits. This happens in channels whose weights are almost zero, for example after
pruning; their output is almost only the bias. The scales of a frozen weight are constants of the manifest.

A BatchNorm behind a convolution is first folded into its weight and bias (``derived``), in float64 from float32 values,
and rounded to float32 once.

Reference:
    Jacob et al. 2018, arXiv 1712.05877, section 2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final, TypeVar, assert_never

import numpy as np
import numpy.typing as npt

from fanin.edge.bundles.derived import NOTHING, Derived, FoldedTensor
from fanin.edge.bundles.slots import OF_ACTIVATION, Slot, SlotKind
from fanin.edge.ranges import Grids
from fanin.edge.tensors import Float32s, Float64s, TensorTable
from fanin.protos.errors import InvalidVersion

Codes = npt.NDArray[np.int8]
Number = TypeVar("Number", np.int8, np.float32)
SlotValue = npt.NDArray[np.int8] | npt.NDArray[np.int32] | npt.NDArray[np.int64] | npt.NDArray[np.float32]

MAX_CODE: Final = 127
MAX_BIAS_CODE: Final = 2**31 - 1
BIAS_ROOM: Final = 2.0**30
"""Largest bias code before the channel's scale grows. The other half of int32 is for the sum of products."""
MIN_SCALE: Final = 2.0**-64
"""Scale of a channel without weight and bias. Its product with any input scale is a normal float32 number."""
MAX_SCALE: Final = float(np.finfo(np.float32).max)
NO_GRIDS: Final[Grids] = MappingProxyType({})


def fill_slots(
    slots: Sequence[Slot], table: TensorTable, flat: Float32s, derived: Derived = NOTHING, grids: Grids = NO_GRIDS
) -> dict[str, SlotValue]:
    """Compute the value of every slot.

    Args:
        slots: The slots of one graph format, from a manifest that checked them.
        table: Layout of the parameters, from the same manifest.
        flat: The parameters of a Version (num_values,).
        derived: Constants and folded tensors, from the same manifest.
        grids: The grids of the same manifest's activations (``edge.ranges.grids_of``).

    Returns:
        int8, int32, int64 or float32 values by initializer, in the shapes of the slots. Slots that differ only in their
        place, as those of a layer that is called several times, have the same array.

    Raises:
        InvalidVersion: A parameter is not finite.
        ValueError: ``flat`` has another length.
    """
    parameters = table.views(flat)
    if not np.isfinite(flat).all():
        wrong = sorted(name for name, view in parameters.items() if not np.isfinite(view).all())
        raise InvalidVersion(
            f"parameters: {wrong} hold values that are not finite, expected finite numbers only", code="FN-0359"
        )
    sources = with_derived(parameters, derived)
    slots = [_with_input_scale(slot, grids) for slot in slots]
    weights = {slot.parameter: slot.axis for slot in slots if slot.kind is SlotKind.WEIGHT_SCALE}
    scales = {name: frozen_scales(sources[name]) for name in derived.constants} | {
        name: weight_scales(sources[name], axis, _least_scales(name, axis, slots, sources))
        for name, axis in weights.items()
    }
    contents = {slot.initializer: replace(slot, initializer="", offset=-1) for slot in slots}
    values = {
        content: _of_grid(content, grids) if content.kind in OF_ACTIVATION else _value(content, sources, scales)
        for content in dict.fromkeys(contents.values())
    }
    return {initializer: values[content] for initializer, content in contents.items()}


def _with_input_scale(slot: Slot, grids: Grids) -> Slot:
    """Return the slot of a bias with the scale of its layer's input; any other slot unchanged."""
    if not slot.activation or slot.kind in OF_ACTIVATION:
        return slot
    return replace(slot, activation="", input_scale=float(grids[slot.activation][0]))


def _of_grid(slot: Slot, grids: Grids) -> SlotValue:
    """Return the value of the slot of an activation."""
    scale, zero_point = grids[slot.activation]
    value: SlotValue = np.full(slot.shape, scale if slot.kind is SlotKind.ACTIVATION_SCALE else zero_point, slot.dtype)
    return value


def with_derived(parameters: Mapping[str, Float32s], derived: Derived) -> dict[str, Float32s]:
    """Return the parameters, the constants and the folded tensors by name."""
    known = {**parameters, **{name: derived.constant(name) for name in derived.constants}}
    return known | {name: _fold(folded, known) for name, folded in derived.folded.items()}


def _fold(folded: FoldedTensor, known: Mapping[str, Float32s]) -> Float32s:
    def wide(name: str, default: Float64s) -> Float64s:
        return known[name].astype(np.float64) if name else default

    # The mean over devices is rounded to a grid, so a small variance can become negative.
    deviation = np.sqrt(np.maximum(wide(folded.variance, np.zeros(())), 0.0) + folded.epsilon)
    value = wide(folded.value, np.zeros(deviation.shape))
    column = [-1 if dim == folded.axis else 1 for dim in range(value.ndim)]
    zeros = np.zeros(deviation.shape)
    mean, offset = (wide(name, zeros).reshape(column) for name in (folded.mean, folded.offset))
    factor = (wide(folded.gain, np.ones(deviation.shape)) / deviation).reshape(column)
    result: Float32s = np.clip((value - mean) * factor + offset, -MAX_SCALE, MAX_SCALE).astype(np.float32)
    return result


def frozen_scales(scales: Float32s) -> Float32s:
    """Return the manifest's scales of a frozen weight (channels,), at least ``MIN_SCALE`` so that division is safe."""
    limited: Float32s = np.clip(scales, np.float32(MIN_SCALE), None)
    return limited


def weight_scales(weight: Float32s, axis: int, least: Float64s | None = None) -> Float32s:
    """Return the scale of each channel: max|w| / 127, but at least ``least``.

    Args:
        weight: The weight, any shape.
        axis: Its channel axis.
        least: Lower limits (channels,).

    Returns:
        Scales (channels,).
    """
    others = tuple(dim for dim in range(weight.ndim) if dim != axis)
    scales = np.abs(weight).max(axis=others, initial=0.0).astype(np.float64) / MAX_CODE
    if least is not None:
        scales = np.maximum(scales, least)
    limited: Float32s = np.clip(scales, MIN_SCALE, MAX_SCALE).astype(np.float32)
    return limited


def weight_codes(weight: Float32s, axis: int, scales: Float32s) -> Codes:
    """Return a weight's int8 codes, in its own shape, for scales (channels,) along ``axis``."""
    column = scales.astype(np.float64).reshape([-1 if dim == axis else 1 for dim in range(weight.ndim)])
    return np.clip(np.rint(weight / column), -MAX_CODE, MAX_CODE).astype(np.int8)


def bias_scales(scales: Float32s, input_scale: float) -> Float32s:
    """Return the scales of a bias (channels,): those of the products to which it is added."""
    products = scales.astype(np.float64) * input_scale
    return np.minimum(products, MAX_SCALE).astype(np.float32)


def bias_codes(bias: Float32s, scales: Float32s) -> npt.NDArray[np.int32]:
    """Return the int32 codes of a bias (channels,) for its scales (channels,), saturated."""
    codes = np.rint(bias / scales.astype(np.float64))
    return np.clip(codes, -MAX_BIAS_CODE, MAX_BIAS_CODE).astype(np.int32)


def _least_scales(name: str, axis: int, slots: Sequence[Slot], parameters: Mapping[str, Float32s]) -> Float64s:
    """Return the smallest scale of each channel (channels,) with which every bias of this weight fits int32."""
    least = np.zeros(parameters[name].shape[axis], np.float64)
    for slot in slots:
        if slot.kind is SlotKind.BIAS and slot.weight == name:
            bias = np.abs(parameters[slot.parameter]).astype(np.float64)
            least = np.maximum(least, bias / (slot.input_scale * BIAS_ROOM))
    return least


def _value(slot: Slot, parameters: Mapping[str, Float32s], scales: Mapping[str, Float32s]) -> SlotValue:
    parameter = parameters[slot.parameter]
    match slot.kind:
        case SlotKind.WEIGHT:
            codes = weight_codes(parameter, slot.axis, scales[slot.parameter])
            return np.ascontiguousarray(_permuted(codes, slot)).reshape(slot.shape)
        case SlotKind.WEIGHT_SCALE:
            return scales[slot.parameter]
        case SlotKind.BIAS:
            return bias_codes(parameter, bias_scales(scales[slot.weight], slot.input_scale))
        case SlotKind.BIAS_SCALE:
            return bias_scales(scales[slot.weight], slot.input_scale)
        case SlotKind.FLOAT:
            return np.array(_permuted(parameter, slot), np.float32, order="C").reshape(slot.shape)
        case SlotKind.ACTIVATION_SCALE | SlotKind.ZERO_POINT | SlotKind.ZERO_POINT64:
            raise AssertionError("its value is that of a grid")
        case _:
            assert_never(slot.kind)


def _permuted(value: npt.NDArray[Number], slot: Slot) -> npt.NDArray[Number]:
    """Return a parameter or its codes with the dimensions in the order of the slot."""
    return value.transpose(slot.permutation) if slot.permutation else value
