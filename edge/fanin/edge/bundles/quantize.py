"""What a Version puts into the slots of an int8 graph: the normative arithmetic, in numpy alone.

The scheme is the integer quantization of Jacob et al. 2018 (arXiv 1712.05877, section 2) in the symmetric
form of ONNX's QuantizeLinear and DequantizeLinear (zero point 0)::

    real value = scale * code            weight: one scale a channel, code in -127..127, so that -code exists
                                         bias:   scale = input scale * weight scale, code in int32

Every quotient is taken in float64 from float32 values and rounded half to even; scales are rounded to float32
once, and codes are computed from the rounded scales. IEEE 754 fixes each of these operations, so all machines
get the same bits, and a Version's int8 model is a function of its parameters and the manifest.

A weight's scale is max|w| / 127 of its channel, unless the channel's bias would then not fit an int32: such a
channel (all zeros, as after pruning) has next to no say but through its bias, so its scale grows until the
bias fits. A frozen weight's scales are constants of the manifest.

A convolution's BatchNorm is folded into its weight and bias first (``edge.derived``), in float64 from float32 values
and rounded to float32 once.
"""

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar, assert_never

import numpy as np
import numpy.typing as npt

from fanin.edge.bundles.derived import NOTHING, Derived, Folded
from fanin.edge.bundles.slots import Slot, SlotKind
from fanin.edge.tensors import Float32s, Float64s, TensorTable
from fanin.protos.errors import InvalidVersion

Codes = npt.NDArray[np.int8]
Number = TypeVar("Number", np.int8, np.float32)
SlotValue = npt.NDArray[np.int8] | npt.NDArray[np.int32] | npt.NDArray[np.float32]

MAX_CODE: Final = 127
MAX_BIAS_CODE: Final = 2**31 - 1
BIAS_ROOM: Final = 2.0**30
"""Codes that a bias may need before its channel's scale grows; the other half of int32 is for the products."""
MIN_SCALE: Final = 2.0**-64
"""Scale of a channel with neither weight nor bias: harmless, and a normal float32 even times an input scale."""
MAX_SCALE: Final = float(np.finfo(np.float32).max)


def fill_slots(
    slots: Sequence[Slot], table: TensorTable, flat: Float32s, derived: Derived = NOTHING
) -> dict[str, SlotValue]:
    """Every slot's value, by initializer, for the parameters ``flat`` (num_values,).

    ``slots`` and ``derived`` are a manifest's, which has checked them against ``table``.
    Raises InvalidVersion if a parameter is not a finite number, ValueError if ``flat`` has another length.
    """
    parameters = table.views(flat)
    if not np.isfinite(flat).all():
        bad = sorted(name for name, view in parameters.items() if not np.isfinite(view).all())
        raise InvalidVersion(f"parameters: {bad} hold values that are not finite, expected finite numbers only")
    sources = with_derived(parameters, derived)
    weights = {slot.parameter: slot.axis for slot in slots if slot.kind is SlotKind.WEIGHT_SCALE}
    scales = {name: frozen_scales(sources[name]) for name in derived.constants} | {
        name: weight_scales(sources[name], axis, _least_scales(name, axis, slots, sources))
        for name, axis in weights.items()
    }
    return {slot.initializer: _value(slot, sources, scales) for slot in slots}


def with_derived(parameters: Mapping[str, Float32s], derived: Derived) -> dict[str, Float32s]:
    """The parameters, and what is derived from them, by name."""
    known = {**parameters, **{name: derived.constant(name) for name in derived.constants}}
    return known | {name: _folded(found, known) for name, found in derived.folded.items()}


def _folded(found: Folded, known: Mapping[str, Float32s]) -> Float32s:
    def wide(name: str, value: Float64s) -> Float64s:
        return known[name].astype(np.float64) if name else value

    # The mean over devices is rounded to a grid, which may take a small variance below zero.
    spread = np.sqrt(np.maximum(wide(found.variance, np.zeros(())), 0.0) + found.epsilon)
    value = wide(found.value, np.zeros(spread.shape))
    column = [-1 if dim == found.axis else 1 for dim in range(value.ndim)]
    none = np.zeros(spread.shape)
    mean, offset = (wide(name, none).reshape(column) for name in (found.mean, found.offset))
    factor = (wide(found.gain, np.ones(spread.shape)) / spread).reshape(column)
    made: Float32s = np.clip((value - mean) * factor + offset, -MAX_SCALE, MAX_SCALE).astype(np.float32)
    return made


def frozen_scales(scales: Float32s) -> Float32s:
    """Scales as the manifest tells them, none that could not be divided by."""
    found: Float32s = np.clip(scales, np.float32(MIN_SCALE), None)
    return found


def weight_scales(weight: Float32s, axis: int, least: Float64s | None = None) -> Float32s:
    """The scale of each channel along ``axis`` (channels,), none below ``least`` (channels,)."""
    others = tuple(dim for dim in range(weight.ndim) if dim != axis)
    scales = np.abs(weight).max(axis=others, initial=0.0).astype(np.float64) / MAX_CODE
    if least is not None:
        scales = np.maximum(scales, least)
    found: Float32s = np.clip(scales, MIN_SCALE, MAX_SCALE).astype(np.float32)
    return found


def weight_codes(weight: Float32s, axis: int, scales: Float32s) -> Codes:
    """The int8 codes, in the weight's own shape, on these scales (channels,) along ``axis``."""
    column = scales.astype(np.float64).reshape([-1 if dim == axis else 1 for dim in range(weight.ndim)])
    return np.clip(np.rint(weight / column), -MAX_CODE, MAX_CODE).astype(np.int8)


def bias_scales(scales: Float32s, input_scale: float) -> Float32s:
    """The scale of a bias's codes (channels,): that of the products it is added to."""
    products = scales.astype(np.float64) * input_scale
    return np.minimum(products, MAX_SCALE).astype(np.float32)


def bias_codes(bias: Float32s, scales: Float32s) -> npt.NDArray[np.int32]:
    """The int32 codes of a bias (channels,) on its scales (channels,), saturated."""
    codes = np.rint(bias / scales.astype(np.float64))
    return np.clip(codes, -MAX_BIAS_CODE, MAX_BIAS_CODE).astype(np.int32)


def _least_scales(name: str, axis: int, slots: Sequence[Slot], parameters: Mapping[str, Float32s]) -> Float64s:
    """The smallest scale of each channel (channels,) with which every bias on this weight fits."""
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
            return np.ascontiguousarray(_laid(codes, slot)).reshape(slot.shape)
        case SlotKind.WEIGHT_SCALE:
            return scales[slot.parameter]
        case SlotKind.BIAS:
            return bias_codes(parameter, bias_scales(scales[slot.weight], slot.input_scale))
        case SlotKind.BIAS_SCALE:
            return bias_scales(scales[slot.weight], slot.input_scale)
        case SlotKind.FLOAT:
            return np.array(_laid(parameter, slot), np.float32, order="C").reshape(slot.shape)
        case _:
            assert_never(slot.kind)


def _laid(value: npt.NDArray[Number], slot: Slot) -> npt.NDArray[Number]:
    """A parameter, or its codes, with the dimensions in the order of the slot."""
    return value.transpose(slot.permutation) if slot.permutation else value
