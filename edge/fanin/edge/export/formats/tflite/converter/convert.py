"""The converter from traced Signatures to TFLite, and four repairs of the graphs before it.

The converter mistakes a convolution's kernel for an image if the kernel is computed from inputs (``_mark_kernels``). It
repeats an image along a wrong dimension (``_skip_expansions``). It leaves computations on constants to the runtime
(``_fold_constants``). It cannot split a tensor into one part (``_skip_whole_parts``).
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export.decomp_utils import CustomDecompTable
from torch.fx import Graph, GraphModule, Node

from fanin.edge.export.formats.tflite.converter.lowerings import direct_lowerings
from fanin.edge.export.graph.decompositions.programs.parts import with_real_numbers
from fanin.edge.export.graph.decompositions.programs.program import program_of
from fanin.edge.export.graph.traced import Traced

CONSTANT: Final = "folded_constant_"
aten = torch.ops.aten
IMAGE_DIMS: Final = 4
BROADCASTING: Final = frozenset({aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor})


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
            program_of(_prepared(traced), examples), _decompositions(), can_skip=False
        )
        program = core._run_convert_passes(program)
        _skip_whole_parts(program.graph)
        _view_before_expansion(program.graph)
        _permute_before_expansion(program.graph_module)
        programs.append(program)
        rows.append(Signature(name, nn.Module(), examples, {}))
    with direct_lowerings():
        data: bytes = litert_converter.exported_programs_to_flatbuffer(programs, rows).to_bytes()
    return data


@cache
def _decompositions() -> CustomDecompTable:
    """Return the converter's own decompositions, one table for all Signatures: each new one visits all operators."""
    from litert_torch import fx_infra

    table: CustomDecompTable = fx_infra.decomp.pre_convert_decomp()
    return table


def _prepared(traced: Traced) -> GraphModule:
    graph_module = traced.program.module(check_guards=False)
    assert isinstance(graph_module, GraphModule), "an ExportedProgram has a GraphModule"
    graph_module = with_real_numbers(graph_module, traced.examples)
    _fold_constants(graph_module)
    _mark_kernels(graph_module)
    _skip_expansions(graph_module)
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


def _skip_whole_parts(graph: Graph) -> None:
    """Use a tensor in place of its only part: the converter expects several results of a split."""
    for node in list(graph.nodes):
        if node.target is aten.split_with_sizes.default and len(node.args[1]) == 1:
            for part in list(node.users):
                part.replace_all_uses_with(node.args[0])
                graph.erase_node(part)
            graph.erase_node(node)


def _skip_expansions(graph_module: GraphModule) -> None:
    """Let products and sums of images broadcast, instead of an expansion before them.

    The converter merges an expansion from (B, 1, H, W) to (B, C, H, W) with its layout change. If C equals H and W, it
    then repeats along another dimension. An expansion is moved behind products with a number, to reach an image.
    """
    graph = graph_module.graph
    expansions = [node for node in graph.nodes if node.target is aten.expand.default and _is_of_image(node)]
    while expansions:
        node = expansions.pop()
        source, shape = node.args[0], node.meta["val"].shape
        for user in [user for user in node.users if user.target in BROADCASTING]:
            others = [each for each in user.args if each is not node]
            if others and all(_has_shape(each, shape) for each in others):
                user.replace_input_with(node, source)
            elif others and all(isinstance(each, int | float) for each in others):
                with graph.inserting_after(user):
                    later = graph.call_function(aten.expand.default, (user, list(shape)))
                later.meta = dict(user.meta)
                user.replace_all_uses_with(later, delete_user_cb=lambda each, later=later: each is not later)
                user.replace_input_with(node, source)
                user.meta = dict(user.meta) | {"val": source.meta["val"]}
                expansions.append(later)
    graph.eliminate_dead_code()


def _is_of_image(expansion: Node) -> bool:
    source = expansion.args[0]
    return isinstance(source, Node) and source.meta["val"].dim() == expansion.meta["val"].dim() == IMAGE_DIMS


def _has_shape(value: object, shape: torch.Size) -> bool:
    return isinstance(value, Node) and value.meta["val"].shape == shape


def _view_before_expansion(graph: Graph) -> None:
    """View the source of an expansion instead of its result, if the view only removes or adds dimensions of size 1.

    Otherwise, ``_permute_before_expansion`` does not recognize the expansion of the only head of keys.
    """
    for node in list(graph.nodes):
        if node.target is not aten.view.default:
            continue
        chain = _elementwise_chain(node.all_input_nodes[0])
        expansion = chain.pop()
        if expansion.target is not aten.expand.default or any(step.target is not aten.clone.default for step in chain):
            continue
        (operand,), expanded, result = expansion.all_input_nodes, expansion.meta["val"], node.meta["val"]
        if [size for size in expanded.shape if size != 1] != [size for size in result.shape if size != 1]:
            continue
        source = operand.meta["val"]
        sizes = [1] * (expanded.dim() - source.dim()) + list(source.shape)
        kept = iter([have for have, want in zip(sizes, expanded.shape, strict=True) if want != 1])
        shape = [1 if size == 1 else next(kept) for size in result.shape]
        with graph.inserting_before(node):
            viewed = graph.call_function(aten.view.default, (operand, shape))
            viewed.meta = dict(expansion.meta) | {"val": source.reshape(shape)}
            value = graph.call_function(aten.expand.default, (viewed, list(result.shape)))
        value.meta = dict(node.meta)
        node.replace_all_uses_with(value)
    graph.eliminate_dead_code()


def _permute_before_expansion(graph_module: GraphModule) -> None:
    """Permute the source of an expansion instead of its result.

    The converter merges an expansion and a permutation after it, also through elementwise operators between them. It
    then does not permute the source: (B, T, 1), expanded to (B, T, C), permuted to (B, C, T) fails or is wrong.
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.target is not aten.permute.default:
            continue
        chain = _elementwise_chain(node.args[0])
        expansion = chain.pop()
        if expansion.target is not aten.expand.default:
            continue
        dims = [int(dim) % len(node.args[1]) for dim in node.args[1]]
        with graph.inserting_before(node):
            value = _permuted_expansion(graph, expansion, dims)
            for step in reversed(chain):
                value = graph.node_copy(step, {step.all_input_nodes[0]: value}.__getitem__)
                value.meta = dict(step.meta) | {"val": step.meta["val"].permute(dims)}
        node.replace_all_uses_with(value)
    graph.eliminate_dead_code()
    graph_module.recompile()


def _permuted_expansion(graph: Graph, expansion: Node, dims: Sequence[int]) -> Node:
    source, expanded = expansion.all_input_nodes[0], expansion.meta["val"]
    value = source.meta["val"]
    aligned = value.reshape([1] * (expanded.dim() - value.dim()) + list(value.shape))
    shape = list(expanded.permute(dims).shape)
    for target, argument, result in (
        (aten.view.default, list(aligned.shape), aligned),
        (aten.permute.default, list(dims), aligned.permute(dims)),
        (aten.expand.default, shape, aligned.permute(dims).expand(shape)),
    ):
        source = graph.call_function(target, (source, argument))
        source.meta = dict(expansion.meta) | {"val": result}
    return source


def _elementwise_chain(node: Node) -> list[Node]:
    """Return a node and the operators before it, as long as each depends on the elements of a single tensor alone."""
    chain = [node]
    while _is_elementwise(chain[-1].target) and len(chain[-1].all_input_nodes) == 1:
        chain.append(chain[-1].all_input_nodes[0])
    return chain


def _is_elementwise(target: object) -> bool:
    return isinstance(target, OpOverload) and (torch.Tag.pointwise in target.tags or target is aten._to_copy.default)
