"""ONNX's own reference evaluator as an engine, which runs operator after operator in numpy.

It is slow and simple: a twin for tests, and a second opinion on doubtful results. It needs the onnx package (the
``export`` extra), so a device uses it only if it is selected by name.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import helper
from onnx.reference import ReferenceEvaluator

from fanin.edge.runtimes.base import ModelPort
from fanin.edge.runtimes.engine import Feed, GraphEngine, GraphFile, LoadedGraph
from fanin.edge.tensors import Array
from fanin.protos.errors import InvalidBundle

ERRORS: Final = (DecodeError, onnx.checker.ValidationError, RuntimeError, ValueError, TypeError, LookupError)


def reference_engine() -> GraphEngine:
    """Return the engine over ``onnx.reference``."""
    return GraphEngine(name="onnx.reference", version=onnx.__version__, graph_format="onnx", load=_load, errors=ERRORS)


def _load(file: GraphFile) -> LoadedGraph:
    model = onnx.load_from_string(file.filled())
    onnx.checker.check_model(model)
    evaluator = ReferenceEvaluator(model)

    def run(outputs: Sequence[str], feed: Feed) -> Sequence[Array]:
        return [np.asarray(array) for array in evaluator.run(list(outputs), dict(feed))]

    # Before IR version 4 every constant is also listed as an input.
    constants = {constant.name for constant in model.graph.initializer}
    inputs = [node for node in model.graph.input if node.name not in constants]
    return LoadedGraph(
        inputs=tuple(_port(file.what, node) for node in inputs),
        outputs=tuple(_port(file.what, node) for node in model.graph.output),
        run=run,
    )


def _port(what: str, node: onnx.ValueInfoProto) -> ModelPort:
    """Return an input's or output's facts, with -1 for a variable length.

    Raises:
        InvalidBundle: It is not a tensor of numbers.
    """
    tensor = node.type.tensor_type
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type) if tensor.elem_type else np.dtype(object)
    if dtype.kind not in "biuf":
        raise InvalidBundle(
            f"{what}: {node.name!r} is {node.type.WhichOneof('value')} of {dtype}, expected numbers", code="FN-0410"
        )
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim)
    return ModelPort(name=node.name, dtype=dtype.name, shape=shape)
