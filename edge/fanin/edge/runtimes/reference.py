"""The runtime over ONNX's own reference evaluator, which runs operator after operator in numpy.

It is slow and simple: a twin for tests, and a second opinion on doubtful results. It needs the onnx package (the
``export`` extra), so a device uses it only if it is selected by name.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.quantize import SlotValue, fill_slots
from fanin.edge.runtimes.base import Evaluate, LoadedModel, ModelPort, Predict, TrainStep
from fanin.edge.runtimes.graphs import Feed, GraphEvaluate, GraphPredict, RunGraph
from fanin.edge.runtimes.models import GraphModel
from fanin.edge.runtimes.stepping import GraphTrainStep, bind_by_copy
from fanin.edge.tensors import Array, Float32s
from fanin.protos.errors import InvalidBundle

FORMAT: Final = "onnx"


class ReferenceRuntime:
    """A ``Runtime`` over ``onnx.reference``."""

    @property
    def name(self) -> str:
        return f"onnx.reference {onnx.__version__}"

    @property
    def graph_format(self) -> str:
        return FORMAT

    def open_train(self, bundle: Bundle) -> TrainStep:
        return GraphTrainStep(bundle.manifest, bind_by_copy(_open(bundle, "train", {})))

    def open_evaluate(self, bundle: Bundle) -> Evaluate:
        return GraphEvaluate(bundle.manifest, _open(bundle, "evaluate", {}))

    def open_predict(self, bundle: Bundle, parameters: Float32s) -> Predict:
        manifest = bundle.manifest
        values = fill_slots(manifest.slots.get(FORMAT, ()), manifest.table, parameters, manifest.derived)
        return GraphPredict(bundle.manifest, _open(bundle, "infer", values))

    def open_model(self, graph: bytes, what: str, signature: str = "") -> LoadedModel:
        model, run = _load(graph, what, {})
        # Before IR version 4 every constant is also listed as an input.
        constants = {constant.name for constant in model.graph.initializer}
        inputs = [_port(what, node) for node in model.graph.input if node.name not in constants]
        return GraphModel(inputs, [_port(what, node) for node in model.graph.output], run)


def embed_slots(model: onnx.ModelProto, slots: Mapping[str, SlotValue]) -> onnx.ModelProto:
    """Return a copy of a model in which the slots' values are ordinary initializers.

    Raises:
        InvalidBundle: The graph lacks the initializer of a slot.
    """
    edited = onnx.ModelProto()
    edited.CopyFrom(model)
    initializers = {initializer.name: initializer for initializer in edited.graph.initializer}
    for name, value in slots.items():
        if name not in initializers:
            raise InvalidBundle(f"infer graph: has no initializer {name!r}, which the manifest lists as a slot")
        initializers[name].CopyFrom(numpy_helper.from_array(value, name))
    return edited


def _open(bundle: Bundle, signature: str, slots: Mapping[str, SlotValue]) -> RunGraph:
    _, run = _load(bundle.graph(signature, FORMAT), f"{signature} graph", slots)
    return run


def _load(graph: bytes, what: str, slots: Mapping[str, SlotValue]) -> tuple[onnx.ModelProto, RunGraph]:
    try:
        model = embed_slots(onnx.load_from_string(graph), slots)
        onnx.checker.check_model(model)
        evaluator = ReferenceEvaluator(model)
    except (DecodeError, onnx.checker.ValidationError, RuntimeError) as exc:
        raise InvalidBundle(f"{what}: the reference evaluator cannot open it ({exc})") from exc

    def run(outputs: Sequence[str], feed: Feed) -> Sequence[Array]:
        try:
            arrays = evaluator.run(list(outputs), dict(feed))
        except (ValueError, TypeError, LookupError, RuntimeError) as exc:
            raise InvalidBundle(f"{what}: the reference evaluator cannot run it ({exc})") from exc
        return [np.asarray(array) for array in arrays]

    return model, run


def _port(what: str, node: onnx.ValueInfoProto) -> ModelPort:
    """Return an input's or output's facts, with -1 for a variable length.

    Raises:
        InvalidBundle: It is not a tensor of numbers.
    """
    tensor = node.type.tensor_type
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type) if tensor.elem_type else np.dtype(object)
    if dtype.kind not in "biuf":
        raise InvalidBundle(f"{what}: {node.name!r} is {node.type.WhichOneof('value')} of {dtype}, expected numbers")
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim)
    return ModelPort(name=node.name, dtype=dtype.name, shape=shape)
