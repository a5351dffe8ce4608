"""The float model of a Version, from its App: traced as at the export, with the Version's parameters as constants.

Two checks come before a file is returned:

1. The App is the Bundle's. Its loss and its predictions on one batch equal those of the Bundle's ``evaluate`` graph, so
   frozen weights are equal, too. A Version does not contain them.
2. The file equals eager torch on calibration data.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from ai_edge_litert import schema_py_generated as schema

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.quantize import with_derived
from fanin.edge.export.app.app import App
from fanin.edge.export.app.inputs.named import numpy_inputs
from fanin.edge.export.app.inputs.outputs import Output
from fanin.edge.export.app.losses import loss_sum
from fanin.edge.export.app.optimizers.optimizer import Tensors
from fanin.edge.export.formats.graphs import FORMATS
from fanin.edge.export.formats.int8.folding import Infer, fold_norms
from fanin.edge.export.formats.onnx.writer import inputs_to_initializers, to_onnx
from fanin.edge.export.formats.tflite.bound import bind_parameters, join_biases
from fanin.edge.export.formats.tflite.file import pack, tidy
from fanin.edge.export.formats.tflite.flatgraph import FlatGraph
from fanin.edge.export.formats.tflite.writer import to_tflite
from fanin.edge.export.graph.examples import check_output, example_batch, loss_targets
from fanin.edge.export.graph.forward import trace_infer
from fanin.edge.export.module.lengths import at_length
from fanin.edge.export.module.prepare import Module, Prepared, prepare, with_parameters
from fanin.edge.export.standalone.quantized import INFER, check_format
from fanin.edge.lengths import Lengths
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import Inputs, PaddedBatch, Runtime
from fanin.edge.runtimes.graphs import parameter_port
from fanin.edge.runtimes.models import run_rows
from fanin.edge.tensors import Float32s
from fanin.protos.errors import InvalidInput, UnsupportedModel

TOLERANCE: Final = 1e-4
"""Relative to the norm of the logits, or to the loss: the effect of other orders of additions."""
COMPARED_SAMPLES: Final = 16
EXPORTED: Final = "pass the App that was exported, with the same output="
Values = Mapping[str, Float32s]


def float_models(app: App, bundle: Bundle, parameters: Float32s, graph_format: str) -> dict[str, bytes]:
    """Return a file that has only the float model of a Version, for each length, by Signature.

    Args:
        app: The App that was exported as ``bundle``.
        bundle: The Bundle of the Version.
        parameters: The Version's parameters (num_values,). Personal parameters have their initial values.
        graph_format: A format of the Bundle.

    Raises:
        InvalidInput: The App is not the Bundle's, or the Bundle has no graphs in this format.
        UnsupportedModel: The file differs from eager torch.
    """
    check_format(bundle, graph_format)
    prepared, completed = prepare(app), bundle.completed(parameters)
    if app.lengths != bundle.manifest.lengths:
        raise InvalidInput(
            f"{prepared.what}: got {_shown(app.lengths)}, expected {_shown(bundle.manifest.lengths)} as in the Bundle; "
            "pass the App that was exported",
            code="FN-0795",
        )
    singles = {INFER: (prepared, bundle)}
    if app.lengths is not None:
        sizes = {app.lengths.signature(INFER, size): size for size in reversed(app.lengths.sizes)}
        singles = {name: (at_length(prepared, size), bundle.at(size)) for name, size in sizes.items()}
    return {name: _float_model(*single, completed, graph_format) for name, single in singles.items()}


def _shown(lengths: Lengths | None) -> str:
    if lengths is None:
        return "no lengths"
    return f"the lengths {list(lengths.sizes)}, axes {dict(lengths.axes)} and padding {dict(lengths.padding)}"


def _float_model(prepared: Prepared, bundle: Bundle, completed: Float32s, graph_format: str) -> bytes:
    row, views = FORMATS[graph_format], bundle.manifest.model_table.views(completed)
    module = with_parameters(prepared.app, views)
    runtime = open_runtime(row.runtime)
    _check_app(prepared, bundle, runtime, (module, completed))
    infer = fold_norms(trace_infer(prepared, row.num_samples), prepared, row.forms)
    sources = with_derived(views, infer.derived)
    values = {name: sources[name] for name in infer.values}
    data = WRITERS[graph_format](infer, values, f"{prepared.what}: the float model")
    _check_logits(prepared, module, runtime, data)
    return data


def _check_app(prepared: Prepared, bundle: Bundle, runtime: Runtime, trained: tuple[Module, Float32s]) -> None:
    app, manifest, (module, parameters) = prepared.app, bundle.manifest, trained
    if (app.batch_size, app.num_classes) != (manifest.batch_size, manifest.num_classes):
        raise InvalidInput(
            f"{prepared.what}: got batch_size {app.batch_size} and num_classes {app.num_classes}, expected "
            f"{manifest.batch_size} and {manifest.num_classes} as in the Bundle; pass the App that was exported",
            code="FN-0795",
        )
    inputs, y, mask = example_batch(prepared)
    batch = PaddedBatch(inputs=numpy_inputs(inputs), y=y.numpy(), mask=mask.numpy())
    try:
        evaluation = runtime.open_evaluate(bundle)(parameters, batch)
    except ValueError as exc:
        raise InvalidInput(
            f"{prepared.what}: does not fit the Bundle ({exc}); pass the App that was exported", code="FN-0795"
        ) from exc
    with torch.no_grad():
        output = _output(app, module, inputs)
        expected = float(loss_sum(app.loss, output, loss_targets(y), mask))
    loss = evaluation.loss_sum
    if not abs(loss - expected) <= TOLERANCE * max(1.0, abs(expected)):
        raise InvalidInput(
            f"{prepared.what}: has a loss of {expected:g} on its calibration data with the Version's parameters, "
            f"expected that of the Bundle, {loss:g}: its frozen weights or its data are others; pass the App that was "
            "exported, with a seed for random weights",
            code="FN-0795",
        )
    _check_predictions(prepared, app.predicted(output).numpy(), evaluation.predicted)


def _check_predictions(prepared: Prepared, logits: Float32s, predictions: Inputs) -> None:
    """Raise InvalidInput unless the Bundle predicts the values of the App, or the classes of its largest logits."""
    shape = logits.shape[:-1] if prepared.app.num_classes else logits.shape
    if shape != predictions.shape:
        raise InvalidInput(
            f"{prepared.what}: predicts the shape {shape}, expected {predictions.shape} as in the Bundle; {EXPORTED}",
            code="FN-0795",
        )
    actual, expected = predictions, logits
    if prepared.app.num_classes:
        # The order of additions decides between classes of almost equal logits.
        actual = np.take_along_axis(logits, predictions[..., None].astype(np.intp), axis=-1)
        expected = logits.max(axis=-1, keepdims=True)
    error = float(np.linalg.norm(actual - expected))
    if not error <= TOLERANCE * max(1.0, float(np.linalg.norm(logits))):
        raise InvalidInput(
            f"{prepared.what}: has other predictions on its calibration data than the Bundle, with the Version's "
            f"parameters; {EXPORTED}",
            code="FN-0795",
        )


def _check_logits(prepared: Prepared, module: Module, runtime: Runtime, data: bytes) -> None:
    inputs = prepared.app.examples(COMPARED_SAMPLES)
    with torch.no_grad():
        expected = prepared.app.predicted(_output(prepared.app, module, inputs)).numpy()
    model = runtime.open_model(data, f"{prepared.what}: the float model")
    logits = run_rows(model, numpy_inputs(inputs))["logits"]
    error = float(np.linalg.norm(logits - expected))
    if not error <= TOLERANCE * float(np.linalg.norm(expected)):
        raise UnsupportedModel(
            f"{prepared.what}: the float model in {runtime.name} differs from torch's logits by {error:.1e} in norm, "
            f"expected at most {TOLERANCE:.0e} of their norm; please report the module",
            code="FN-0789",
        )


def _output(app: App, module: Module, inputs: Tensors) -> Output:
    return check_output(app, app.call(module, inputs))


def _onnx_file(infer: Infer, values: Values, what: str) -> bytes:
    model = to_onnx(infer.traced, what)
    inputs_to_initializers(model, {parameter_port(name): value for name, value in values.items()})
    # Folded norms and weights leave their parts unused, and onnxruntime warns of each.
    used = {name for node in model.graph.node for name in node.input} | {port.name for port in model.graph.output}
    kept = [value for value in model.graph.initializer if value.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def _tflite_file(infer: Infer, values: Values, what: str) -> bytes:
    model = schema.ModelT.InitFromPackedBuf(to_tflite({INFER: infer.traced}, what))
    graph = FlatGraph(model, INFER)
    join_biases(graph, bind_parameters(graph, values), infer.scales)
    tidy(model)
    return pack(model)


WRITERS: Final[Mapping[str, Callable[[Infer, Values, str], bytes]]] = MappingProxyType(
    {"onnx": _onnx_file, "tflite": _tflite_file}
)
"""(graph, values of its parameters, prefix of error messages) -> the file, by graph format."""
