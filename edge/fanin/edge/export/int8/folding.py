"""The ``infer`` graph made ready for slots: norms folded into products, and what moves told from what is frozen.

What quantizes the graph afterwards sees products with one weight and one bias, which are inputs of the graph as
parameters are, and knows no norm. How they come from parameters is told in the manifest (``edge.derived``), and what
they are for a Version is computed by ``edge.quantize`` alone, here as on a device::

    conv(x, weight, bias) -> batch_norm(gain, offset, mean, variance)     becomes     conv(x, weight', bias')

A norm whose statistics, gain or offset are frozen gives them as constants; frozen as a whole with its product, weight'
and bias' are constants of the graph. A norm stays as it is after something else, after a product that others use too,
and where it moves and the weight before it does not: weight' would be a slot as large as the frozen weight.

A bias's codes stand on its weight's scales. So a frozen bias beside a weight that moves is filled as that is, from a
constant of the manifest; and beside a bias that moves, a frozen weight's scales are such a constant.
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

from fanin.edge.bundles.derived import Derived, Folded
from fanin.edge.bundles.quantize import MIN_SCALE, weight_scales, with_derived
from fanin.edge.export.decompositions.tables import forward_decompositions
from fanin.edge.export.prepare import Prepared
from fanin.edge.export.quiet import quiet_torch
from fanin.edge.export.tracing.traced import Traced
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
"""Their operands are x, weight and bias, and the weight's channels lie along its first dimension."""
FOLDED: Final = ":folded"
"""Ends the name of a weight with a norm in it, before its number."""
SCALES: Final = ":scales"
INNER: Final = "_inner."
"""Where the traced module has the App's."""
FINEST: Final = 2.0**-12
"""Of a frozen weight's largest scale: a finer one leaves a bias no room that moves later, and adds nothing to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Infer:
    """The ``infer`` graph and what slots come from.

    ``values`` are Version 0's parameters and what is derived from them, ``traced`` takes some of them and x. ``scales``
    names the constant that has a frozen weight's scales, by the bias that moves beside it.
    """

    traced: Traced
    values: Mapping[str, Float32s]
    derived: Derived
    scales: Mapping[str, str]


def fold_norms(traced: Traced, prepared: Prepared, graph_format: str) -> Infer:
    """The graph that ``trace_infer`` made, as slots can fill it, and a graph format has it. Raises UnsupportedModel."""
    parameters = {name: value.numpy() for name, value in prepared.travelling.items()}
    graph_module = traced.program.module()
    assert isinstance(graph_module, GraphModule), "that is how an ExportedProgram is run"
    folding = _Folding(graph_module, traced.inputs)
    for node in graph_module.graph.nodes:
        if node.target is aten.batch_norm.default:
            folding.norm(node)
    for node in graph_module.graph.nodes:
        if node.target in PRODUCTS:
            folding.product(node)
    try:
        derived = Derived(constants=MappingProxyType(folding.constants), folded=MappingProxyType(folding.folded))
    except InvalidBundle as exc:
        raise UnsupportedModel(f"{prepared.what}: {exc}; train the norm that it belongs to, or reset it") from exc
    values = with_derived(parameters, derived)
    names, examples, program = traced.inputs, traced.examples, traced.program
    if folding.is_changed:
        names = folding.finish()
        examples = [*(torch.from_numpy(values[name]) for name in names[:-1]), traced.examples[-1]]
        program = _exported(graph_module, examples, program)
    table = forward_decompositions(graph_format)
    if any(node.target in table for node in program.graph.nodes):
        with quiet_torch():
            program = program.run_decompositions(table)
    return Infer(
        traced=Traced(program=program, examples=examples, inputs=names, outputs=traced.outputs),
        values=MappingProxyType(values),
        derived=derived,
        scales=MappingProxyType(folding.scales),
    )


def _exported(graph_module: GraphModule, examples: Sequence[Tensor], before: ExportedProgram) -> ExportedProgram:
    """The graph with inputs like these, its batch as free as it was."""
    *_, x = (node for node in before.graph.nodes if node.op == "placeholder")
    is_free = not isinstance(x.meta["val"].shape[0], int)
    dynamic = (*(None for _ in examples[:-1]), {0: Dim("batch")} if is_free else None)
    # Anew: the old one would hold what it is given against the inputs that it had.
    changed = GraphModule(graph_module, graph_module.graph)
    return torch.export.export(changed, tuple(examples), dynamic_shapes=dynamic, strict=False)


class _Folding:
    """The graph while it is changed, and what has been derived so far."""

    def __init__(self, graph_module: GraphModule, inputs: Sequence[str]) -> None:
        self._module, self._graph = graph_module, graph_module.graph
        placeholders = [node for node in self._graph.nodes if node.op == "placeholder"]
        self._names = dict(zip(placeholders, inputs, strict=True))
        self._x = placeholders[-1]
        self._moving = set(inputs[:-1])
        self._frozen: dict[str, Float32s] = {}
        for node in list(self._graph.nodes):
            if node.op == "call_module":  # what guards the inputs' shapes, and uses all of them
                self._graph.erase_node(node)
            elif node.op == "get_attr":
                self._names[node] = str(node.target).removeprefix(INNER)
                self._frozen[self._names[node]] = _attribute(graph_module, str(node.target))
        self._num_norms = 0
        self._inputs: dict[str, Node] = {}
        self.constants: dict[str, bytes] = {}
        self.folded: dict[str, Folded] = {}
        self.scales: dict[str, str] = {}

    @property
    def is_changed(self) -> bool:
        """Whether the graph is another than it was."""
        return bool(self._num_norms or self._inputs)

    def norm(self, node: Node) -> None:
        """Fold a norm into the product before it, if that can be done."""
        product, epsilon = node.args[0], node.args[7]
        assert isinstance(product, Node) and isinstance(epsilon, float), "as the operator's schema has them"
        if product.target not in PRODUCTS or len(product.users) > 1 or node.args[5] or epsilon <= 0.0:
            return
        # Of a sequence's linear layer the channels are the last dimension, and no norm's.
        if product.target is aten.linear.default and product.meta["val"].dim() != 2:
            return
        spread = node.args[4]
        if isinstance(spread, Node) and spread.target is aten.clamp.default and spread.args[1:] == (0.0,):
            spread = spread.args[0]  # ``edge.quantize`` does that
        named = [self._leaf(source) for source in (*_operands(product), *node.args[1:4], spread)]
        weight, bias, gain, offset, mean, variance = (name or "" for name in named)
        if None in named or (weight not in self._moving and {gain, variance} & self._moving):
            return
        name = f"{weight}{FOLDED}{self._num_norms or ''}"
        self._num_norms += 1
        both = {
            name: Folded(value=weight, gain=gain, variance=variance, epsilon=epsilon),
            f"{name}.bias": Folded(value=bias, mean=mean, gain=gain, variance=variance, offset=offset, epsilon=epsilon),
        }
        made = [self._made(key, found) for key, found in both.items()]
        product.args = (product.args[0], *made, *product.args[3:])
        node.replace_all_uses_with(product)
        self._graph.erase_node(node)

    def product(self, node: Node) -> None:
        """Let a bias and its weight move together, or tell the scales of a weight that does not."""
        weight, bias = _operands(node)
        weight_name, bias_name = self._leaf(weight), self._leaf(bias)
        if not weight_name or not bias_name:
            return
        if weight_name in self._moving and bias_name not in self._moving:
            self._constant(bias_name, self._frozen[bias_name])
            node.update_arg(2, self._input(bias_name))
        elif bias_name in self._moving and weight_name not in self._moving:
            assert isinstance(bias, Node), "it has a name"
            scales = weight_scales(self._frozen[weight_name], 0)
            # A bias of several products would stand on the scales of each.
            if len(bias.users) == 1 and scales.max() > MIN_SCALE:
                self.scales[bias_name] = weight_name + SCALES
                self._constant(weight_name + SCALES, np.maximum(scales, scales.max() * np.float32(FINEST)))

    def finish(self) -> list[str]:
        """Leave out what nothing uses. Returns the inputs' names."""
        graph = self._graph
        graph.eliminate_dead_code()
        for node in [node for node in graph.nodes if node.op == "placeholder" and not node.users]:
            if node is not self._x:
                graph.erase_node(node)
        # One argument after another, as they are now.
        graph.set_codegen(CodeGen())
        return [self._names[node] for node in graph.nodes if node.op == "placeholder"]

    def _leaf(self, source: object) -> str | None:
        """The parameter or the constant that an operand is, "" for none; None for what is computed."""
        if source is None:
            return ""
        assert isinstance(source, Node), "as the operator's schema has it"
        return self._names.get(source)

    def _made(self, name: str, found: Folded) -> Node:
        """What stands for a folded tensor: an input, or a constant if nothing of it moves."""
        frozen = {part: self._frozen[part] for part in found.names if part not in self._moving}
        if len(frozen) == len(set(found.names)):
            value = with_derived(frozen, Derived(folded={name: found}))[name]
            buffer = f"folded_{len(self._frozen)}"
            self._module.register_buffer(buffer, torch.from_numpy(value))
            with self._graph.inserting_before(self._x):
                made = self._graph.get_attr(buffer)
            self._names[made], self._frozen[name] = name, value
            return made
        for part in frozen:
            self._constant(part, frozen[part])
        self.folded[name] = found
        self._moving.add(name)
        return self._input(name)

    def _input(self, name: str) -> Node:
        """The input of this name, made when it is first asked for."""
        if name not in self._inputs:
            with self._graph.inserting_before(self._x):
                made = self._graph.placeholder(f"derived_{len(self._names)}")
            self._names[made], self._inputs[name] = name, made
        return self._inputs[name]

    def _constant(self, name: str, value: Float32s) -> None:
        self.constants[name] = np.ascontiguousarray(value, "<f4").tobytes()


def _attribute(graph_module: GraphModule, path: str) -> Float32s:
    """A constant of the graph."""
    place: object = graph_module
    for part in path.split("."):
        place = getattr(place, part)
    assert isinstance(place, Tensor), "that is what a graph's attributes are"
    found: Float32s = place.detach().numpy()
    return found


def _operands(product: Node) -> tuple[object, object]:
    """Weight and bias."""
    return product.args[1], product.args[2] if len(product.args) > 2 else None
