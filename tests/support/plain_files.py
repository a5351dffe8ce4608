"""Standalone model files, run by onnxruntime and LiteRT alone: as a program without fanin runs them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import onnxruntime
from ai_edge_litert.interpreter import Interpreter

from fanin.edge.tensors import Float32s


def in_onnxruntime(data: bytes, x: Float32s) -> Float32s:
    """Compute the logits of a file with onnxruntime alone."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    assert [port.name for port in session.get_inputs()] == ["x"]
    logits: Float32s = session.run(["logits"], {"x": x})[0]
    return logits


def in_litert(data: bytes, x: Float32s) -> Float32s:
    """Compute the logits of a file with LiteRT alone, one sample at a time."""
    interpreter = Interpreter(model_content=data, num_threads=1)
    assert {name: (row["inputs"], row["outputs"]) for name, row in interpreter.get_signature_list().items()} == {
        "infer": (["x"], ["logits"])
    }
    interpreter.allocate_tensors()
    (source,), (target,) = interpreter.get_input_details(), interpreter.get_output_details()
    rows = []
    for row in x:
        interpreter.set_tensor(source["index"], row[None])
        interpreter.invoke()
        rows.append(interpreter.get_tensor(target["index"]))
    return np.concatenate(rows)


LIBRARIES: Final[Mapping[str, tuple[str, Callable[[bytes, Float32s], Float32s]]]] = MappingProxyType(
    {"onnx": ("onnx", in_onnxruntime), "tflite": ("litert", in_litert)}
)
"""The name of the runtime, and the function that runs a file, by graph format."""
