"""An ONNX graph that can be edited: producers and users of values, their shapes, and constants.

Edits keep the nodes in an order in which they can run, and keep the inputs and outputs of the graph and their names.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper, shape_inference

from fanin.edge.tensors import Array

Attribute = int | float | str | Sequence[int]
PREFIX: Final = "fused:"


class OnnxGraph:
    """An editable copy of a model; ``finish`` returns the result."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = onnx.ModelProto()
        self._model.CopyFrom(model)
        graph = shape_inference.infer_shapes(self._model, data_prop=True).graph
        values = {value.name: value.type.tensor_type for value in (*graph.value_info, *graph.input, *graph.output)}
        self._floats = {name for name, kind in values.items() if kind.elem_type == onnx.TensorProto.FLOAT}
        self._shapes = {
            name: tuple(dim.dim_value for dim in kind.shape.dim)
            for name, kind in values.items()
            if kind.HasField("shape") and all(dim.HasField("dim_value") for dim in kind.shape.dim)
        }
        self._constants = {row.name: numpy_helper.to_array(row) for row in graph.initializer}
        self._shapes |= {name: value.shape for name, value in self._constants.items()}
        self._outputs = {port.name for port in graph.output}
        self._names = {*values, *self._constants} | {name for node in graph.node for name in node.output}
        self._nodes = list(self._model.graph.node)
        self._index()

    @property
    def nodes(self) -> list[onnx.NodeProto]:
        """The nodes in execution order."""
        return list(self._nodes)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a value; None if it is unknown or varies."""
        return self._shapes.get(name)

    def is_float(self, name: str) -> bool:
        """Return whether a value is known to be float32."""
        return name in self._floats or (name in self._constants and self._constants[name].dtype == np.float32)

    def constant(self, name: str) -> Array | None:
        """Return the value of a constant; None for a computed value."""
        return self._constants.get(name)

    def number(self, name: str) -> float | None:
        """Return the value of a constant with one element; None otherwise."""
        value = self._constants.get(name)
        return float(value.item()) if value is not None and value.size == 1 else None

    def maker(self, name: str, kind: str) -> onnx.NodeProto | None:
        """Return the node that computes a value, if it has this operator type."""
        node = self._makers.get(name)
        return node if node is not None and node.op_type == kind else None

    def users(self, name: str) -> list[onnx.NodeProto]:
        """Return the nodes that read a value."""
        return self._users[name]

    def is_for_one(self, name: str) -> bool:
        """Return whether a value has one user and is no output, so that its producer can be merged into the user."""
        return name not in self._outputs and len(self._users[name]) == 1

    def add_constant(self, value: npt.ArrayLike, dtype: npt.DTypeLike) -> str:
        """Return the name of a constant with this value, added if there is none."""
        array = np.asarray(value, dtype)
        for name, known in self._constants.items():
            if known.dtype == array.dtype and known.shape == array.shape and np.array_equal(known, array):
                return name
        name = self._new_name()
        self._constants[name] = array
        self._shapes[name] = array.shape
        self._model.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def node(self, kind: str, inputs: Sequence[str], output: str = "", **attributes: Attribute) -> onnx.NodeProto:
        """Create a node that is not in the graph yet. Without ``output`` its output has a new name."""
        node = helper.make_node(kind, inputs, [output or self._new_name()])
        node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
        return node

    def replace(self, old: onnx.NodeProto, new: Iterable[onnx.NodeProto]) -> None:
        """Replace a node by others, named after it. The last of them computes the output of the replaced node."""
        new = list(new)
        if old.name:
            for index, node in enumerate(new):
                node.name = f"{old.name}.{index}"
        at = next(index for index, node in enumerate(self._nodes) if node is old)
        self._nodes[at : at + 1] = new
        self._index()

    def finish(self) -> onnx.ModelProto:
        """Return the model without unused nodes and constants."""
        kept: list[onnx.NodeProto] = []
        used = set(self._outputs)
        for node in reversed(self._nodes):
            if used.intersection(node.output):
                kept.append(node)
                used.update(node.input)
        graph = self._model.graph
        constants = [row for row in graph.initializer if row.name in used]
        kept = [_copy(node) for node in reversed(kept)]
        del graph.node[:], graph.initializer[:]
        graph.node.extend(kept)
        graph.initializer.extend(constants)
        return self._model

    def _index(self) -> None:
        self._makers = {name: node for node in self._nodes for name in node.output}
        self._users: defaultdict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self._nodes:
            for name in node.input:
                self._users[name].append(node)

    def _new_name(self) -> str:
        number = len(self._names)
        while f"{PREFIX}{number}" in self._names:
            number += 1
        self._names.add(f"{PREFIX}{number}")
        return f"{PREFIX}{number}"


def attribute(node: onnx.NodeProto, name: str, default: Attribute) -> Attribute:
    """Return an attribute of a node, or the default."""
    for row in node.attribute:
        if row.name == name:
            value: Attribute = helper.get_attribute_value(row)
            return value
    return default


def _copy(node: onnx.NodeProto) -> onnx.NodeProto:
    # The list that owns the message is emptied next, and the message with it.
    copied = onnx.NodeProto()
    copied.CopyFrom(node)
    return copied
