"""A traced graph as an ONNX model, operator by operator, with torch's own table of ONNX forms.

``torch.onnx.export`` decomposes a graph that is already decomposed, and reads all 500 forms of its table in each call.
Here a form is read when a graph first uses it. A graph is decomposed only if one of its operators has no form.
"""

from ast import literal_eval
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Final

import onnx
import onnx_ir as ir
import torch
from onnxscript.function_libs.torch_lib import ops, registration
from onnxscript.version_converter import convert_version
from torch import Tensor
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.export import ExportedProgram, default_decompositions
from torch.fx import Node
from torch.fx.experimental import _config as symbolic_sizes
from torch.onnx._internal.exporter import _core, _fx_passes
from torch.onnx._internal.exporter._registration import OnnxDecompMeta, ONNXRegistry, TorchOp
from torch.onnx._internal.exporter._torchlib._torchlib_registry import get_torchlib_ops

from fanin.edge.export.formats.onnx.optimize import optimize
from fanin.edge.export.graph.decompositions.elementwise import copied
from fanin.edge.export.module.origins import origin_of

OPSET: Final = 20
"""The operator set of every graph."""
SCOPES: Final = "pkg.torch.onnx.name_scopes"
"""Key of the names of a node's module and of the node, which the translation writes from ``nn_module_stack``."""
TORCH_LIB: Final = ops
"""The import registers the forms."""
REPLACED: Final = MappingProxyType({torch.ops.aten.copy.default: copied})
"""The decompositions of operators whose form in torch's table is wrong: that of ``copy`` does not expand its source."""


class OnnxForms(ONNXRegistry):
    """The ONNX forms of torch's operators, each read on first use."""

    def __init__(self) -> None:
        super().__init__()
        self._opset_version = OPSET
        self._read: set[object] = set()
        for form in get_torchlib_ops():
            self._register(form.fx_target, form)
        self._cleanup_registry_based_on_opset_version()

    def __contains__(self, target: TorchOp) -> bool:
        """Return whether an operator has a form that is right."""
        if target in REPLACED:
            return False
        name = _name(target)
        return name in self.functions or target in self.functions or name in registration.default_registry

    def get_decomps(self, target: TorchOp) -> list[OnnxDecompMeta]:
        """Return the forms of an operator, for real and for complex values; empty if it has none."""
        name = _name(target)
        if name not in self._read and name in registration.default_registry:
            forms = registration.default_registry[name]
            for is_complex, functions in ((False, forms.overloads), (True, forms.complex)):
                for function in functions:
                    meta = OnnxDecompMeta(function, target, signature=None, is_complex=is_complex)
                    self._register(target, meta)
            self._cleanup_registry_based_on_opset_version()
        self._read.add(name)
        return super().get_decomps(target)


def _name(target: TorchOp) -> str:
    """Return the name of an operator in the tables of forms."""
    if isinstance(target, OpOverload):
        return str(target.name())  # type: ignore[no-untyped-call]
    return f"{target.__module__}::{target.__name__}"


@cache
def _forms() -> OnnxForms:
    return OnnxForms()


def translate(program: ExportedProgram) -> onnx.ModelProto:
    """Return the ONNX model of a traced graph. Each node's name begins with its module's: ``encoder.0/node_relu``.

    Args:
        program: The graph. It is changed.

    Raises:
        NotImplementedError: An operator has no ONNX form.
        OnnxExporterError: An operator has no ONNX form for complex numbers.
    """
    forms = _forms()
    # Fewer operators have a form for complex numbers: that of a view, but not that of a reshape.
    if any(_is_complex(node) or node.target not in forms for node in program.graph.nodes if node.op == "call_function"):
        program = _decomposed(program)
    _fx_passes.insert_type_promotion_nodes(program.graph_module)
    _fx_passes.remove_assertion_nodes(program.graph_module)
    _check_forms(program, forms)
    for node in program.graph.nodes:
        origin = origin_of(node)
        node.meta["nn_module_stack"] = {origin: (origin, "")}
    model = _core._exported_program_to_onnx_program(program, registry=forms).model
    convert_version(model, OPSET, fallback=True)
    optimize(model)
    for node in model.graph:
        origin, *_ = literal_eval(node.metadata_props.get(SCOPES, "['']"))
        if origin and node.name:
            node.name = f"{origin}/{node.name}"
    return ir.to_proto(model)


def _is_complex(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_complex()


def _check_forms(program: ExportedProgram, forms: OnnxForms) -> None:
    """Raise NotImplementedError with the names of operators as they were traced, before their decomposition."""
    nodes = [node for node in program.graph.nodes if isinstance(node.target, OpOverload) and node.target not in forms]
    if nodes:
        names = sorted({str(node.meta.get("original_aten", node.target)) for node in nodes})
        raise NotImplementedError(f"ONNX has no form of {', '.join(names)}")


def _decomposed(program: ExportedProgram) -> ExportedProgram:
    """Return the program with each operator that has no form decomposed."""
    # A number of samples that may be 0 or 1 stays free.
    with symbolic_sizes.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        decomposed: ExportedProgram = program.run_decompositions(dict(_decompositions()))
    return decomposed


@cache
def _decompositions() -> Mapping[OpOverload, Callable[..., object]]:
    """Return the decompositions of the operators without a form. To read torch's table visits all operators."""
    table = decomposition_table | dict(default_decompositions())
    lacking = {
        target: form for target, form in table.items() if isinstance(target, OpOverload) and target not in _forms()
    }
    return lacking | dict(REPLACED)
