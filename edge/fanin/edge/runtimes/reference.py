"""The plain twin: ONNX's own reference evaluator, operator after operator in numpy.

Slow and simple, for tests and for a second opinion when a runtime gives doubtful numbers. It needs the onnx
package (the ``export`` extra), so no device picks it unless it is asked for by name.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from fanin.edge.bundle import Bundle
from fanin.edge.quantize import SlotValue, fill_slots
from fanin.edge.runtimes.base import Evaluate, Predict, TrainStep
from fanin.edge.runtimes.graphs import Array, Feed, GraphEvaluate, GraphPredict, GraphTrainStep, RunGraph
from fanin.edge.tensors import Float32s
from fanin.protos.errors import InvalidBundle


class ReferenceRuntime:
    """A ``Runtime`` over ``onnx.reference``."""

    @property
    def name(self) -> str:
        return f"onnx.reference {onnx.__version__}"

    def open_train(self, bundle: Bundle) -> TrainStep:
        return GraphTrainStep(bundle.manifest, _open(bundle, "train", {}))

    def open_evaluate(self, bundle: Bundle) -> Evaluate:
        return GraphEvaluate(bundle.manifest, _open(bundle, "evaluate", {}))

    def open_predict(self, bundle: Bundle, parameters: Float32s) -> Predict:
        values = fill_slots(bundle.manifest.slots, bundle.manifest.table, parameters)
        return GraphPredict(bundle.manifest, _open(bundle, "infer", values))


def embed_slots(model: onnx.ModelProto, slots: Mapping[str, SlotValue]) -> onnx.ModelProto:
    """The model with the slots' values written into it, as a file of its own would have them.

    Raises InvalidBundle if the graph has no such initializer.
    """
    edited = onnx.ModelProto()
    edited.CopyFrom(model)
    places = {found.name: found for found in edited.graph.initializer}
    for name, value in slots.items():
        if name not in places:
            raise InvalidBundle(f"infer graph: has no initializer {name!r}, which the manifest lists as a slot")
        places[name].CopyFrom(numpy_helper.from_array(value, name))
    return edited


def _open(bundle: Bundle, signature: str, slots: Mapping[str, SlotValue]) -> RunGraph:
    graph = bundle.graph(signature, "onnx")
    try:
        model = embed_slots(onnx.load_from_string(graph), slots)
        onnx.checker.check_model(model)
        evaluator = ReferenceEvaluator(model)
    except (DecodeError, onnx.checker.ValidationError) as exc:
        raise InvalidBundle(f"{signature} graph: the reference evaluator cannot open it ({exc})") from exc

    def run(outputs: Sequence[str], feed: Feed) -> Sequence[Array]:
        try:
            arrays = evaluator.run(list(outputs), dict(feed))
        except (ValueError, TypeError, LookupError, RuntimeError) as exc:
            raise InvalidBundle(f"{signature} graph: the reference evaluator cannot run it ({exc})") from exc
        return [np.asarray(array) for array in arrays]

    return run
