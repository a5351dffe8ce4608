"""A linear model whose graphs are written node by node, as by another exporter, and its train step in numpy."""

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from fanin.edge.assembly.assemble import AssembledGraphs

NUM_INPUTS, NUM_CLASSES, BATCH_SIZE = 6, 3, 4
WEIGHT = np.linspace(-0.5, 0.5, NUM_INPUTS * NUM_CLASSES).astype(np.float32).reshape(NUM_INPUTS, NUM_CLASSES)
BIAS = np.array([0.1, -0.1, 0.0], np.float32)


def port(name: str, *shape: int | str, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    """Return an input or an output."""
    return helper.make_tensor_value_info(name, dtype, list(shape))


def file(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: dict[str, np.ndarray] | None = None,
) -> bytes:
    """Return the graph as a file of opset 21."""
    values = [numpy_helper.from_array(value, name) for name, value in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "linear", list(inputs), list(outputs), values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString())


FORWARD = [
    helper.make_node("MatMul", ["x", "w"], ["products"]),
    helper.make_node("Add", ["products", "b"], ["logits"]),
]
LOSSES = [
    *FORWARD,
    helper.make_node("LogSoftmax", ["logits"], ["logs"], axis=1),
    helper.make_node("Gather", ["classes", "y"], ["wanted"], axis=0),
    helper.make_node("Mul", ["wanted", "logs"], ["parts"]),
    helper.make_node("ReduceSum", ["parts", "along"], ["likelihoods"], keepdims=0),
    helper.make_node("Mul", ["likelihoods", "mask"], ["masked"]),
    helper.make_node("ReduceSum", ["masked"], ["total"], keepdims=0),
    helper.make_node("Neg", ["total"], ["loss_sum"]),
]
STEP = [
    *LOSSES,
    helper.make_node("ReduceSum", ["mask"], ["samples"], keepdims=0),
    helper.make_node("Max", ["samples", "one"], ["count"]),
    helper.make_node("Div", ["loss_sum", "count"], ["loss"]),
    helper.make_node("Softmax", ["logits"], ["shares"], axis=1),
    helper.make_node("Sub", ["shares", "wanted"], ["errors"]),
    helper.make_node("Unsqueeze", ["mask", "along"], ["column"]),
    helper.make_node("Mul", ["errors", "column"], ["kept"]),
    helper.make_node("Div", ["kept", "count"], ["slopes"]),
    helper.make_node("Transpose", ["x"], ["turned"], perm=[1, 0]),
    helper.make_node("MatMul", ["turned", "slopes"], ["w_gradient"]),
    helper.make_node("ReduceSum", ["slopes", "first"], ["b_gradient"], keepdims=0),
    helper.make_node("Mul", ["w_gradient", "learning_rate"], ["w_step"]),
    helper.make_node("Mul", ["b_gradient", "learning_rate"], ["b_step"]),
    helper.make_node("Sub", ["w", "w_step"], ["next.w"]),
    helper.make_node("Sub", ["b", "b_step"], ["next.b"]),
]
CONSTANTS = {
    "classes": np.eye(NUM_CLASSES, dtype=np.float32),
    "along": np.array([1], np.int64),
    "first": np.array([0], np.int64),
    "one": np.array(1.0, np.float32),
}
PARAMETERS = (port("w", NUM_INPUTS, NUM_CLASSES), port("b", NUM_CLASSES))
BATCH = (
    port("x", BATCH_SIZE, NUM_INPUTS),
    port("y", BATCH_SIZE, dtype=TensorProto.INT32),
    port("mask", BATCH_SIZE),
)


def train_graph(*, scaffold: bool = False) -> bytes:
    """Return a graph of one SGD step; with ``scaffold`` it adds the inputs ``control.<p>`` to the gradients."""
    outputs = (port("next.w", NUM_INPUTS, NUM_CLASSES), port("next.b", NUM_CLASSES), port("loss"))
    inputs = (*PARAMETERS, *BATCH, port("learning_rate"))
    if not scaffold:
        return file(STEP, inputs, outputs, CONSTANTS)
    corrections = [helper.make_node("Add", [f"{name}_gradient", f"control.{name}"], [f"{name}_sum"]) for name in "wb"]
    steps = [helper.make_node("Mul", [f"{name}_sum", "learning_rate"], [f"{name}_step"]) for name in "wb"]
    controls = (port("control.w", NUM_INPUTS, NUM_CLASSES), port("control.b", NUM_CLASSES))
    return file([*STEP[:-4], *corrections, *steps, *STEP[-2:]], (*inputs, *controls), outputs, CONSTANTS)


def evaluate_graph(*, masked: bool = True, has_logits: bool = False) -> bytes:
    """Return a graph of the summed loss and the predicted labels; with ``masked`` False it ignores the mask."""
    nodes = [*LOSSES, helper.make_node("ArgMax", ["logits"], ["chosen"], axis=1, keepdims=0)]
    if not masked:
        nodes[6] = helper.make_node("Add", ["likelihoods", "mask"], ["masked"])
    nodes.append(helper.make_node("Cast", ["chosen"], ["predicted"], to=TensorProto.INT32))
    outputs = (port("loss_sum"), port("predicted", BATCH_SIZE, dtype=TensorProto.INT32))
    if has_logits:
        outputs = (*outputs, port("logits", BATCH_SIZE, NUM_CLASSES))
    constants = {name: CONSTANTS[name] for name in ("classes", "along")}
    return file(nodes, (*PARAMETERS, *BATCH), outputs, constants)


def infer_graph(names: tuple[str, str] = ("w", "b")) -> bytes:
    """Return a graph of the float logits, with other constants than Version 0."""
    weight, bias = names
    nodes = [
        helper.make_node("MatMul", ["x", weight], ["products"]),
        helper.make_node("Add", ["products", bias], ["logits"]),
    ]
    constants = {weight: np.zeros_like(WEIGHT), bias: np.ones_like(BIAS)}
    return file(nodes, [port("x", "n", NUM_INPUTS)], [port("logits", "n", NUM_CLASSES)], constants)


def linear_graphs(*, scaffold: bool = False) -> AssembledGraphs:
    """Return the parts from which the Bundle is assembled."""
    return AssembledGraphs(
        name="linear",
        batch_size=BATCH_SIZE,
        num_classes=NUM_CLASSES,
        parameters={"w": WEIGHT, "b": BIAS},
        graphs={
            "onnx": {
                "train": train_graph(scaffold=scaffold),
                "evaluate": evaluate_graph(has_logits=True),
                "infer": infer_graph(),
            }
        },
    )


def numpy_step(
    w: np.ndarray, b: np.ndarray, x: np.ndarray, y: np.ndarray, rate: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """Compute the same step in float64. Return (next w, next b, mean loss)."""
    logits = x.astype(np.float64) @ w + b
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    targets = np.eye(NUM_CLASSES)[y]
    loss = -float(np.log((shares * targets).sum(axis=1)).mean())
    slopes = (shares - targets) / len(x)
    return w - rate * x.T @ slopes, b - rate * slopes.sum(axis=0), loss
