"""Traced Signatures as one TFLite file, with nothing in it but the graphs.

The file holds every Signature, and a constant that several share once. It runs in the oldest of the runtimes too,
so it has built-in operators only, each in a version that tflite-runtime 2.14 knows (``operators``). The converter
takes a convolution's kernel for an image where it is computed from inputs (``_mark_kernels``), and leaves to later
runtimes what is computed from constants (``_fold_constants``): both are mended in the graph before it sees it.

The converter's names for inputs and outputs are positions; the ports get their own names in the finished file,
as parameters' names are no Python identifiers.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fanin.edge.export.operators import check_operators
from fanin.edge.export.quiet import quiet_converter
from fanin.edge.export.refusals import REPLACE, first_line
from fanin.edge.export.trace import Traced
from fanin.protos.errors import UnsupportedModel

IDENTIFIER: Final = b"TFL3"
LAYOUT_ERRORS: Final = (AssertionError, AttributeError, RuntimeError, TypeError, ValueError)
"""What the converter raises where its own choice of layouts makes a graph that does not fit together."""
CONSTANT: Final = "folded_constant_"
aten = torch.ops.aten


def to_tflite(signatures: Mapping[str, Traced], what: str) -> bytes:
    """One file with all these Signatures, by name; ``what`` begins an error's message.

    Raises UnsupportedModel if an operator has no form that every TFLite runtime has.
    """
    try:
        with quiet_converter():
            data = _convert(signatures)
            return _finish(data, signatures, what)
    except UnsupportedModel:
        raise
    except Exception as exc:  # the converter raises whatever its four compilers do
        raise UnsupportedModel(f"{what}: cannot become TFLite ({first_line(exc)}); {REPLACE}") from exc


class _Positional(nn.Module):
    """A graph as the converter wants it: in evaluation mode, which a train step is not, and a tuple out."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__()
        self.inner = graph
        self.training = False

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        found = self.inner(*inputs)
        return found if isinstance(found, tuple) else (found,)


def _convert(signatures: Mapping[str, Traced]) -> bytes:
    # Seconds, and loud: it is imported when it is used, in the quiet.
    import litert_torch

    def convert(partitioner: str) -> bytes:
        litert_torch.config.layout_optimize_partitioner = partitioner
        converter = litert_torch.Converter()
        for name, traced in signatures.items():
            converter.add_signature(name, _Positional(_prepared(traced)), tuple(traced.examples))
        found: bytes = converter.convert().model_content()
        return found

    try:
        # Both ways to choose layouts fail on some graphs. The other one may end the process, so this one goes first.
        return convert("GREEDY")
    except LAYOUT_ERRORS:
        return convert("DEFAULT")


def _prepared(traced: Traced) -> GraphModule:
    graph_module = traced.program.module()
    assert isinstance(graph_module, GraphModule), "that is how an ExportedProgram is run"
    _fold_constants(graph_module)
    _mark_kernels(graph_module)
    graph_module.recompile()
    return graph_module


def _fold_constants(graph_module: GraphModule) -> None:
    """Compute now what no input has a say in; a tensor of one value throughout stays the operator that fills it."""
    graph = graph_module.graph
    known: dict[Node, Tensor] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr":
            found = _attribute(graph_module, str(node.target))
        elif isinstance(node.target, OpOverload) and all(source in known for source in node.all_input_nodes):
            arguments = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
            found = node.target(*arguments[0], **arguments[1])
        else:
            continue
        if isinstance(found, Tensor):
            known[node] = found
    for index, (node, value) in enumerate(known.items()):
        users = [user for user in node.users if user not in known]
        if node.op == "get_attr" or not users or bool((value == value.flatten()[:1]).all()):
            continue
        name = f"{CONSTANT}{index}"
        graph_module.register_buffer(name, value.detach().clone().contiguous())
        with graph.inserting_before(node):
            constant = graph.get_attr(name)
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
    graph.eliminate_dead_code()


def _attribute(graph_module: GraphModule, path: str) -> object:
    found: object = graph_module
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _mark_kernels(graph_module: GraphModule) -> None:
    """A reshape to the same shape before each computed kernel: the converter's layout pass stops at one."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.target is not aten.convolution.default or node.args[1].op != "call_function":
            continue
        kernel = node.args[1]
        with graph.inserting_before(node):
            marked = graph.call_function(aten.view.default, (kernel, list(kernel.meta["val"].shape)))
        marked.meta = dict(kernel.meta)
        node.update_arg(1, marked)


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
