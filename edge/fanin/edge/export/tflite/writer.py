"""Traced Signatures as one TFLite file, with nothing in it but the graphs.

The file holds every Signature, and a constant that several share once. It runs in the oldest of the runtimes too,
so it has built-in operators only, each in a version that tflite-runtime 2.14 knows (``operators``).

The converter's names for inputs and outputs are positions; the ports get their own names in the finished file,
as parameters' names are no Python identifiers.
"""

from collections.abc import Mapping
from typing import Final

from fanin.edge.export.quiet import quiet_converter
from fanin.edge.export.refusals import REPLACE, first_line
from fanin.edge.export.tflite.child import convert_in_child
from fanin.edge.export.tflite.convert import convert
from fanin.edge.export.tflite.operators import check_operators
from fanin.edge.export.tracing.traced import Traced
from fanin.protos.errors import UnsupportedModel

IDENTIFIER: Final = b"TFL3"
LAYOUT_ERRORS: Final = (AssertionError, AttributeError, RuntimeError, TypeError, ValueError)
"""What the converter raises where its own choice of layouts makes a graph that does not fit together."""


def to_tflite(signatures: Mapping[str, Traced], what: str) -> bytes:
    """One file with all these Signatures, by name; ``what`` begins an error's message.

    Raises UnsupportedModel if an operator has no form that every TFLite runtime has.
    """
    try:
        with quiet_converter():
            data = _convert(signatures, what)
            return _finish(data, signatures, what)
    except UnsupportedModel:
        raise
    except Exception as exc:  # the converter raises whatever its four compilers do
        raise UnsupportedModel(f"{what}: cannot become TFLite ({first_line(exc)}); {REPLACE}") from exc


def _convert(signatures: Mapping[str, Traced], what: str) -> bytes:
    try:
        # Both ways to choose layouts fail on some graphs. The other one may end its process, so this one goes first.
        return convert(signatures, "GREEDY")
    except LAYOUT_ERRORS:
        return convert_in_child(signatures, what)


def _finish(data: bytes, signatures: Mapping[str, Traced], what: str) -> bytes:
    """The file with the ports' own names, and without names of anything else."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromPackedBuf(data)
    names = {code: name for name, code in vars(schema.BuiltinOperator).items() if not name.startswith("_")}
    codes = [(max(row.builtinCode, row.deprecatedBuiltinCode), row.version) for row in model.operatorCodes]
    check_operators({(names.get(code, str(code)), version) for code, version in codes}, what)
    for found in model.signatureDefs:
        traced = signatures[found.signatureKey.decode()]
        for ports, prefix, wanted in (
            (found.inputs, "args_", traced.inputs),
            (found.outputs, "output_", traced.outputs),
        ):
            for port in ports:
                port.name = wanted[int(port.name.decode().removeprefix(prefix))]
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            tensor.name = ""
    for row in model.metadata or ():
        model.buffers[row.buffer].data = None
    model.metadata = None
    model.description = ""
    builder = flatbuffers.Builder(len(data))
    builder.Finish(model.Pack(builder), IDENTIFIER)
    return bytes(builder.Output())
