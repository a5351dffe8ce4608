"""A metric that is an ONNX graph."""

from pathlib import Path

import onnx
from onnx import TensorProto, helper


def write_graph(path: Path, output: str = "Mean", shape: tuple[int, ...] = (), form: str = "predictions") -> Path:
    """Write an ONNX graph that computes the accuracy, or of logits their mean or maximum."""
    nodes = [
        helper.make_node("Equal", ["predictions", "targets"], ["is_equal"]),
        helper.make_node("Cast", ["is_equal"], ["hits"], to=TensorProto.FLOAT),
        helper.make_node(f"Reduce{output}", ["hits"], ["value"], keepdims=len(shape)),
    ]
    if form == "logits":
        nodes = [helper.make_node(f"Reduce{output}", ["logits"], ["value"], keepdims=len(shape))]
    labels = [helper.make_tensor_value_info(name, TensorProto.INT32, ["n"]) for name in ("predictions", "targets")]
    if form == "logits":
        labels[0] = helper.make_tensor_value_info(form, TensorProto.FLOAT, ["n", "classes"])
    value = helper.make_tensor_value_info("value", TensorProto.FLOAT, list(shape))
    graph = helper.make_graph(nodes, "metric", labels, [value])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path
