"""A linear regression model whose graphs are written node by node. Its int8 graph predicts too large values."""

import numpy as np
import onnx
from onnx import helper

from fanin.edge.assembly.assemble import AssembledGraphs
from support.linear import file, port

NUM_INPUTS, BATCH_SIZE = 3, 4
TOO_MUCH = 1.5
"""Factor by which the ``infer`` graph's predictions are too large."""
WEIGHT = np.array([[1.0], [-2.0], [0.5]], np.float32)
FORWARD = helper.make_node("MatMul", ["x", "w"], ["values"])
LOSSES = [
    FORWARD,
    helper.make_node("Sub", ["values", "y"], ["errors"]),
    helper.make_node("Unsqueeze", ["mask", "along"], ["column"]),
    helper.make_node("Mul", ["errors", "column"], ["kept"]),
    helper.make_node("Mul", ["kept", "kept"], ["squares"]),
    helper.make_node("ReduceSum", ["squares"], ["loss_sum"], keepdims=0),
]
STEP = [
    *LOSSES,
    helper.make_node("ReduceSum", ["mask"], ["samples"], keepdims=0),
    helper.make_node("Max", ["samples", "one"], ["count"]),
    helper.make_node("Div", ["loss_sum", "count"], ["loss"]),
    helper.make_node("Div", ["kept", "count"], ["slopes"]),
    helper.make_node("Transpose", ["x"], ["turned"], perm=[1, 0]),
    helper.make_node("MatMul", ["turned", "slopes"], ["gradient"]),
    helper.make_node("Mul", ["gradient", "learning_rate"], ["change"]),
    helper.make_node("Sub", ["w", "change"], ["next.w"]),
]
CONSTANTS = {"along": np.array([1], np.int64), "one": np.array(1.0, np.float32)}
PORTS = (
    port("w", NUM_INPUTS, 1),
    port("x", BATCH_SIZE, NUM_INPUTS),
    port("y", BATCH_SIZE, 1),
    port("mask", BATCH_SIZE),
)


def examples(num: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (x, y) in which y is the model's prediction plus noise."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((num, NUM_INPUTS)).astype(np.float32)
    return x, (x @ WEIGHT + noise * rng.standard_normal((num, 1))).astype(np.float32)


def scalar_graphs() -> AssembledGraphs:
    """Return the parts from which the Bundle is assembled."""
    train = file(STEP, (*PORTS, port("learning_rate")), (port("next.w", NUM_INPUTS, 1), port("loss")), CONSTANTS)
    prediction = helper.make_node("Identity", ["values"], ["predicted"])
    evaluate = file(
        [*LOSSES, prediction],
        PORTS,
        (port("loss_sum"), port("predicted", BATCH_SIZE, 1)),
        {"along": CONSTANTS["along"]},
    )
    scaling: onnx.NodeProto = helper.make_node("Mul", ["values", "too_much"], ["logits"])
    infer = file(
        [FORWARD, scaling],
        [port("x", "n", NUM_INPUTS)],
        [port("logits", "n", 1)],
        {"w": np.zeros_like(WEIGHT), "too_much": np.array(TOO_MUCH, np.float32)},
    )
    return AssembledGraphs(
        name="scalar",
        batch_size=BATCH_SIZE,
        num_classes=0,
        parameters={"w": WEIGHT},
        graphs={"onnx": {"train": train, "evaluate": evaluate, "infer": infer}},
    )
