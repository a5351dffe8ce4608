"""The constants of an int8 ``infer`` graph: kernels and biases, and which of them are slots.

What a constant holds is known when all its users are: a kernel's scales grow where a bias on it would not fit
(``edge.quantize``), and a kernel that several products share is written once. So constants are added empty and filled
at the end, by the same arithmetic whether they are slots or frozen.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from fanin.edge.bundles.quantize import BIAS_ROOM, bias_codes, bias_scales, frozen_scales, weight_codes, weight_scales
from fanin.edge.bundles.slots import Slot, SlotKind
from fanin.edge.export.tflite.bound import Layout
from fanin.edge.export.tflite.flatgraph import FlatGraph, Scales
from fanin.edge.tensors import Float32s, Float64s

SCALE: Final = ":scale"
"""Follows a constant's name in the name of its scales."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kernel:
    """An int8 kernel's tensor, its float values, and the channels' dimension; ``parameter`` ("": none) has them along
    ``axis``. ``scales`` names the constant that a frozen kernel's scales are, where a bias moves on them ("": none).
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
    """The kernels and biases of a graph, as they are asked for."""

    def __init__(
        self,
        graph: FlatGraph,
        bound: Mapping[int, Layout],
        parameters: Mapping[str, Float32s],
        scales: Mapping[str, str],
    ) -> None:
        self._graph, self._bound, self._parameters, self._scales_of = graph, bound, parameters, scales
        self._kernels: dict[tuple[int, tuple[int, ...], str], Kernel] = {}
        self._biases: list[_Bias] = []
        self._axes: dict[str, int] = {}
        self._slots: list[Slot] = []

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots, without their places."""
        return tuple(self._slots)

    def fit(self, weight: int, bias: int) -> bool:
        """Whether a bias (-1: none) is a constant that this weight's scales fit, or is zero in every Version."""
        value = self._graph.constant(bias) if bias >= 0 else np.zeros(1, np.float32)
        if value is None:
            return False
        is_zero = bias not in self._bound and not value.any()
        return is_zero or has_scales(self._bound, self._scales_of, weight, bias)

    def kernel(self, tensor: int, value: Float32s, dim: int, bias: int) -> Kernel | None:
        """The kernel of these float values, for a product with this bias (-1: none).

        None if its channels are not those of one of the parameter's axes, or not of the axis that another product has
        them along: a parameter's slots have one axis.
        """
        layout = self._bound.get(bias)
        frozen = self._scales_of[layout.parameter] if layout is not None and tensor not in self._bound else ""
        key = (tensor, value.shape, frozen)
        if key in self._kernels:
            return self._kernels[key]
        layout, axis = self._bound.get(tensor), -1
        if layout is not None:
            axis = _axis(layout, self._parameters[layout.parameter].shape, value.shape, dim)
            if axis < 0 or self._axes.setdefault(layout.parameter, axis) != axis:
                return None
        name = f"w{len(self._kernels)}" if layout else ""
        empty = Scales(values=np.zeros(value.shape[dim], np.float32), dim=dim)
        made = Kernel(
            tensor=self._graph.add_constant(np.zeros(value.shape, np.int8), empty, name),
            value=value,
            dim=dim,
            parameter=layout.parameter if layout else "",
            axis=axis,
            scales=frozen,
        )
        self._kernels[key] = made
        if layout is not None:
            codes = Slot(
                initializer=name,
                kind=SlotKind.WEIGHT,
                parameter=layout.parameter,
                shape=value.shape,
                axis=axis,
                permutation=layout.permutation,
            )
            scales = replace(
                codes, initializer=name + SCALE, kind=SlotKind.WEIGHT_SCALE, shape=empty.values.shape, permutation=()
            )
            self._slots += [codes, scales]
        return made

    def bias(self, tensor: int, kernel: Kernel, input_scale: float) -> int:
        """A bias's codes on the scales of this input and kernel; for none (-1) zeros, which have scales too."""
        value = self._graph.constant(tensor) if tensor >= 0 else None
        channels = (kernel.value.shape[kernel.dim],)
        layout = self._bound.get(tensor)
        name = f"b{len(self._biases)}" if kernel.parameter or layout else ""
        made = _Bias(
            tensor=self._graph.add_constant(
                np.zeros(channels, np.int32), Scales(values=np.zeros(channels, "f4")), name
            ),
            value=np.zeros(channels, np.float32) if value is None else value.astype(np.float32).reshape(channels),
            kernel=kernel,
            input_scale=input_scale,
        )
        self._biases.append(made)
        if name:
            scales = Slot(
                initializer=name + SCALE,
                kind=SlotKind.BIAS_SCALE,
                parameter=layout.parameter if layout else kernel.parameter,
                shape=channels,
                weight=kernel.parameter or kernel.scales,
                axis=kernel.axis if kernel.parameter else 0,
                input_scale=input_scale,
            )
            codes = [replace(scales, initializer=name, kind=SlotKind.BIAS)] if layout else []
            self._slots += [*codes, scales]
        return made.tensor

    def floats(self, tensor: int) -> None:
        """Make a slot of a parameter that is used in float."""
        layout, name = self._bound[tensor], f"p{tensor}"
        self._graph.name(tensor, name)
        self._slots.append(
            Slot(
                initializer=name,
                kind=SlotKind.FLOAT,
                parameter=layout.parameter,
                shape=self._graph.shape(tensor),
                permutation=layout.permutation,
            )
        )

    def fill(self) -> None:
        """Give every kernel and bias its values."""
        scales = {kernel.tensor: self._scales(kernel) for kernel in self._kernels.values()}
        for kernel in self._kernels.values():
            found = scales[kernel.tensor]
            self._graph.set_constant(kernel.tensor, weight_codes(kernel.value, kernel.dim, found))
            self._graph.set_scales(kernel.tensor, Scales(values=found, dim=kernel.dim))
        for bias in self._biases:
            grid = bias_scales(scales[bias.kernel.tensor], bias.input_scale)
            self._graph.set_constant(bias.tensor, bias_codes(bias.value, grid))
            self._graph.set_scales(bias.tensor, Scales(values=grid))

    def _scales(self, kernel: Kernel) -> Float32s:
        """Large enough for every bias on this kernel, or another one of the same parameter; or those that are told."""
        if kernel.scales:
            return frozen_scales(self._parameters[kernel.scales])
        least: Float64s = np.zeros(kernel.value.shape[kernel.dim], np.float64)
        for bias in self._biases:
            other = bias.kernel
            if other is kernel or (kernel.parameter and other.parameter == kernel.parameter):
                needed = np.abs(bias.value).astype(np.float64) / (bias.input_scale * BIAS_ROOM)
                least = np.maximum(least, needed)
        return weight_scales(kernel.value, kernel.dim, least)


def has_scales(bound: Mapping[int, Layout], scales: Mapping[str, str], weight: int, bias: int) -> bool:
    """Whether a bias has scales to stand on: a weight's that moves as it does, or a frozen one's that are told."""
    if bias in bound and weight not in bound:
        return bound[bias].parameter in scales
    return (bias in bound) == (weight in bound)


def _axis(layout: Layout, parameter: tuple[int, ...], kernel: tuple[int, ...], dim: int) -> int:
    """The axis of the parameter that lies along ``dim`` of the kernel; -1 if none does."""
    wanted = np.arange(kernel[dim]).reshape([-1 if at == dim else 1 for at in range(len(kernel))])
    for axis in (axis for axis, size in enumerate(parameter) if size == kernel[dim]):
        numbers = np.arange(parameter[axis]).reshape([-1 if at == axis else 1 for at in range(len(parameter))])
        laid = np.broadcast_to(numbers, parameter).transpose(layout.permutation).reshape(kernel)
        if np.array_equal(laid, np.broadcast_to(wanted, kernel)):
            return axis
    return -1
