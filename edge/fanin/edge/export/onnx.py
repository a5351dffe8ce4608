"""Traced Signatures as ONNX models, with nothing in them but the graph.

The exporter writes stack traces, source paths and versions into a model; a Bundle travels to strangers, so they
are taken out. Its warnings concern operators and internals of its own, never the App; just those are kept from
the user.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import onnx
import torch
from onnx import TensorProto, numpy_helper

from fanin.edge.export.trace import Traced
from fanin.edge.manifest import Port
from fanin.edge.tensors import Float32s
from fanin.protos.errors import UnsupportedModel

DTYPES: Final[Mapping[int, str]] = {TensorProto.FLOAT: "float32", TensorProto.INT64: "int64"}
"""The element types of ports that Signatures have."""
REGISTRY_LOGGER: Final = "torch.onnx._internal.exporter._registration"


def to_onnx(traced: Traced, what: str) -> onnx.ModelProto:
    """The model of a Signature. Raises UnsupportedModel if an operator has no ONNX form."""
    try:
        with quiet_exporter():
            found = torch.onnx.export(
                traced.program,
                dynamo=True,
                input_names=list(traced.inputs),
                output_names=list(traced.outputs),
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as exc:
        raise UnsupportedModel(
            f"{what}: cannot become ONNX ({_cause(exc)}); "
            "replace the operator that it names, or freeze that part of the model"
        ) from exc
    assert found is not None, "dynamo=True always gives a program"
    model = found.model_proto
    _strip(model)
    return model


def inputs_to_initializers(model: onnx.ModelProto, values: dict[str, Float32s]) -> None:
    """Turn the named inputs into initializers with these values: what was an argument becomes a constant."""
    kept = [port for port in model.graph.input if port.name not in values]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())


def ports(found: "list[onnx.ValueInfoProto]", what: str) -> tuple[Port, ...]:
    """Inputs or outputs as a manifest lists them. Raises UnsupportedModel for a dtype that no Signature has."""
    rows = []
    for value in found:
        tensor = value.type.tensor_type
        if tensor.elem_type not in DTYPES:
            raise UnsupportedModel(
                f"{what}: {value.name!r} has element type {tensor.elem_type}, expected {list(DTYPES.values())}"
            )
        shape = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim)
        rows.append(Port(name=value.name, dtype=DTYPES[tensor.elem_type], shape=shape))
    return tuple(rows)


def _cause(exc: BaseException) -> str:
    """The innermost reason; the exporter's outer ones are advice to its own developers."""
    while exc.__cause__ is not None:
        exc = exc.__cause__
    return str(exc)


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Hide what torch's exporter says about itself: optional operators of torchvision, a renamed class of pytree."""

    def about_the_app(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("torchvision is not installed")

    logger = logging.getLogger(REGISTRY_LOGGER)
    logger.addFilter(about_the_app)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`", category=FutureWarning)
            yield
    finally:
        logger.removeFilter(about_the_app)


def _strip(model: onnx.ModelProto) -> None:
    """Take out everything that does not compute."""
    graph = model.graph
    del model.metadata_props[:]
    del graph.metadata_props[:]
    del graph.value_info[:]
    model.doc_string = graph.doc_string = ""
    for node in graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for port in (*graph.input, *graph.output):
        port.doc_string = ""
        del port.metadata_props[:]
    for value in graph.initializer:
        value.doc_string = ""
        del value.metadata_props[:]
