"""``edge.export.onnx.fuse``: each rewrite fuses its pattern, leaves similar graphs, and changes no result."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from fanin.edge.export.formats.onnx.fuse import fuse

Array = npt.NDArray[np.generic]
Node = tuple[str, Sequence[str], str, Mapping[str, object]]
OPSET = 20


def node(kind: str, inputs: str, output: str, **attributes: object) -> Node:
    """Return one operator; its inputs are separated by spaces."""
    return kind, inputs.split(), output, attributes


def model(
    nodes: Sequence[Node],
    inputs: Mapping[str, Array],
    outputs: Mapping[str, Sequence[int]],
    constants: Mapping[str, Array] | None = None,
) -> onnx.ModelProto:
    """Return a checked model of these operators."""

    def ports(shapes: Mapping[str, Sequence[int]]) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(
                name,
                helper.np_dtype_to_tensor_dtype(inputs[name].dtype) if name in inputs else TensorProto.FLOAT,
                shape,
            )
            for name, shape in shapes.items()
        ]

    graph = helper.make_graph(
        [helper.make_node(kind, names, [output], **attributes) for kind, names, output, attributes in nodes],
        "graph",
        ports({name: value.shape for name, value in inputs.items()}),
        ports(outputs),
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def run(proto: onnx.ModelProto, feed: Mapping[str, Array]) -> list[Array]:
    """Run the model without onnxruntime's graph optimizations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    arrays: list[Array] = onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, dict(feed))
    return arrays


def kinds(proto: onnx.ModelProto) -> list[str]:
    """Return the types of the model's operators."""
    return [row.op_type for row in proto.graph.node]


def fused(plain: onnx.ModelProto, feed: Mapping[str, Array]) -> list[str]:
    """Fuse the model, check that its results stay the same, and return its operators."""
    before, ports = plain.SerializeToString(), [port.name for port in plain.graph.output]
    result = fuse(plain)
    assert plain.SerializeToString() == before
    onnx.checker.check_model(result, full_check=True)
    assert [port.name for port in result.graph.output] == ports
    for actual, expected in zip(run(result, feed), run(plain, feed), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    return kinds(result)


def floats(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Return normally distributed numbers."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


WIDE = {"wide": np.array([3, 4])}


@pytest.mark.parametrize("names", ["x y", "y x"])
def test_an_operand_that_is_broadcast_is_not_expanded(names: str) -> None:
    feed = {"x": floats(3, 4), "s": floats(3, 1)}
    nodes = [node("Expand", "s wide", "y"), node("Sub", names, "z")]
    assert fused(model(nodes, feed, {"z": (3, 4)}, WIDE), feed) == ["Sub"]


def test_an_expansion_beyond_the_other_side_stays() -> None:
    feed = {"x": floats(1, 4), "s": floats(3, 1)}
    nodes = [node("Expand", "s wide", "y"), node("Mul", "x y", "z")]
    assert fused(model(nodes, feed, {"z": (3, 4)}, WIDE), feed) == ["Expand", "Mul"]
    twice = [node("Expand", "s wide", "y"), node("Mul", "y y", "z")]
    assert fused(model(twice, {"s": feed["s"]}, {"z": (3, 4)}, WIDE), {"s": feed["s"]}) == ["Expand", "Mul"]


ONE_HOT = [
    node("Unsqueeze", "labels last", "column"),
    node("Equal", "column classes", "equal"),
    node("Cast", "equal", "chosen", to=TensorProto.FLOAT),
]
CLASSES = {"classes": np.arange(5), "last": np.array([-1])}


@settings(max_examples=20)
@given(labels=st.lists(st.integers(-1, 5), min_size=6, max_size=6), keeps=st.booleans(), seed=st.integers(0, 99))
def test_a_loss_picks_the_value_at_the_label(labels: list[int], keeps: bool, seed: int) -> None:
    feed = {"labels": np.array(labels).reshape(2, 3), "v": floats(2, 3, 5, seed=seed)}
    nodes = [*ONE_HOT, node("Mul", "chosen v", "m"), node("ReduceSum", "m last", "z", keepdims=int(keeps))]
    operators = fused(model(nodes, feed, {"z": (2, 3, 1) if keeps else (2, 3)}, CLASSES), feed)
    assert "Gather" in operators
    assert "ReduceSum" not in operators


@settings(max_examples=20)
@given(labels=st.lists(st.integers(-1, 5), min_size=6, max_size=6), seed=st.integers(0, 99))
def test_the_gradient_of_a_cross_entropy_is_put_at_the_label(labels: list[int], seed: int) -> None:
    feed = {"labels": np.array(labels), "w": floats(6, 1, seed=seed), "e": floats(6, 5, seed=seed)}
    nodes = [
        *ONE_HOT,
        node("Mul", "chosen w", "left"),
        node("ReduceSum", "left last", "s"),
        node("Mul", "e s", "right"),
        node("Sub", "left right", "z"),
    ]
    operators = fused(model(nodes, feed, {"z": (6, 5)}, CLASSES), feed)
    assert "ScatterElements" in operators
    assert "ReduceSum" not in operators


@pytest.mark.parametrize(
    "classes",
    [np.array([0, 1, 2, 4, 3]), np.array([1, 2, 3, 4, 5])],
    ids=["another order", "another start"],
)
def test_a_comparison_with_anything_but_all_classes_in_turn_stays(classes: Array) -> None:
    feed = {"labels": np.arange(6), "v": floats(6, 5)}
    nodes = [*ONE_HOT, node("Mul", "chosen v", "m"), node("ReduceSum", "m last", "z", keepdims=0)]
    plain = model(nodes, feed, {"z": (6,)}, CLASSES | {"classes": classes})
    assert fused(plain, feed) == kinds(plain)


def test_a_sum_over_other_dimensions_is_no_choice_of_a_class() -> None:
    feed = {"labels": np.arange(6), "v": floats(6, 5)}
    nodes = [*ONE_HOT, node("Mul", "chosen v", "m"), node("ReduceSum", "m first", "z", keepdims=0)]
    plain = model(nodes, feed, {"z": (5,)}, CLASSES | {"first": np.array([0])})
    assert fused(plain, feed) == kinds(plain)


NUMBERS = {"one": np.float32(1.0), "half": np.float32(0.5)}


def test_the_normal_distributions_share_is_one_operator() -> None:
    feed = {"x": 4.0 * floats(3, 40)}
    nodes = [node("Erf", "x", "e"), node("Add", "one e", "a"), node("Mul", "a half", "z")]
    assert fused(model(nodes, feed, {"z": (3, 40)}, NUMBERS), feed) == ["Erf", "HardSigmoid"]


@pytest.mark.parametrize(("kind", "factor"), [("Tanh", "half"), ("Erf", "one")])
def test_other_lines_and_curves_stay(kind: str, factor: str) -> None:
    feed = {"x": floats(3, 4)}
    nodes = [node(kind, "x", "e"), node("Add", "e one", "a"), node("Mul", f"a {factor}", "z")]
    assert fused(model(nodes, feed, {"z": (3, 4)}, NUMBERS), feed) == [kind, "Add", "Mul"]


@pytest.mark.parametrize(
    ("shape", "axes", "keeps", "expected"),
    [
        ((6, 8), [0], 0, ["MatMul"]),
        ((6, 8), [0], 1, ["MatMul", "Reshape"]),
        ((2, 3, 8), [0, 1], 0, ["Reshape", "MatMul"]),
        ((2, 3, 8), [0], 1, ["Reshape", "MatMul", "Reshape"]),
        ((6, 7), [0], 0, ["ReduceSum"]),
        ((6, 8), [1], 0, ["ReduceSum"]),
        ((6, 8), [0, 1], 0, ["ReduceSum"]),
        ((2, 3, 8), [0, 2], 0, ["ReduceSum"]),
    ],
)
def test_a_sum_over_the_first_dimensions_is_a_product(
    shape: tuple[int, ...], axes: list[int], keeps: int, expected: list[str]
) -> None:
    feed = {"x": floats(*shape)}
    output_shape = feed["x"].sum(tuple(axes), keepdims=bool(keeps)).shape
    plain = model(
        [node("ReduceSum", "x axes", "z", keepdims=keeps)], feed, {"z": output_shape}, {"axes": np.array(axes)}
    )
    assert fused(plain, feed) == expected


def test_a_sum_that_is_reshaped_is_computed_in_that_shape() -> None:
    feed = {"x": floats(6, 8)}
    nodes = [node("ReduceSum", "x axes", "s"), node("Reshape", "s flat", "z")]
    plain = model(nodes, feed, {"z": (8,)}, {"axes": np.array([0]), "flat": np.array([8])})
    assert fused(plain, feed) == ["MatMul"]


def test_integers_are_summed_as_they_are() -> None:
    feed = {"x": np.arange(48).reshape(6, 8)}
    nodes = [node("ReduceSum", "x axes", "s", keepdims=0), node("Cast", "s", "z", to=TensorProto.FLOAT)]
    plain = model(nodes, feed, {"z": (8,)}, {"axes": np.array([0])})
    assert fused(plain, feed) == ["ReduceSum", "Cast"]


def momentum(*extra: Node, sides: str = "t b") -> tuple[list[Node], dict[str, Array], dict[str, Array]]:
    """Return (operators, inputs, constants) of a momentum step whose gradient is a product of two matrices."""
    nodes = [
        node("Transpose", "a", "t", perm=[1, 0]),
        node("MatMul", sides, "g"),
        node("Mul", "m factor", "scaled"),
        node("Add", "scaled g", "next"),
    ]
    feed: dict[str, Array] = {"a": floats(6, 3), "b": floats(6, 4), "m": floats(3, 4)}
    return [*nodes, *extra], feed, {"factor": np.array(0.9, np.float32)}


def test_momentum_is_part_of_the_product() -> None:
    nodes, feed, constants = momentum()
    plain = model(nodes, feed, {"next": (3, 4)}, constants)
    assert fused(plain, feed) == ["Gemm"]
    (gemm,) = fuse(plain).graph.node
    assert list(gemm.input) == ["a", "b", "m"]
    assert {row.name: round(helper.get_attribute_value(row), 6) for row in gemm.attribute} == {
        "beta": 0.9,
        "transA": 1,
        "transB": 0,
    }


def test_a_gradient_that_is_used_twice_is_kept() -> None:
    nodes, feed, constants = momentum(node("Add", "g next", "along"))
    plain = model(nodes, feed, {"next": (3, 4), "along": (3, 4)}, constants)
    assert fused(plain, feed) == kinds(plain)
    nodes, feed, constants = momentum()
    plain = model(nodes, feed, {"next": (3, 4), "g": (3, 4)}, constants)
    assert fused(plain, feed) == kinds(plain)


def test_a_velocity_that_is_scaled_by_an_input_is_added_in_the_product() -> None:
    nodes, feed, constants = momentum()
    plain = model(nodes, feed | constants, {"next": (3, 4)})
    assert fused(plain, feed | constants) == ["Mul", "Gemm"]


def test_a_row_of_factors_is_kept() -> None:
    nodes, feed, _ = momentum()
    rows = {"factor": floats(4)}
    plain = model(nodes, feed, {"next": (3, 4)}, rows)
    assert fused(plain, feed) == kinds(plain)


def test_a_velocity_of_another_shape_or_a_stack_of_products_is_kept() -> None:
    nodes, feed, constants = momentum()
    plain = model(nodes, feed | {"m": floats(1, 4)}, {"next": (3, 4)}, constants)
    assert fused(plain, feed | {"m": floats(1, 4)}) == kinds(plain)
    stacked = [node("MatMul", "a b", "g"), node("Mul", "m factor", "scaled"), node("Add", "scaled g", "next")]
    feed = {"a": floats(2, 3, 6), "b": floats(2, 6, 4), "m": floats(2, 3, 4)}
    plain = model(stacked, feed, {"next": (2, 3, 4)}, constants)
    assert fused(plain, feed) == kinds(plain)


def test_names_in_use_are_not_used_again() -> None:
    feed = {"fused:5": floats(2, 3, 8)}
    nodes = [node("ReduceSum", "fused:5 axes", "fused:3", keepdims=1)]
    plain = model(nodes, feed, {"fused:3": (1, 3, 8)}, {"axes": np.array([0])})
    assert fused(plain, feed) == ["Reshape", "MatMul", "Reshape"]
