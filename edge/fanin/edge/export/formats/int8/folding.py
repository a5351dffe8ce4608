"""The ``infer`` graph prepared for slots: folded norms, and moving tensors separated from frozen ones.

The quantizers then process no norm, but only products with one weight and one bias. These are inputs of the graph, like
parameters. The manifest records how they are derived from parameters (``bundles.derived``). ``bundles.quantize`` alone
computes their values for a Version, here and on devices::

    conv(x, weight, bias) -> batch_norm(gain, offset, mean, variance)     becomes     conv(x, weight', bias')

Frozen statistics, gain or offset of a norm are constants of the manifest. If the product and its norm are completely
frozen, weight' and bias' are constants of the graph. A norm is kept in four cases: it does not follow a product, other
operators use the product too, the product already has a norm folded in, or the norm moves and the weight does not. In
the last case weight' would be a slot as large as the frozen weight.

The codes of a bias use the scales of its weight. So a frozen bias next to a moving weight is filled like a slot, from a
constant of the manifest. The scales of a frozen weight next to a moving bias are such a constant, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils._pytree import tree_leaves

from fanin.edge.bundles.derived import Derived, FoldedTensor
from fanin.edge.bundles.quantize import MIN_SCALE, weight_scales, with_derived
from fanin.edge.export.graph.decompositions.tables import Forms
from fanin.edge.export.graph.traced import Traced
from fanin.edge.export.module.prepare import Prepared
from fanin.edge.export.quiet import quiet_torch
from fanin.edge.runtimes.graphs import parameter_port
from fanin.edge.tensors import Float32s
from fanin.protos.errors import InvalidBundle, UnsupportedModel

aten = torch.ops.aten
PRODUCTS: Final = (
    aten.conv1d.default,
    aten.conv1d.padding,
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.linear.default,
)
"""Products whose operands are x, weight and bias; dimension 0 of the weight holds its output channels."""
FOLDED: Final = ":folded"
"""Suffix of the name of a weight with a norm folded in, before its number."""
SCALES: Final = ":scales"
INNER: Final = "_inner."
"""Prefix of the App's module in the traced module."""
FINEST: Final = 2.0**-12
"""Smallest scale of a frozen weight, relative to its largest.

A finer scale would leave no room for a bias that moves later, and adds no visible precision.
"""

DECOMPOSED_TOLERANCE: Final = 1e-4
"""Largest error of a decomposed graph's logits, relative to their norm: above the effect of the order of additions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Infer:
    """The ``infer`` graph and the sources of its slots.

    Args:
        traced: The graph. Its inputs are the ports of some of ``values``, and the App's inputs.
        values: Parameters of Version 0 and the tensors derived from them.
        derived: The derivations.
        scales: For each moving bias next to a frozen weight, the name of the constant with the weight's scales.
    """

    traced: Traced
    values: Mapping[str, Float32s]
    derived: Derived
    scales: Mapping[str, str]


def fold_norms(traced: Traced, prepared: Prepared, forms: Forms) -> Infer:
    """Fold the norms of a traced ``infer`` graph into its products.

    Args:
        traced: The graph of ``trace_infer``.
        prepared: The App.
        forms: The decompositions of a graph format.

    Raises:
        UnsupportedModel: A derived tensor is invalid, for example because a norm has an invalid variance.
    """
    parameters = {name: value.numpy() for name, value in prepared.parameters.items()}
    graph_module = traced.program.module()
    assert isinstance(graph_module, GraphModule), "an ExportedProgram has a GraphModule"
    num = len(prepared.app.inputs)
    folding = _Folding(graph_module, traced.inputs, num)
    for node in graph_module.graph.nodes:
        if node.target is aten.batch_norm.default:
            folding.norm(node)
    for node in graph_module.graph.nodes:
        if node.target in PRODUCTS:
            folding.product(node)
    try:
        # Plain dicts: graphs may be sent from another process.
        derived = Derived(constants=dict(folding.constants), folded=dict(folding.folded))
    except InvalidBundle as exc:
        raise UnsupportedModel(
            f"{prepared.what}: {exc}; train the norm to which it belongs, or reset it", code="FN-0763"
        ) from exc
    values = with_derived(parameters, derived)
    names, examples, program = traced.inputs, traced.examples, traced.program
    if folding.is_changed:
        names = folding.finish()
        examples = [*(torch.from_numpy(values[name]) for name in names[:-num]), *traced.examples[-num:]]
        program = _exported(graph_module, examples, num, program)
    table = forms.for_inference(prepared.app.decompositions)
    if any(node.target in table for node in program.graph.nodes):
        operators = program
        with quiet_torch():
            program = program.run_decompositions(table)
        _check_same(prepared, operators, program, examples)
    ports = [*map(parameter_port, names[:-num]), *names[-num:]]
    return Infer(
        traced=Traced(program=program, examples=examples, inputs=ports, outputs=traced.outputs),
        values=MappingProxyType(values),
        derived=derived,
        scales=MappingProxyType(folding.scales),
    )


def _check_same(
    prepared: Prepared, before: ExportedProgram, after: ExportedProgram, examples: Sequence[Tensor]
) -> None:
    """Raise UnsupportedModel if decompositions changed the result: int8 would hide an error of the float graph."""
    with torch.no_grad():
        # A graph with a folded norm returns a tuple.
        expected, logits = (tree_leaves(program.module()(*examples))[0] for program in (before, after))
    error, size = float((logits - expected).norm()), float(expected.norm())
    if not error <= DECOMPOSED_TOLERANCE * size:
        raise UnsupportedModel(
            f"{prepared.what}: infer: the logits of the decomposed graph differ from torch's by {error:.1e} (L2 norm), "
            f"expected at most {DECOMPOSED_TOLERANCE * size:.1e}; check the App's own decompositions, or report the "
            "module",
            code="FN-0789",
        )


def _exported(
    graph_module: GraphModule, examples: Sequence[Tensor], num: int, before: ExportedProgram
) -> ExportedProgram:
    """Export the graph with inputs like these, the last ``num`` of the App; its batch size stays free if it was."""
    *_, x = (node for node in before.graph.nodes if node.op == "placeholder")
    is_free = not isinstance(x.meta["val"].shape[0], int)
    batch = {0: Dim("batch")} if is_free else None
    dynamic = (*(None for _ in examples[:-num]), *(batch for _ in range(num)))
    # A new module: the old one would check its arguments against its former inputs.
    changed = GraphModule(graph_module, graph_module.graph)
    return torch.export.export(changed, tuple(examples), dynamic_shapes=dynamic, strict=False)


class _Folding:
    """A graph that is being changed, and the tensors derived so far."""

    def __init__(self, graph_module: GraphModule, inputs: Sequence[str], num: int) -> None:
        self._module, self._graph = graph_module, graph_module.graph
        placeholders = [node for node in self._graph.nodes if node.op == "placeholder"]
        self._names = dict(zip(placeholders, inputs, strict=True))
        self._data = placeholders[-num:]
        self._moving = set(inputs[:-num])
        self._frozen: dict[str, Float32s] = {}
        for node in list(self._graph.nodes):
            if node.op == "call_module":  # the guard of the input shapes, which uses all inputs
                self._graph.erase_node(node)
            elif node.op == "get_attr":
                self._names[node] = str(node.target).removeprefix(INNER)
                self._frozen[self._names[node]] = _attribute(graph_module, str(node.target))
        self._num_norms = 0
        self._inputs: dict[str, Node] = {}
        self.constants: dict[str, bytes] = {}
        self.folded: dict[str, FoldedTensor] = {}
        self.scales: dict[str, str] = {}

    @property
    def is_changed(self) -> bool:
        """Whether the graph differs from the original."""
        return bool(self._num_norms or self._inputs)

    def norm(self, node: Node) -> None:
        """Fold a norm into the product before it, if possible."""
        product, epsilon = node.args[0], node.args[7]
        assert isinstance(product, Node) and isinstance(epsilon, float), "types of the operator's schema"
        if product.target not in PRODUCTS or len(product.users) > 1 or node.args[5] or epsilon <= 0.0:
            return
        # For a sequence the linear layer has its channels in the last dimension, where no norm has them.
        if product.target is aten.linear.default and product.meta["val"].dim() != 2:
            return
        spread = node.args[4]
        if isinstance(spread, Node) and spread.target is aten.clamp.default and spread.args[1:] == (0.0,):
            spread = spread.args[0]  # ``bundles.quantize`` clamps the variance
        named = [self._leaf(source) for source in (*_operands(product), *node.args[1:4], spread)]
        weight, bias, gain, offset, mean, variance = (name or "" for name in named)
        if None in named or (weight not in self._moving and {gain, variance} & self._moving):
            return
        # The values of a product with a norm are not stored in a Version, so nothing is derived from them.
        if {weight, bias} & self.folded.keys():
            return
        name = f"{weight}{FOLDED}{self._num_norms or ''}"
        self._num_norms += 1
        both = {
            name: FoldedTensor(value=weight, gain=gain, variance=variance, epsilon=epsilon),
            f"{name}.bias": FoldedTensor(
                value=bias, mean=mean, gain=gain, variance=variance, offset=offset, epsilon=epsilon
            ),
        }
        operands = [self._operand(key, folded) for key, folded in both.items()]
        product.args = (product.args[0], *operands, *product.args[3:])
        node.replace_all_uses_with(product)
        self._graph.erase_node(node)

    def product(self, node: Node) -> None:
        """Let a bias and its weight move together, or record the scales of a frozen weight."""
        weight, bias = _operands(node)
        weight_name, bias_name = self._leaf(weight), self._leaf(bias)
        if not weight_name or not bias_name:
            return
        if weight_name in self._moving and bias_name not in self._moving:
            self._constant(bias_name, self._frozen[bias_name])
            node.update_arg(2, self._input(bias_name))
        elif bias_name in self._moving and weight_name not in self._moving:
            assert isinstance(bias, Node), "a bias with a name is a node"
            scales = weight_scales(self._frozen[weight_name], 0)
            # The bias of several products would need the scales of each.
            if len(bias.users) == 1 and scales.max() > MIN_SCALE:
                self.scales[bias_name] = weight_name + SCALES
                self._constant(weight_name + SCALES, np.maximum(scales, scales.max() * np.float32(FINEST)))

    def finish(self) -> list[str]:
        """Remove unused nodes and return the names of the inputs."""
        graph = self._graph
        graph.eliminate_dead_code()
        for node in [node for node in graph.nodes if node.op == "placeholder" and not node.users]:
            if node not in self._data:
                graph.erase_node(node)
        # New code for the changed list of inputs.
        graph.set_codegen(CodeGen())
        return [self._names[node] for node in graph.nodes if node.op == "placeholder"]

    def _leaf(self, source: object) -> str | None:
        """Return the name of the parameter or constant behind an operand; "" without operand, None if computed."""
        if source is None:
            return ""
        assert isinstance(source, Node), "type of the operator's schema"
        return self._names.get(source)

    def _operand(self, name: str, folded: FoldedTensor) -> Node:
        """Return the node of a folded tensor: an input, or a constant if no part of it moves."""
        frozen = {part: self._frozen[part] for part in folded.names if part not in self._moving}
        if len(frozen) == len(set(folded.names)):
            value = with_derived(frozen, Derived(folded={name: folded}))[name]
            buffer = f"folded_{len(self._frozen)}"
            self._module.register_buffer(buffer, torch.from_numpy(value))
            with self._graph.inserting_before(self._data[0]):
                node = self._graph.get_attr(buffer)
            self._names[node], self._frozen[name] = name, value
            return node
        for part in frozen:
            self._constant(part, frozen[part])
        self.folded[name] = folded
        self._moving.add(name)
        return self._input(name)

    def _input(self, name: str) -> Node:
        """Return the input of this name, created on first use."""
        if name not in self._inputs:
            with self._graph.inserting_before(self._data[0]):
                node = self._graph.placeholder(f"derived_{len(self._names)}")
            self._names[node], self._inputs[name] = name, node
        return self._inputs[name]

    def _constant(self, name: str, value: Float32s) -> None:
        self.constants[name] = np.ascontiguousarray(value, "<f4").tobytes()


def _attribute(graph_module: GraphModule, path: str) -> Float32s:
    """Return a constant of the graph."""
    attribute: object = graph_module
    for part in path.split("."):
        attribute = getattr(attribute, part)
    assert isinstance(attribute, Tensor), "attributes of a graph are tensors"
    value: Float32s = attribute.detach().numpy()
    return value


def _operands(product: Node) -> tuple[object, object]:
    """Return weight and bias of a product."""
    return product.args[1], product.args[2] if len(product.args) > 2 else None
