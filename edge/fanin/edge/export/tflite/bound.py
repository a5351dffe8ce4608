"""Parameters as constants of a TFLite graph: laid out as the operators read them, and known by name.

The converter is given the parameters of ``infer`` as inputs, so that it folds nothing into them. What it does to them
first, a transposition or a reshape, is done here once and for all: the constant is what comes out of that.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fanin.edge.export.tflite.flatgraph import FlatGraph
from fanin.edge.tensors import Float32s


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a constant comes from a parameter: ``parameter.transpose(permutation)``, in another shape."""

    parameter: str
    permutation: tuple[int, ...]


def bind_parameters(graph: FlatGraph, parameters: Mapping[str, Float32s]) -> dict[int, Layout]:
    """Turn the inputs that are parameters into constants. Returns what each constant tensor is, by its number."""
    bound: dict[int, Layout] = {}
    for port in list(graph.ports.inputs):
        name = port.name.decode() if isinstance(port.name, bytes) else port.name
        if name in parameters:
            value = parameters[name]
            graph.set_constant(port.tensorIndex, value)
            bound[port.tensorIndex] = Layout(parameter=name, permutation=tuple(range(value.ndim)))
    kept = []
    for row in graph.operators:
        source, target = int(row.inputs[0]), int(row.outputs[0])
        layout = None
        if source in bound and graph.kind(row) == "TRANSPOSE":
            layout = _transposed(graph, source, bound[source], graph.constant(int(row.inputs[1])), parameters)
        elif source in bound and graph.kind(row) == "RESHAPE":
            layout = bound[source]
        if layout is None:
            kept.append(row)
            continue
        value = parameters[layout.parameter].transpose(layout.permutation).reshape(graph.shape(target))
        graph.set_constant(target, np.ascontiguousarray(value))
        bound[target] = layout
    graph.operators = kept
    return bound


def _transposed(
    graph: FlatGraph, source: int, layout: Layout, order: object, parameters: Mapping[str, Float32s]
) -> Layout | None:
    """The layout of a transposed constant; None if a reshape before it has mixed the parameter's dimensions."""
    if not isinstance(order, np.ndarray):
        return None
    dims = parameters[layout.parameter].shape
    # Dimensions of 1 come and go without a move; the others must be those of the parameter still.
    large = [dim for dim in layout.permutation if dims[dim] != 1]
    shape = graph.shape(source)
    places = [place for place, size in enumerate(shape) if size != 1]
    if [dims[dim] for dim in large] != [shape[place] for place in places]:
        return None
    at = dict(zip(places, large, strict=True))
    moved = [at[place] for place in (int(place) for place in order) if place in at]
    small = [dim for dim in range(len(dims)) if dims[dim] == 1]
    return Layout(parameter=layout.parameter, permutation=(*moved, *small))
