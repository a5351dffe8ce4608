"""An App's Signatures as functional graphs: every input and output named, no state inside.

The train step is traced with autograd inside (``make_fx`` over ``torch.autograd``), so what is left is forward,
loss, backward and optimizer as one list of plain operators: any inference runtime can run it. It is traced once for
each graph format, because the runtimes of one have operators that those of the other lack.

Frozen weights are traced as inputs and bound as int8 constants afterwards: what has no input is computed while it
is traced, and would stand in the graph in float32.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch import Tensor
from torch.ao.quantization.fx._decomposed import quantized_decomposed_lib
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fanin.edge.export.decompositions.tables import backward_decompositions
from fanin.edge.export.modules.frozen_norms import FoldedNorms
from fanin.edge.export.modules.norms import tracked_norms
from fanin.edge.export.modules.places import call_with
from fanin.edge.export.optimizers import Tensors, clipped
from fanin.edge.export.prepare import FrozenWeight, Prepared
from fanin.edge.export.quiet import quiet_weights
from fanin.edge.export.refusals import FIXED, Untraceable, guarded
from fanin.edge.export.tracing.attention import PlainAttention, with_plain_attention
from fanin.edge.export.tracing.backward import backwards, drop_aliases, write_anew
from fanin.edge.export.tracing.examples import MIN_TRACE_BATCH, check_kept, example_batch, fixed_batch, labels_of
from fanin.edge.export.tracing.kernels import plain_kernels
from fanin.edge.export.tracing.reading import NoReading
from fanin.edge.runtimes.graphs import PROXIMAL_WEIGHT, STEP, next_port, state_port

Module = TypeVar("Module", bound=torch.nn.Module)
QUANTIZED_OPERATORS: Final = quantized_decomposed_lib
"""Importing it is what registers the operator that follows."""
dequantize = torch.ops.quantized_decomposed.dequantize_per_channel.default


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """One Signature's graph and the names of its flat inputs and outputs."""

    program: ExportedProgram
    examples: Sequence[Tensor]
    inputs: Sequence[str]
    outputs: Sequence[str]


class _Ports:
    """A function's flat inputs, by name."""

    def __init__(self, values: Tensors, frozen: dict[str, FrozenWeight]) -> None:
        self.names = list(values)
        self.examples = list(values.values())
        self._frozen = frozen

    @property
    def constants(self) -> list[Tensor]:
        """The frozen weights' codes and scales, which follow the inputs while they are traced."""
        return [tensor for found in self._frozen.values() for tensor in (found.codes, found.scales)]

    def named(self, flat: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        """(inputs by name, frozen weights by name, as their codes say)."""
        rest = flat[len(self.names) :]
        frozen = {
            name: _weight(found, codes, scales)
            for (name, found), codes, scales in zip(self._frozen.items(), rest[::2], rest[1::2], strict=True)
        }
        return dict(zip(self.names, flat, strict=False)), frozen


def _weight(found: FrozenWeight, codes: Tensor, scales: Tensor) -> Tensor:
    zeros = torch.zeros(scales.shape, dtype=torch.int64)
    weight: Tensor = dequantize(codes, scales, zeros, found.axis, -128, 127, torch.int8)
    return weight


def trace_train(prepared: Prepared, graph_format: str) -> Traced:
    """The train step: one optimizer step on one masked batch. Raises UnsupportedModel."""
    check_kept(prepared)
    write_anew(prepared.module)
    recipe, learned = prepared.app.recipe, prepared.learned
    names = list(prepared.travelling)
    states = [(state, name) for state in recipe.optimizer.states for name in learned]
    ports = _Ports(_train_inputs(prepared), dict(prepared.frozen))

    def step(*flat: Tensor) -> tuple[Tensor, ...]:
        given, frozen = ports.named(flat)
        loss, gradients, tracked = _gradients(prepared, given, frozen)
        # A norm that was not reached keeps its statistics.
        moved = {name: given[name] for name in prepared.tracked} | tracked
        following: Tensors = {}
        for name in learned:
            shape = given[name].shape
            value, kept = recipe.optimizer.move(
                _flat(given[name]),
                _flat(gradients[name]),
                {state: _flat(given[state_port(state, name)]) for state in recipe.optimizer.states},
                given["learning_rate"],
                given.get(STEP),
            )
            moved[name] = _shaped(value, shape)
            following |= {state_port(state, name): _shaped(tensor, shape) for state, tensor in kept.items()}
        return (*(moved[name] for name in names), *(following[state_port(*pair)] for pair in states), loss)

    return Traced(
        program=_trace(
            f"{prepared.what}: the train step for {graph_format}", prepared.module, step, ports, graph_format
        ),
        examples=ports.examples,
        inputs=ports.names,
        outputs=[*(next_port(name) for name in (*names, *(state_port(*pair) for pair in states))), "loss"],
    )


def _flat(value: Tensor) -> Tensor:
    """As a vector what ends in a dimension of 1: over that, runtimes spread the learning rate value by value."""
    return value.flatten() if value.dim() > 1 and value.shape[-1] == 1 else value


def _shaped(value: Tensor, shape: torch.Size) -> Tensor:
    return value if value.shape == shape else value.reshape(shape)


def _train_inputs(prepared: Prepared) -> Tensors:
    """What the train step is given, by name, with examples."""
    recipe, learned = prepared.app.recipe, prepared.learned
    x, y, mask = example_batch(prepared)
    inputs = dict(prepared.travelling)
    for state in recipe.optimizer.states:
        inputs |= {state_port(state, name): torch.zeros_like(value) for name, value in learned.items()}
    if recipe.proximal:
        inputs |= {state_port("anchor", name): value.clone() for name, value in learned.items()}
    if recipe.scaffold:
        inputs |= {state_port("control", name): torch.zeros_like(value) for name, value in learned.items()}
    inputs |= {"x": x, "y": y, "mask": mask, "learning_rate": torch.tensor(0.1)}
    if recipe.optimizer.counts_steps:
        inputs[STEP] = torch.tensor(1.0)
    if recipe.proximal:
        inputs[PROXIMAL_WEIGHT] = torch.tensor(0.0)
    return inputs


def _gradients(prepared: Prepared, given: Tensors, frozen: Tensors) -> tuple[Tensor, Tensors, Tensors]:
    """(mean loss, gradients, next running statistics) of one masked batch."""
    recipe, mask = prepared.app.recipe, given["mask"]
    norms = dict(tracked_norms(prepared.module))

    def mean_loss(values: Tensors) -> tuple[Tensor, Tensors]:
        prepared.with_mask(mask)
        statistics = {name: given[name] for name in prepared.tracked}
        with FoldedNorms(), PlainAttention():
            logits = _logits(prepared, {**frozen, **statistics, **values}, given["x"])
        total = (mask * _losses(prepared, logits, given["y"])).sum()
        tracked = {f"{name}.{key}": value for name, norm in norms.items() for key, value in norm.finish().items()}
        return total / mask.sum().clamp(min=1.0), tracked

    held = {name: given[name] for name in prepared.learned}
    gradients, loss, tracked = backwards(mean_loss, held)
    if recipe.proximal:
        pull = given[PROXIMAL_WEIGHT]
        gradients = {
            name: gradient + pull * (held[name] - given[state_port("anchor", name)])
            for name, gradient in gradients.items()
        }
    gradients = clipped(gradients, recipe.clip_norm)
    if recipe.scaffold:
        gradients = {name: gradient + given[state_port("control", name)] for name, gradient in gradients.items()}
    return loss, gradients, tracked


def trace_evaluate(prepared: Prepared, graph_format: str) -> Traced:
    """Summed loss over the unmasked samples of one batch, and what was said to each sample."""
    x, y, mask = example_batch(prepared)
    ports = _Ports({**prepared.travelling, "x": x, "y": y, "mask": mask}, dict(prepared.frozen))

    def evaluate(*flat: Tensor) -> tuple[Tensor, Tensor]:
        given, frozen = ports.named(flat)
        values = {name: given[name] for name in prepared.travelling}
        logits = _logits(prepared, {**frozen, **values}, given["x"])
        loss_sum = (given["mask"] * _losses(prepared, logits, given["y"])).sum()
        return loss_sum, logits.argmax(dim=-1).to(torch.int32) if prepared.app.num_classes else logits

    with _evaluating(prepared.module):
        program = _trace(
            f"{prepared.what}: the evaluation for {graph_format}", prepared.module, evaluate, ports, graph_format
        )
    return Traced(program=program, examples=ports.examples, inputs=ports.names, outputs=["loss_sum", "predicted"])


def trace_infer(prepared: Prepared, batch_size: int = 0) -> Traced:
    """What the module says to ``batch_size`` samples, or to any number of them (0).

    Parameters are inputs still, so that nothing is folded into them.
    """
    names = list(prepared.travelling)
    num = batch_size or max(prepared.app.batch_size, MIN_TRACE_BATCH)
    examples = [*prepared.travelling.values(), prepared.app.examples(num)]
    dynamic = ((*(None for _ in names), None if batch_size else {0: Dim("batch")}),)
    what = f"{prepared.what}: the inference"
    with _evaluating(_Infer(prepared, names)) as infer, torch.no_grad(), quiet_weights():

        def export(dynamic_shapes: tuple[object, ...] | None) -> ExportedProgram:
            found = torch.export.export(infer, tuple(examples), dynamic_shapes=dynamic_shapes, strict=False)
            return with_plain_attention(found)

        try:
            program = guarded(what, prepared.module, lambda: export(dynamic))
        except Untraceable as exc:
            if FIXED.search(exc.reason):
                raise fixed_batch(what, num, exc) from exc
            raise
    return Traced(program=program, examples=examples, inputs=[*names, "x"], outputs=["logits"])


@contextmanager
def _evaluating(module: Module) -> Iterator[Module]:
    """The module in evaluation mode, and afterwards as it was: it is traced again, for another format."""
    modes = {layer: layer.training for layer in module.modules()}
    module.eval()
    try:
        with plain_kernels():
            yield module
    finally:
        for layer, training in modes.items():
            layer.training = training


class _Infer(torch.nn.Module):
    """The module with its parameters as arguments."""

    def __init__(self, prepared: Prepared, names: Sequence[str]) -> None:
        super().__init__()
        self._prepared, self._names = prepared, names
        self._inner = prepared.module

    def forward(self, *flat: Tensor) -> Tensor:
        return _logits(self._prepared, dict(zip(self._names, flat, strict=False)), flat[-1])


def _logits(prepared: Prepared, values: Tensors, x: Tensor) -> Tensor:
    app = prepared.app
    with NoReading():
        logits = call_with(prepared.module, values, (x,))
    if not isinstance(logits, Tensor) or logits.dim() < 2 or (app.num_classes and logits.shape[-1] != app.num_classes):
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        wanted = f"logits of shape (batch, {app.num_classes})" if app.num_classes else "a tensor (batch, ...)"
        raise Untraceable(f"App {app.name}: the module gave {got}, expected {wanted}")
    return logits


def _losses(prepared: Prepared, logits: Tensor, y: Tensor) -> Tensor:
    with NoReading():
        wanted = labels_of(prepared, y)
        losses = guarded(
            f"App {prepared.app.name}: the loss", prepared.module, lambda: prepared.app.loss(logits, wanted)
        )
    if losses.shape != y.shape[:1]:
        raise Untraceable(
            f"App {prepared.app.name}: the loss gave shape {tuple(losses.shape)}, expected one loss a sample, "
            f"{tuple(y.shape[:1])}",
            "use reduction='none'",
        )
    return losses


def trace_layer(layer: torch.nn.Module, inputs: Sequence[Tensor], graph_format: str, what: str) -> Traced:
    """A layer (``what`` is its name) by itself, and back through it: the gradients of the sum of what it gives.

    Towards its parameters that learn, and its float inputs. Raises UnsupportedModel.
    """
    learned = {name: value.detach().clone() for name, value in layer.named_parameters() if value.requires_grad}
    given = {f"in.{index}": value for index, value in enumerate(inputs)}
    moved = [name for name, value in given.items() if value.is_floating_point()]
    ports = _Ports(learned | given, {})

    def back(*flat: Tensor) -> tuple[Tensor, ...]:
        values, _ = ports.named(flat)

        def total(held: Tensors) -> tuple[Tensor, Tensors]:
            parameters = {name: held[name] for name in learned}
            with NoReading():
                said = call_with(layer, parameters, [(values | held)[name] for name in given])
            first = said[0] if isinstance(said, tuple) else said
            assert isinstance(first, Tensor), "layers give tensors, or one first"
            # A sum alone has the gradient 1 everywhere, which would fold away what is looked for.
            found: Tensor = (first * first.detach()).sum()
            return found, {}

        gradients, *_ = backwards(total, {name: values[name] for name in (*learned, *moved)})
        return tuple(gradients.values())

    return Traced(
        program=_trace(f"{what}: the layer for {graph_format}", layer, back, ports, graph_format),
        examples=ports.examples,
        inputs=ports.names,
        outputs=[f"gradient.{name}" for name in (*learned, *moved)],
    )


def _trace(
    what: str, root: torch.nn.Module, function: Callable[..., tuple[Tensor, ...]], ports: _Ports, graph_format: str
) -> ExportedProgram:
    """The function over flat tensors, which runs ``root``, as a graph of core operators. Raises UnsupportedModel."""

    def trace() -> ExportedProgram:
        with plain_kernels():
            table = backward_decompositions(graph_format)
            graph = make_fx(function, decomposition_table=table)(*ports.examples, *ports.constants)
        _check_chance(what, graph)
        drop_aliases(graph)
        _bind(graph, ports)
        return torch.export.export(graph, tuple(ports.examples))

    return guarded(what, root, trace)


def _bind(graph: GraphModule, ports: _Ports) -> None:
    """Turn the graph's last inputs, the frozen weights, into constants."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for index, (node, value) in enumerate(zip(placeholders[len(ports.names) :], ports.constants, strict=True)):
        name = f"frozen{index}"
        graph.register_buffer(name, value)
        with graph.graph.inserting_before(node):
            constant = graph.graph.get_attr(name)
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
        graph.graph.erase_node(node)
    graph.recompile()


def _check_chance(what: str, graph: GraphModule) -> None:
    for node in graph.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
            raise Untraceable(
                f"{what} draws random numbers ({node.target}), expected none",
                "turn dropout and noise off in the module",
            )
