"""The converter from traced Signatures to TFLite, and the graphs as it needs them.

The converter mistakes a convolution's kernel for an image where the kernel is computed from inputs (``_mark_kernels``).
It leaves to later runtimes what is computed from constants (``_fold_constants``). Both are fixed in the graph first.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fanin.edge.export.tracing.traced import Traced

CONSTANT: Final = "folded_constant_"
aten = torch.ops.aten


def convert(signatures: Mapping[str, Traced], partitioner: str) -> bytes:
    """Return a file with these Signatures; ``partitioner`` is the converter's way to choose layouts.

    Raises whatever the converter raises. With "DEFAULT" the converter may also end the process.
    """
    # Seconds, and loud: it is imported when it is used, in the quiet.
    import litert_torch

    litert_torch.config.layout_optimize_partitioner = partitioner
    converter = litert_torch.Converter()
    for name, traced in signatures.items():
        converter.add_signature(name, _Positional(_prepared(traced)), tuple(traced.examples))
    data: bytes = converter.convert().model_content()
    return data


class _Positional(nn.Module):
    """A graph as the converter wants it: in evaluation mode, which a train step is not, and a tuple out."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__()
        self.inner = graph
        self.training = False

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        found = self.inner(*inputs)
        return found if isinstance(found, tuple) else (found,)


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
