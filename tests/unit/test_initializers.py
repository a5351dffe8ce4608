"""``edge.bundles.initializers``, compared with the onnx package: constants and damaged files."""

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import GraphProto, TensorProto, helper, numpy_helper
from support.linear import BIAS, WEIGHT, infer_graph, train_graph

from fanin.edge.bundles.initializers import (
    MAX_DEPTH,
    Constant,
    GraphNode,
    empty_constants,
    fill_constants,
    list_constants,
    list_nodes,
)
from fanin.protos.errors import InvalidBundle

SHAPES = st.lists(st.integers(0, 300), max_size=3).map(tuple)


@given(shapes=st.dictionaries(st.text(min_size=1, max_size=200), SHAPES, min_size=1, max_size=4))
def test_constants_are_those_that_onnx_sees(shapes: dict[str, tuple[int, ...]]) -> None:
    values = [TensorProto(name=name, dims=shape, data_type=TensorProto.INT8) for name, shape in shapes.items()]
    model = helper.make_model(helper.make_graph([], "g", [], [], values)).SerializeToString()
    assert list_constants(model, "m") == {name: Constant(dtype="int8", shape=shape) for name, shape in shapes.items()}


def test_other_element_types_have_no_name() -> None:
    constants = list_constants(train_graph(), "m")
    assert constants["along"] == Constant(dtype="", shape=(1,))
    assert constants["one"] == Constant(dtype="float32", shape=())


def test_filling_changes_these_constants_and_nothing_else() -> None:
    before = onnx.load_from_string(infer_graph())
    model = onnx.load_from_string(fill_constants(infer_graph(), {"w": WEIGHT}, "m"))
    values = {value.name: numpy_helper.to_array(value) for value in model.graph.initializer}
    np.testing.assert_array_equal(values["w"], WEIGHT)
    np.testing.assert_array_equal(values["b"], np.ones_like(BIAS))
    del model.graph.initializer[:], before.graph.initializer[:]
    assert model == before


def test_emptied_constants_can_be_filled_again() -> None:
    empty = empty_constants(infer_graph(), ["w"], "m")
    constants = {value.name: value for value in onnx.load_from_string(empty).graph.initializer}
    assert constants["w"].data_location == TensorProto.EXTERNAL
    assert {row.key: row.value for row in constants["w"].external_data}["length"] == str(WEIGHT.nbytes)
    assert not constants["w"].raw_data
    assert constants["b"].data_location == TensorProto.DEFAULT
    filled = fill_constants(empty, {"w": np.zeros_like(WEIGHT)}, "m")
    assert onnx.load_from_string(filled) == onnx.load_from_string(infer_graph())


def test_a_missing_constant_is_named() -> None:
    with pytest.raises(InvalidBundle, match="FN-0335"):
        empty_constants(infer_graph(), ["v", "w"], "m")


@given(st.data())
def test_damaged_bytes_are_one_error_of_ours(data: st.DataObject) -> None:
    model = bytearray(infer_graph())
    end = data.draw(st.integers(0, len(model)))
    for place in data.draw(st.lists(st.integers(0, len(model) - 1), max_size=3)):
        model[place] = data.draw(st.integers(0, 255))
    try:
        names = list_constants(bytes(model[:end]), "m")
        list_nodes(bytes(model[:end]), "m")
        empty_constants(bytes(model[:end]), list(names), "m")
    except InvalidBundle as exc:
        assert str(exc).startswith("m: ")


def nested(graph: GraphProto, depth: int) -> GraphProto:
    """Return the graph inside ``depth`` nested branches of If."""
    for _ in range(depth):
        node = helper.make_node("If", ["c"], ["y"], name="head/if", then_branch=graph)
        graph = helper.make_graph([node], "g", [], [])
    return graph


def test_nodes_of_other_domains_and_of_nested_graphs_are_listed() -> None:
    gelu = helper.make_node("Gelu", ["a"], ["b"], domain="com.microsoft", name="encoder.0/node_gelu")
    add = helper.make_node("Add", ["a", "b"], ["y"], domain="ai.onnx")
    graph = nested(helper.make_graph([gelu, add], "g", [], []), 1)
    nodes = list_nodes(helper.make_model(graph).SerializeToString(), "m")
    assert [(node.operator, node.module) for node in nodes] == [
        ("If", "head"),
        ("com.microsoft::Gelu", "encoder.0"),
        ("Add", ""),
    ]
    assert nodes[1] == GraphNode(operator="com.microsoft::Gelu", name="encoder.0/node_gelu")


def test_graphs_are_nested_a_few_times_at_most() -> None:
    inner = helper.make_graph([], "g", [], [])
    assert len(list_nodes(helper.make_model(nested(inner, MAX_DEPTH - 1)).SerializeToString(), "m")) == MAX_DEPTH - 1
    with pytest.raises(InvalidBundle, match="FN-0330"):
        list_nodes(helper.make_model(nested(inner, MAX_DEPTH)).SerializeToString(), "m")


@pytest.mark.timeout(20)
def test_a_file_of_many_constants_is_written_in_time_that_grows_with_it() -> None:
    # Copying the file again for each constant would copy 250 GB.
    values = [TensorProto(name=f"{index}", dims=[4096], data_type=TensorProto.INT8) for index in range(11_000)]
    for value in values:
        value.raw_data = bytes(4096)
    model = helper.make_model(helper.make_graph([], "g", [], [], values)).SerializeToString()
    output = empty_constants(model, ["0"], "m")
    assert len(model) - 4096 < len(output) < len(model) - 4096 + 100
