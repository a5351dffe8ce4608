"""The graph formats: each builds its graphs from the prepared module.

``FORMATS`` has one record for each format, with all that differs between formats in an export. A format yields files,
the file of each Signature, the ports, and the slots of its ``infer`` graph. Ports and derived constants are equal in
all formats; ``build`` checks this.

``tests/contracts/test_graph_formats.py`` runs one suite over all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

import torch

from fanin.edge.batch_sizes import with_batch
from fanin.edge.bundles.derived import Derived
from fanin.edge.bundles.slots import Slot
from fanin.edge.export.app.inputs.named import numpy_inputs
from fanin.edge.export.formats.int8.activations import Ranges, activations_of, notes_on_float
from fanin.edge.export.formats.int8.folding import Infer, fold_norms
from fanin.edge.export.formats.onnx.int8 import Int8Model, to_int8
from fanin.edge.export.formats.onnx.ranges import Calibration
from fanin.edge.export.formats.onnx.writer import inputs_to_initializers, to_onnx
from fanin.edge.export.formats.tflite.frozen import store_as_int8
from fanin.edge.export.formats.tflite.int8 import quantize_infer
from fanin.edge.export.formats.tflite.writer import to_tflite
from fanin.edge.export.graph.decompositions.tables import ONNX, TFLITE, Forms
from fanin.edge.export.graph.forward import trace_evaluate, trace_infer
from fanin.edge.export.graph.traced import Traced
from fanin.edge.export.graph.train import trace_train
from fanin.edge.export.module.lengths import at_length, each_length
from fanin.edge.export.module.prepare import Prepared
from fanin.edge.export.refusals import NoForm, Place
from fanin.edge.ranges import LEVELS, MIN_INPUT_SCALE, Activation
from fanin.edge.runtimes.graphs import parameter_port
from fanin.edge.signatures import Port, Ports
from fanin.protos.errors import UnsupportedModel

MODEL_FILE: Final = "model.tflite"
DTYPES: Final[Mapping[torch.dtype, str]] = {torch.float32: "float32", torch.int32: "int32"}
"""The element types that a port can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graphs:
    """The graphs of an App in one format."""

    files: Mapping[str, bytes]
    signatures: Mapping[str, str]
    """The file of each Signature."""
    ports: Mapping[str, Ports]
    slots: tuple[Slot, ...]
    derived: Derived
    """The sources of slots besides parameters."""
    ranges: Ranges
    """The range of each quantized tensor of ``infer``."""
    activations: tuple[Activation, ...]
    """Those of them whose grids are slots."""
    shorter: Mapping[int, tuple[Slot, ...]] = field(default_factory=dict)
    """The slots of ``infer`` for each shorter length. ``files`` and ``signatures`` have its graphs, too."""
    notes: Sequence[str] = ()
    """Weights that stay float in ``infer``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFormat:
    """One graph format.

    Attributes:
        forms: Its decompositions.
        make: Builds all graphs of an App for one length, with given ranges of activations, or with those of its
            calibration data (None). Raises UnsupportedModel.
        make_train: Builds the file of the train graph alone, for one length, and its ports. Raises UnsupportedModel.
        encode: (Signature, graph, prefix of error messages) -> a file with this graph alone: ``preprocess``, or a layer
            whose form is tested. Raises UnsupportedModel.
        num_samples: Samples in one call of a graph without a backward pass; 0 for any number.
        runtime: Name of the runtime that verifies the graphs.
    """

    forms: Forms
    make: Callable[[Prepared, Ranges | None], Graphs]
    make_train: Callable[[Prepared], tuple[bytes, Ports]]
    encode: Callable[[str, Traced, str], bytes]
    num_samples: int
    runtime: str


def onnx_graphs(prepared: Prepared, ranges: Ranges | None = None) -> Graphs:
    """Return one ONNX file for each Signature. Raises UnsupportedModel."""
    traced = {"train": trace_train(prepared, ONNX), "evaluate": trace_evaluate(prepared, ONNX)}
    infer = fold_norms(trace_infer(prepared), prepared, ONNX)
    models = {name: to_onnx(graph, f"{prepared.what}: the {name} graph") for name, graph in traced.items()}
    quantized = onnx_infer(prepared, infer, ranges)
    models["infer"] = quantized.model
    return Graphs(
        files={f"{name}.onnx": model.SerializeToString(deterministic=True) for name, model in models.items()},
        signatures={name: f"{name}.onnx" for name in models},
        ports={name: ports_of(prepared, graph) for name, graph in traced.items()}
        | {"infer": infer_ports(prepared, infer.traced)},
        slots=quantized.slots,
        derived=infer.derived,
        ranges=quantized.ranges,
        activations=activations_of("onnx", quantized.ranges, quantized.slots),
        notes=notes_on_float("onnx", infer, quantized.slots, prepared.kept_float),
    )


def onnx_train(prepared: Prepared) -> tuple[bytes, Ports]:
    """Return the ONNX file of the train graph, and its ports. Raises UnsupportedModel."""
    traced = trace_train(prepared, ONNX)
    return _onnx_file("train", traced, f"{prepared.what}: the train graph"), ports_of(prepared, traced)


def onnx_infer(prepared: Prepared, infer: Infer, ranges: Ranges | None = None) -> Int8Model:
    """Return the int8 ``infer`` graph. Raises UnsupportedModel."""
    for name, layer in prepared.module.named_modules():
        if isinstance(layer, torch.nn.RNNBase) and layer.proj_size:
            place = Place(module=name, kind=type(layer).__name__)
            raise NoForm(
                f"{prepared.what}: {place} has proj_size={layer.proj_size}, expected 0: ONNX has no recurrent layer "
                "with a projection",
                "use proj_size=0 and a linear layer after it",
                place,
                code="FN-0783",
            )
    float_infer = to_onnx(infer.traced, f"{prepared.what}: the infer graph")
    inputs_to_initializers(float_infer, {parameter_port(name): value for name, value in infer.values.items()})
    calibration = Calibration(numpy_inputs(prepared.app.inputs), prepared.app.batch_size)
    return to_int8(float_infer, infer, calibration, prepared.kept_float, ranges)


def tflite_graphs(prepared: Prepared, ranges: Ranges | None = None) -> Graphs:
    """Return one TFLite file for all Signatures. Raises UnsupportedModel."""
    # The train step first: its errors name modules and lines that ``infer`` does not have.
    traced = {"train": trace_train(prepared, TFLITE), "evaluate": trace_evaluate(prepared, TFLITE)}
    infer = fold_norms(trace_infer(prepared, 1), prepared, TFLITE)
    traced["infer"] = infer.traced
    data = _tflite_data(prepared, traced)
    quantized = quantize_infer(data, infer, numpy_inputs(prepared.app.inputs), prepared.kept_float, ranges)
    return Graphs(
        files={MODEL_FILE: quantized.data},
        signatures=dict.fromkeys(traced, MODEL_FILE),
        ports={name: ports_of(prepared, traced[name]) for name in ("train", "evaluate")}
        | {"infer": infer_ports(prepared, traced["infer"])},
        slots=quantized.slots,
        derived=infer.derived,
        ranges=quantized.ranges,
        activations=activations_of("tflite", quantized.ranges, quantized.slots),
        notes=notes_on_float("tflite", infer, quantized.slots, prepared.kept_float),
    )


def tflite_train(prepared: Prepared) -> tuple[bytes, Ports]:
    """Return a TFLite file of the train graph alone, and its ports. Raises UnsupportedModel."""
    traced = trace_train(prepared, TFLITE)
    return _tflite_data(prepared, {"train": traced}), ports_of(prepared, traced)


def _tflite_data(prepared: Prepared, traced: Mapping[str, Traced]) -> bytes:
    data = to_tflite(traced, f"{prepared.what}: the graphs")
    return store_as_int8(data) if prepared.frozen else data


def graphs_of(prepared: Prepared, graph_format: "GraphFormat") -> Graphs:
    """Return the graphs of an App in one format, for all of its lengths and batch sizes. Raises UnsupportedModel."""
    graphs = _of_lengths(prepared, graph_format)
    _check_scales(prepared, graphs)
    for size in prepared.app.other_batch_sizes:
        for name, single in each_length(prepared.for_batches(size)):
            data, ports = graph_format.make_train(single)
            signature, file = with_batch(name, size), with_batch(graphs.signatures[name], size)
            graphs = replace(
                graphs,
                files={**graphs.files, file: data},
                signatures={**graphs.signatures, signature: file},
                ports={**graphs.ports, signature: ports},
            )
    return graphs


def _check_scales(prepared: Prepared, graphs: Graphs) -> None:
    """Raise UnsupportedModel for a layer whose input is too large or too small for int8 with its bias."""
    spans = {row.name: row.high - row.low for row in graphs.activations}
    for slot in graphs.slots:
        span = spans.get(slot.activation, slot.input_scale * LEVELS)
        if slot.weight and span and not MIN_INPUT_SCALE <= span / LEVELS <= 1.0 / MIN_INPUT_SCALE:
            path = slot.weight.rpartition(".")[0]
            kind = type(dict(prepared.eager.named_modules()).get(path, prepared.eager)).__name__
            raise UnsupportedModel(
                f"{prepared.what}: module {path or 'itself'} ({kind}) receives values of up to about {span:.1e} on the "
                f"calibration data, expected at least {LEVELS * MIN_INPUT_SCALE:.1e} and at most "
                f"{LEVELS / MIN_INPUT_SCALE:.1e}; scale the data, or put a norm before the module",
                code="FN-0785",
            )


def _of_lengths(prepared: Prepared, graph_format: "GraphFormat") -> Graphs:
    graphs, lengths = graph_format.make(prepared, None), prepared.app.lengths
    if lengths is None:
        return graphs
    for size in lengths.shorter:
        short = graph_format.make(at_length(prepared, size), graphs.ranges)
        if short.derived != graphs.derived:
            raise UnsupportedModel(
                f"{prepared.what}: the graphs of the length {size} have other constants than those of the longest, "
                "expected the same; please report the module",
                code="FN-0742",
            )
        graphs = replace(
            graphs,
            files={**graphs.files, **{f"{name}@{size}": data for name, data in short.files.items()}},
            signatures={
                **graphs.signatures,
                **{f"{key}@{size}": f"{name}@{size}" for key, name in short.signatures.items()},
            },
            ports={**graphs.ports, **{f"{key}@{size}": ports for key, ports in short.ports.items()}},
            shorter={**graphs.shorter, size: short.slots},
        )
    return graphs


def ports_of(prepared: Prepared, traced: Traced) -> Ports:
    """Return the ports of a traced Signature. Raises UnsupportedModel for a dtype that no port can have."""
    outputs = traced.program.graph_module.graph.output_node().args[0]
    assert isinstance(outputs, tuple | list), "a traced function returns a tuple"
    values = [node.meta["val"] for node in outputs]
    rows = []
    for names, tensors in ((traced.inputs, traced.examples), (traced.outputs, values)):
        ports = []
        for name, tensor in zip(names, tensors, strict=True):
            if tensor.dtype not in DTYPES:
                raise UnsupportedModel(
                    f"{prepared.what}: {name!r} is {tensor.dtype}, expected one of {[str(dtype) for dtype in DTYPES]}; "
                    "convert it in the module",
                    code="FN-0761",
                )
            shape = tuple(size if isinstance(size, int) else -1 for size in tensor.shape)
            ports.append(Port(name=name, dtype=DTYPES[tensor.dtype], shape=shape))
        rows.append(tuple(ports))
    return rows[0], rows[1]


def infer_ports(prepared: Prepared, traced: Traced) -> Ports:
    """Return the ports of ``infer``: parameters are slots, and the number of samples is free in every format."""
    inputs, outputs = ports_of(prepared, traced)
    own, (logits,) = inputs[-len(prepared.app.inputs) :], outputs
    return tuple(_of_any_batch(port) for port in own), (_of_any_batch(logits),)


def _of_any_batch(port: Port) -> Port:
    return Port(name=port.name, dtype=port.dtype, shape=(-1, *port.shape[1:]))


def _onnx_file(signature: str, traced: Traced, what: str) -> bytes:
    data: bytes = to_onnx(traced, what).SerializeToString(deterministic=True)
    return data


def _tflite_file(signature: str, traced: Traced, what: str) -> bytes:
    return to_tflite({signature: traced}, what)


FORMATS: Final[Mapping[str, GraphFormat]] = MappingProxyType(
    {
        row.forms.graph_format: row
        for row in (
            GraphFormat(
                forms=ONNX,
                make=onnx_graphs,
                make_train=onnx_train,
                encode=_onnx_file,
                num_samples=0,
                runtime="onnx",
            ),
            GraphFormat(
                forms=TFLITE,
                make=tflite_graphs,
                make_train=tflite_train,
                encode=_tflite_file,
                num_samples=1,
                runtime="litert",
            ),
        )
    }
)
"""The graph formats by name."""
