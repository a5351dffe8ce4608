"""Traced Signatures as one TFLite file that holds only the graphs.

The file holds every Signature, and a shared constant once. It must run in the oldest runtime, too. So it has built-in
operators only, each in a version of tflite-runtime 2.14 (``operators``). The converter names inputs and outputs by
position. Their own names are written into the finished file, because names of parameters are no Python identifiers.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from fanin.edge.export.formats.cache import converted
from fanin.edge.export.formats.tflite.converter.child import convert_in_child
from fanin.edge.export.formats.tflite.converter.convert import convert
from fanin.edge.export.formats.tflite.file import pack
from fanin.edge.export.formats.tflite.operators import check_operators, check_runs
from fanin.edge.export.graph.decompositions.programs.parts import NoRealForm
from fanin.edge.export.graph.traced import Traced
from fanin.edge.export.quiet import quiet_converter
from fanin.edge.export.refusals import Unconverted, first_line
from fanin.protos.errors import UnsupportedModel

if TYPE_CHECKING:
    from ai_edge_litert import schema_py_generated as schema

LAYOUT_ERRORS: Final = (AssertionError, AttributeError, RuntimeError, TypeError, ValueError)
"""Errors of the converter when its first layout strategy builds an inconsistent graph."""
LACKING: Final = re.compile(r"Lowering not found: (\S+)")
"""The message of the converter for an operator that it does not know."""


def to_tflite(signatures: Mapping[str, Traced], what: str) -> bytes:
    """Return one file with all these Signatures.

    Args:
        signatures: Traced graphs by Signature name.
        what: Prefix of error messages.

    Raises:
        UnsupportedModel: An operator has no form that every TFLite runtime has.
    """
    try:
        return converted("tflite", signatures, partial(_converted, signatures, what))
    except UnsupportedModel:
        raise
    except Exception as exc:  # the converter raises any error of its four compilers
        raise Unconverted(f"{what}: cannot be converted to TFLite ({first_line(exc)})", code="FN-0784") from exc


def _converted(signatures: Mapping[str, Traced], what: str) -> bytes:
    with quiet_converter():
        model = _finished(_convert(signatures, what), signatures, what)
        check_runs(model, what)
        return pack(model)


def _convert(signatures: Mapping[str, Traced], what: str) -> bytes:
    try:
        # Both layout strategies fail on some graphs. The other one may end its process, so this one runs first.
        return convert(signatures, "GREEDY")
    except NoRealForm as exc:
        raise Unconverted(
            f"{what}: cannot be converted to TFLite (no form of {first_line(exc)} for complex numbers)",
            code="FN-0783",
        ) from exc
    except LAYOUT_ERRORS as exc:
        lacking = LACKING.match(str(exc))
        if lacking:
            # No layout gives an operator a form. The second attempt would take seconds more.
            raise Unconverted(
                f"{what}: cannot be converted to TFLite (no form of {lacking[1]})", code="FN-0783"
            ) from exc
        return convert_in_child(signatures, what)


def _finished(data: bytes, signatures: Mapping[str, Traced], what: str) -> "schema.ModelT":
    """Name the ports and remove all other names."""
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromPackedBuf(data)
    names = {code: name for name, code in vars(schema.BuiltinOperator).items() if not name.startswith("_")}
    codes = [(max(row.builtinCode, row.deprecatedBuiltinCode), row.version) for row in model.operatorCodes]
    check_operators({(names.get(code, str(code)), version) for code, version in codes}, what)
    for row in model.signatureDefs:
        traced = signatures[row.signatureKey.decode()]
        for ports, prefix, names_by_position in (
            (row.inputs, "args_", traced.inputs),
            (row.outputs, "output_", traced.outputs),
        ):
            for port in ports:
                port.name = names_by_position[int(port.name.decode().removeprefix(prefix))]
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            tensor.name = ""
    for row in model.metadata or ():
        model.buffers[row.buffer].data = None
    model.metadata = None
    model.description = ""
    return model
