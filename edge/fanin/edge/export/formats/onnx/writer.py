"""Traced Signatures as ONNX models that hold only the graph.

torch writes stack traces, source paths and versions into a model. They are removed, because a Bundle is published.
"""

from typing import Final

import onnx
import torch
from onnx import numpy_helper
from torch.export import ExportedProgram

from fanin.edge.export.formats.cache import converted
from fanin.edge.export.formats.onnx.fuse import fuse
from fanin.edge.export.graph.traced import Traced
from fanin.edge.export.quiet import quiet_optimizer, quiet_torch
from fanin.edge.export.refusals import Unconverted
from fanin.edge.tensors import Float32s

LOSSES: Final = frozenset({"loss", "loss_sum"})
"""Outputs that only ``train`` and ``evaluate`` have. The ``infer`` graph is not fused: the quantizer needs its form."""


def to_onnx(traced: Traced, what: str) -> onnx.ModelProto:
    """Return the model of a Signature.

    Args:
        traced: The graph.
        what: Prefix of error messages.

    Raises:
        UnsupportedModel: An operator has no ONNX form.
    """

    def convert() -> bytes:
        model = as_exported(traced, what)
        data: bytes = (fuse(model) if LOSSES.intersection(traced.outputs) else model).SerializeToString()
        return data

    return onnx.ModelProto.FromString(converted("onnx", {"": traced}, convert))


def as_exported(traced: Traced, what: str) -> onnx.ModelProto:
    """Return the model operator by operator as it was traced, before it is fused."""
    # The import takes seconds. An export in TFLite alone does not need it.
    from fanin.edge.export.formats.onnx.translate import translate

    _widen_indices(traced.program)
    try:
        with quiet_torch(), quiet_optimizer():
            model = translate(traced.program)
    except Exception as exc:  # decompositions and forms may raise anything
        raise Unconverted(f"{what}: cannot be converted to ONNX ({_cause(exc)})", code="FN-0784") from exc
    _strip(model)
    _name_ports(model.graph, traced)
    return model


def _name_ports(graph: onnx.GraphProto, traced: Traced) -> None:
    """Give inputs and outputs their own names, and rename inner values that collide with them.

    A value is named after its operator ("view", "mul"), and a parameter may have the same name.
    """
    ports = {
        port.name: name
        for rows, names in ((graph.input, traced.inputs), (graph.output, traced.outputs))
        for port, name in zip(rows, names, strict=True)
    }
    taken = set(ports.values())

    def named(name: str) -> str:
        return ports.get(name) or (f"{name}:inner" if name in taken else name)

    for port in (*graph.input, *graph.output):
        port.name = named(port.name)
    for value in graph.initializer:
        value.name = named(value.name)
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [named(name) for name in names]


def _widen_indices(program: ExportedProgram) -> None:
    """Convert int32 indices to int64: torch accepts both and the exporter keeps int32, which ONNX's GatherND lacks."""
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.index.Tensor:
            continue
        for index in node.args[1]:
            if index is None or index.meta["val"].dtype != torch.int32:
                continue
            with graph.inserting_before(node):
                wide = graph.call_function(torch.ops.aten._to_copy.default, (index,), {"dtype": torch.int64})
            wide.meta = dict(index.meta) | {"val": index.meta["val"].to(torch.int64)}
            node.replace_input_with(index, wide)
    program.graph_module.recompile()


def inputs_to_initializers(model: onnx.ModelProto, values: dict[str, Float32s]) -> None:
    """Turn the inputs in ``values`` into initializers with these values."""
    kept = [port for port in model.graph.input if port.name not in values]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())


def _cause(exc: BaseException) -> str:
    """Return the innermost reason; the outer ones advise developers of the exporter."""
    while exc.__cause__ is not None:
        exc = exc.__cause__
    return str(exc)


def _strip(model: onnx.ModelProto) -> None:
    """Remove everything that is not computed."""
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
