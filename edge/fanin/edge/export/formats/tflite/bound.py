"""Parameters as constants of a TFLite graph, in the layout that the operators read, and biases next to their products.

The converter receives the parameters of ``infer`` as inputs, so that it folds nothing into them. So the first operators
of the graph are transpositions and reshapes of parameters. They are computed here once, and the constant is their
result.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from fanin.edge.export.formats.tflite.flatgraph import FlatGraph
from fanin.edge.runtimes.graphs import parameter_port
from fanin.edge.tensors import Float32s

PRODUCTS: Final = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
"""Operators with a weight and a bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterView:
    """A constant as a view of a parameter: ``parameter.transpose(permutation)``, then reshaped."""

    parameter: str
    permutation: tuple[int, ...]


def bind_parameters(graph: FlatGraph, parameters: Mapping[str, Float32s]) -> dict[int, ParameterView]:
    """Turn the inputs that are parameters into constants.

    Args:
        graph: The graph, changed in place.
        parameters: Values by name.

    Returns:
        The view behind each constant tensor, by tensor index.
    """
    bound: dict[int, ParameterView] = {}
    names = {parameter_port(name): name for name in parameters}
    for port in list(graph.ports.inputs):
        name = names.get(port.name.decode() if isinstance(port.name, bytes) else port.name)
        if name is not None:
            value = parameters[name]
            graph.set_constant(port.tensorIndex, value)
            bound[port.tensorIndex] = ParameterView(parameter=name, permutation=tuple(range(value.ndim)))
    kept = []
    for row in graph.operators:
        source, target = int(row.inputs[0]), int(row.outputs[0])
        view = None
        if source in bound and graph.kind(row) == "TRANSPOSE":
            view = _transposed(graph, source, bound[source], graph.constant(int(row.inputs[1])), parameters)
        elif source in bound and graph.kind(row) == "RESHAPE":
            view = bound[source]
        if view is None:
            kept.append(row)
            continue
        value = parameters[view.parameter].transpose(view.permutation).reshape(graph.shape(target))
        graph.set_constant(target, np.ascontiguousarray(value))
        bound[target] = view
    graph.operators = kept
    return bound


def _transposed(
    graph: FlatGraph, source: int, view: ParameterView, order: object, parameters: Mapping[str, Float32s]
) -> ParameterView | None:
    """Return the view of a transposed constant; None if an earlier reshape has merged dimensions of the parameter."""
    if not isinstance(order, np.ndarray):
        return None
    dims = parameters[view.parameter].shape
    # Dimensions of size 1 may appear and disappear. The others must still be those of the parameter.
    large = [dim for dim in view.permutation if dims[dim] != 1]
    shape = graph.shape(source)
    places = [place for place, size in enumerate(shape) if size != 1]
    if [dims[dim] for dim in large] != [shape[place] for place in places]:
        return None
    dim_at = dict(zip(places, large, strict=True))
    moved = [dim_at[place] for place in (int(place) for place in order) if place in dim_at]
    small = [dim for dim in range(len(dims)) if dims[dim] == 1]
    return ParameterView(parameter=view.parameter, permutation=(*moved, *small))


def join_biases(graph: FlatGraph, bound: Mapping[int, ParameterView], scales: Mapping[str, str]) -> None:
    """Move an addition after a product into the product as its bias, with the activation function of the addition.

    Only a bias with scales is moved. It has scales if bias and weight both move with a Version, if both are frozen, or
    if the manifest has the scales of the frozen weight.

    Args:
        graph: The graph, changed in place.
        bound: The view behind each constant.
        scales: For each moving bias next to a frozen weight, the constant with the weight's scales.
    """
    users = _users(graph)
    rows = graph.operators
    joined = set()
    for row in rows:
        if graph.kind(row) not in PRODUCTS or activation_of(row) or not _is_zero(graph, bias_of(row), bound):
            continue
        output = int(row.outputs[0])
        readers = users.get(output, [])
        if len(readers) != 1 or graph.kind(readers[0]) != "ADD" or graph.ports_hold(output):
            continue
        (addition,) = readers
        bias = next((int(index) for index in addition.inputs if int(index) != output), -1)
        value = graph.constant(bias) if bias >= 0 else None
        channels = graph.shape(output)[-1]
        if value is None or value.shape[-1:] != (channels,) or value.size != channels:
            continue
        if not has_scales(bound, scales, int(row.inputs[1]), bias):
            continue
        if graph.shape(int(addition.outputs[0])) != graph.shape(output):
            continue
        row.inputs = np.array([row.inputs[0], row.inputs[1], bias], np.int32)
        row.outputs = addition.outputs
        row.builtinOptions.fusedActivationFunction = addition.builtinOptions.fusedActivationFunction
        joined.add(id(addition))
    graph.operators = [row for row in rows if id(row) not in joined]


def has_scales(bound: Mapping[int, ParameterView], scales: Mapping[str, str], weight: int, bias: int) -> bool:
    """Return whether a bias has scales: of a weight that moves with it, or of a frozen weight in the manifest."""
    if bias in bound and weight not in bound:
        return bound[bias].parameter in scales
    return (bias in bound) == (weight in bound)


def bias_of(row: "schema.OperatorT") -> int:
    """Return the bias tensor of a product; -1 if it has none."""
    return int(row.inputs[2]) if len(row.inputs) > 2 else -1


def _is_zero(graph: FlatGraph, tensor: int, bound: Mapping[int, ParameterView]) -> bool:
    """Return whether a product has no bias, or one that is zero in every Version."""
    if tensor < 0:
        return True
    value = graph.constant(tensor)
    return value is not None and tensor not in bound and not value.any()


def activation_of(row: "schema.OperatorT") -> int:
    """Return the code of the activation function that an operator applies."""
    return int(getattr(row.builtinOptions, "fusedActivationFunction", 0))


def _users(graph: FlatGraph) -> "dict[int, list[schema.OperatorT]]":
    users: dict[int, list[schema.OperatorT]] = {}
    for row in graph.operators:
        for index in row.inputs:
            users.setdefault(int(index), []).append(row)
    return users
