"""An ONNX graph open for edits: who makes a value, who uses it, its shape, and what is constant.

Edits keep the order of the nodes one in which they can run, and the graph's inputs, outputs and their names.
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
    """A copy of a model; ``finish`` gives it back."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = onnx.ModelProto()
        self._model.CopyFrom(model)
        graph = shape_inference.infer_shapes(self._model, data_prop=True).graph
        values = {value.name: value.type.tensor_type for value in (*graph.value_info, *graph.input, *graph.output)}
        self._floats = {name for name, found in values.items() if found.elem_type == onnx.TensorProto.FLOAT}
        self._shapes = {
            name: tuple(dim.dim_value for dim in found.shape.dim)
            for name, found in values.items()
            if found.HasField("shape") and all(dim.HasField("dim_value") for dim in found.shape.dim)
        }
        self._constants = {row.name: numpy_helper.to_array(row) for row in graph.initializer}
        self._shapes |= {name: value.shape for name, value in self._constants.items()}
        self._outputs = {port.name for port in graph.output}
        self._names = {*values, *self._constants} | {name for node in graph.node for name in node.output}
        self._nodes = list(self._model.graph.node)
        self._index()

    @property
    def nodes(self) -> list[onnx.NodeProto]:
        """The nodes, in the order in which they run."""
        return list(self._nodes)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """A value's shape; None where it is not known or varies."""
        return self._shapes.get(name)

    def is_float(self, name: str) -> bool:
        """Whether a value is known to be of float32."""
        return name in self._floats or (name in self._constants and self._constants[name].dtype == np.float32)

    def constant(self, name: str) -> Array | None:
        """What a value always is."""
        return self._constants.get(name)

    def number(self, name: str) -> float | None:
        """The one number that a value always is."""
        found = self._constants.get(name)
        return float(found.item()) if found is not None and found.size == 1 else None

    def maker(self, name: str, kind: str) -> onnx.NodeProto | None:
        """The node that makes a value, if it is of this kind."""
        found = self._makers.get(name)
        return found if found is not None and found.op_type == kind else None

    def users(self, name: str) -> list[onnx.NodeProto]:
        """The nodes that take a value."""
        return self._users[name]

    def is_for_one(self, name: str) -> bool:
        """Whether a value is used in one place and is no output: what makes it may go with that place."""
        return name not in self._outputs and len(self._users[name]) == 1

    def add_constant(self, value: npt.ArrayLike, dtype: npt.DTypeLike) -> str:
        """The name of a constant, a new one if there is none like it."""
        array = np.asarray(value, dtype)
        for name, found in self._constants.items():
            if found.dtype == array.dtype and found.shape == array.shape and np.array_equal(found, array):
                return name
        name = self._new_name()
        self._constants[name] = array
        self._shapes[name] = array.shape
        self._model.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def node(self, kind: str, inputs: Sequence[str], output: str = "", **attributes: Attribute) -> onnx.NodeProto:
        """A node that is in no graph yet; without a name, what it makes gets a new one."""
        made = helper.make_node(kind, inputs, [output or self._new_name()])
        made.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
        return made

    def replace(self, old: onnx.NodeProto, new: Iterable[onnx.NodeProto]) -> None:
        """Put nodes where another stood. The last of them makes what that one made."""
        at = next(index for index, node in enumerate(self._nodes) if node is old)
        self._nodes[at : at + 1] = new
        self._index()

    def finish(self) -> onnx.ModelProto:
        """The model, without what nobody uses any more."""
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
    """A node's attribute, or its default."""
    for found in node.attribute:
        if found.name == name:
            value: Attribute = helper.get_attribute_value(found)
            return value
    return default


def _copy(node: onnx.NodeProto) -> onnx.NodeProto:
    # A message that stands in the list which is about to be emptied would go with it.
    made = onnx.NodeProto()
    made.CopyFrom(node)
    return made
