"""The converter from traced Signatures to TFLite, and two repairs of the graphs before it.

The converter mistakes a convolution's kernel for an image if the kernel is computed from inputs (``_mark_kernels``). It
leaves computations on constants to the runtime (``_fold_constants``).
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fanin.edge.export.decompositions.programs import program_of
from fanin.edge.export.tracing.traced import Traced

CONSTANT: Final = "folded_constant_"
aten = torch.ops.aten


def convert(signatures: Mapping[str, Traced], partitioner: str) -> bytes:
    """Convert Signatures to one file.

    Args:
        signatures: Traced graphs by Signature name.
        partitioner: The converter's layout strategy, "GREEDY" or "DEFAULT".

    Raises:
        Exception: Any error of the converter. With "DEFAULT" the converter may also end the process.
    """
    # The import takes seconds and prints messages, so it happens on first use, inside quiet_converter.
    import litert_torch
    from litert_torch import fx_infra
    from litert_torch._convert import core, litert_converter
    from litert_torch._convert.signature import Signature

    litert_torch.config.layout_optimize_partitioner = partitioner
    programs, rows = [], []
    for name, traced in signatures.items():
        examples = tuple(traced.examples)
        program = fx_infra.safe_run_decompositions(
            program_of(_prepared(traced), examples), fx_infra.decomp.pre_convert_decomp(), can_skip=False
        )
        programs.append(core._run_convert_passes(program))
        rows.append(Signature(name, nn.Module(), examples, {}))
    data: bytes = litert_converter.exported_programs_to_flatbuffer(programs, rows).to_bytes()
    return data


def _prepared(traced: Traced) -> GraphModule:
    graph_module = traced.program.module(check_guards=False)
    assert isinstance(graph_module, GraphModule), "an ExportedProgram has a GraphModule"
    _fold_constants(graph_module)
    _mark_kernels(graph_module)
    graph_module.recompile()
    return graph_module


def _fold_constants(graph_module: GraphModule) -> None:
    """Compute everything that depends on no input. A tensor of one repeated value keeps the operator that fills it."""
    graph = graph_module.graph
    known: dict[Node, Tensor] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr":
            value = _attribute(graph_module, str(node.target))
        elif isinstance(node.target, OpOverload) and all(source in known for source in node.all_input_nodes):
            arguments = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
            value = node.target(*arguments[0], **arguments[1])
        else:
            continue
        if isinstance(value, Tensor):
            known[node] = value
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
    attribute: object = graph_module
    for name in path.split("."):
        attribute = getattr(attribute, name)
    return attribute


def _mark_kernels(graph_module: GraphModule) -> None:
    """Insert a reshape before each computed kernel: the converter's layout pass stops at a reshape."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.target is not aten.convolution.default or node.args[1].op != "call_function":
            continue
        kernel = node.args[1]
        with graph.inserting_before(node):
            marked = graph.call_function(aten.view.default, (kernel, list(kernel.meta["val"].shape)))
        marked.meta = dict(kernel.meta)
        node.update_arg(1, marked)
