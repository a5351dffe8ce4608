"""The constants of an int8 ``infer`` graph: kernels and biases, some of which are slots.

The content of a constant depends on all its users. The scales of a kernel grow until every bias on it fits
(``bundles.quantize``), and several products may share a kernel. So constants are added empty and filled at the end, by
the same arithmetic for slots and for frozen constants.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from fanin.edge.bundles.quantize import (
    BIAS_ROOM,
    bias_codes,
    bias_scales,
    frozen_scales,
    weight_codes,
    weight_scales,
)
from fanin.edge.bundles.slots import Slot, SlotKind
from fanin.edge.export.formats.tflite.bound import ParameterView, has_scales
from fanin.edge.export.formats.tflite.flatgraph import FlatGraph, Scales
from fanin.edge.tensors import Float32s, Float64s

SCALE: Final = ":scale"
ZERO: Final = ":zero"
"""Suffixes of a tensor's name that name its scales and its zero point."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kernel:
    """An int8 kernel.

    Args:
        tensor: Its tensor in the graph.
        value: Its float values.
        dim: The dimension of its output channels.
        parameter: The parameter behind it; "" for a frozen kernel.
        axis: The axis of the parameter that holds the output channels; -1 without parameter.
        scales: The manifest's constant with the scales of a frozen kernel next to a moving bias; "" otherwise.
    """

    tensor: int
    value: Float32s
    dim: int
    parameter: str
    axis: int
    scales: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Bias:
    tensor: int
    value: Float32s
    kernel: Kernel
    input_scale: float


class Constants:
    """The kernels and biases of a graph, added when a product needs them."""

    def __init__(
        self,
        graph: FlatGraph,
        bound: Mapping[int, ParameterView],
        parameters: Mapping[str, Float32s],
        scales: Mapping[str, str],
    ) -> None:
        self._graph, self._bound, self._parameters, self._scales_of = graph, bound, parameters, scales
        self._kernels: dict[tuple[int, tuple[int, ...], str], Kernel] = {}
        self._biases: list[_Bias] = []
        self._axes: dict[str, int] = {}
        self._slots: list[Slot] = []
        self._fixed: set[str] = set()

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots, without their offsets in the file."""
        return tuple(
            replace(slot, activation="") if slot.activation in self._fixed else replace(slot, input_scale=0.0)
            for slot in self._slots
        )

    def grids(self, tensors: Mapping[int, Scales]) -> None:
        """Add slots for the grids of computed int8 tensors, by tensor index. Call it after all biases were added.

        The grid of an activation is fixed if it is the input of a product whose weight and bias are frozen: the file
        has the codes and the scales of such a bias.
        """
        moving = {tensor: grid for tensor, grid in tensors.items() if grid.activation not in self._fixed}
        for number, (tensor, grid) in enumerate(moving.items()):
            self._graph.name(tensor, f"a{number}")
            kinds = ((SCALE, SlotKind.ACTIVATION_SCALE), (ZERO, SlotKind.ZERO_POINT64))
            self._slots += [
                Slot(initializer=f"a{number}{part}", kind=kind, parameter="", shape=(1,), activation=grid.activation)
                for part, kind in kinds
            ]

    def fit(self, weight: int, bias: int) -> bool:
        """Return whether a bias (-1: none) fits on the scales of this weight, or is zero in every Version."""
        value = self._graph.constant(bias) if bias >= 0 else np.zeros(1, np.float32)
        if value is None:
            return False
        is_zero = bias not in self._bound and not value.any()
        return is_zero or has_scales(self._bound, self._scales_of, weight, bias)

    def kernel(self, tensor: int, value: Float32s, dim: int, bias: int) -> Kernel | None:
        """Return the kernel of these float values for a product with this bias (-1: none).

        Returns None if the output channels are not one axis of the parameter, or not the axis that another product
        uses. The slots of a parameter have one axis.
        """
        view = self._bound.get(bias)
        frozen = self._scales_of[view.parameter] if view is not None and tensor not in self._bound else ""
        key = (tensor, value.shape, frozen)
        if key in self._kernels:
            return self._kernels[key]
        view, axis = self._bound.get(tensor), -1
        if view is not None:
            axis = _axis(view, self._parameters[view.parameter].shape, value.shape, dim)
            if axis < 0 or self._axes.setdefault(view.parameter, axis) != axis:
                return None
        name = f"w{len(self._kernels)}" if view else ""
        empty = Scales(values=np.zeros(value.shape[dim], np.float32), dim=dim)
        kernel = Kernel(
            tensor=self._graph.add_constant(np.zeros(value.shape, np.int8), empty, name),
            value=value,
            dim=dim,
            parameter=view.parameter if view else "",
            axis=axis,
            scales=frozen,
        )
        self._kernels[key] = kernel
        if view is not None:
            codes = Slot(
                initializer=name,
                kind=SlotKind.WEIGHT,
                parameter=view.parameter,
                shape=value.shape,
                axis=axis,
                permutation=view.permutation,
            )
            scales = replace(
                codes, initializer=name + SCALE, kind=SlotKind.WEIGHT_SCALE, shape=empty.values.shape, permutation=()
            )
            self._slots += [codes, scales]
        return kernel

    def bias(self, tensor: int, kernel: Kernel, grid: Scales) -> int:
        """Add the codes of a bias for an input with this grid; zeros for none (-1), which have scales too."""
        input_scale = float(grid.values[0])
        value = self._graph.constant(tensor) if tensor >= 0 else None
        channels = (kernel.value.shape[kernel.dim],)
        view = self._bound.get(tensor)
        name = f"b{len(self._biases)}" if kernel.parameter or view else ""
        record = _Bias(
            tensor=self._graph.add_constant(
                np.zeros(channels, np.int32), Scales(values=np.zeros(channels, "f4")), name
            ),
            value=np.zeros(channels, np.float32) if value is None else value.astype(np.float32).reshape(channels),
            kernel=kernel,
            input_scale=input_scale,
        )
        self._biases.append(record)
        if not name:
            self._fixed.add(grid.activation)
        else:
            scales = Slot(
                initializer=name + SCALE,
                kind=SlotKind.BIAS_SCALE,
                parameter=view.parameter if view else kernel.parameter,
                shape=channels,
                weight=kernel.parameter or kernel.scales,
                axis=kernel.axis if kernel.parameter else 0,
                activation=grid.activation,
                input_scale=input_scale,
            )
            codes = [replace(scales, initializer=name, kind=SlotKind.BIAS)] if view else []
            self._slots += [*codes, scales]
        return record.tensor

    def floats(self, tensor: int) -> None:
        """Add a slot for a parameter that is used in float."""
        view, name = self._bound[tensor], f"p{tensor}"
        self._graph.name(tensor, name)
        self._slots.append(
            Slot(
                initializer=name,
                kind=SlotKind.FLOAT,
                parameter=view.parameter,
                shape=self._graph.shape(tensor),
                permutation=view.permutation,
            )
        )

    def fill(self) -> None:
        """Give every kernel and bias its values."""
        scales = {kernel.tensor: self._scales(kernel) for kernel in self._kernels.values()}
        for kernel in self._kernels.values():
            values = scales[kernel.tensor]
            self._graph.set_constant(kernel.tensor, weight_codes(kernel.value, kernel.dim, values))
            self._graph.set_scales(kernel.tensor, Scales(values=values, dim=kernel.dim))
        for bias in self._biases:
            grid = bias_scales(scales[bias.kernel.tensor], bias.input_scale)
            self._graph.set_constant(bias.tensor, bias_codes(bias.value, grid))
            self._graph.set_scales(bias.tensor, Scales(values=grid))

    def _scales(self, kernel: Kernel) -> Float32s:
        """Return the scales of a kernel, large enough for every bias on it or on another kernel of its parameter.

        A frozen kernel next to a moving bias has the scales of the manifest.
        """
        if kernel.scales:
            return frozen_scales(self._parameters[kernel.scales])
        least: Float64s = np.zeros(kernel.value.shape[kernel.dim], np.float64)
        for bias in self._biases:
            other = bias.kernel
            if other is kernel or (kernel.parameter and other.parameter == kernel.parameter):
                needed = np.abs(bias.value).astype(np.float64) / (bias.input_scale * BIAS_ROOM)
                least = np.maximum(least, needed)
        return weight_scales(kernel.value, kernel.dim, least)


def _axis(view: ParameterView, parameter: tuple[int, ...], kernel: tuple[int, ...], dim: int) -> int:
    """Return the axis of the parameter that becomes ``dim`` of the kernel; -1 if none does."""
    channels = np.arange(kernel[dim]).reshape([-1 if at == dim else 1 for at in range(len(kernel))])
    for axis in (axis for axis, size in enumerate(parameter) if size == kernel[dim]):
        numbers = np.arange(parameter[axis]).reshape([-1 if at == axis else 1 for at in range(len(parameter))])
        viewed = np.broadcast_to(numbers, parameter).transpose(view.permutation).reshape(kernel)
        if np.array_equal(viewed, np.broadcast_to(channels, kernel)):
            return axis
    return -1
