"""An App's three Signatures as functional graphs: every input and output named, no state inside.

The train step is traced after autograd has run (``make_fx`` over ``torch.func``), so what is left is forward,
loss, backward and optimizer as one list of plain operators: any inference runtime can run it. The optimizer is
SGD with momentum exactly as ``torch.optim.SGD`` has it: ``m = momentum * m + g; p = p - learning_rate * m``.

A graph has no random numbers and no state of its own; what needs either is refused with the module's name.
Each submodule keeps the mode in which the App gives it for training, so a frozen BatchNorm is one in ``eval()``.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from fanin.edge.export.app import App
from fanin.edge.export.decompositions import backward_decompositions
from fanin.edge.runtimes.graphs import momentum_port, next_port
from fanin.edge.tensors import TensorTable
from fanin.protos.errors import UnsupportedModel

Tensors = dict[str, Tensor]
Result = TypeVar("Result")
PORTS: Final = frozenset({"x", "y", "mask", "learning_rate", "loss", "loss_sum", "predicted", "logits"})
"""What Signatures call their inputs and outputs besides the parameters."""
MIN_TRACE_BATCH: Final = 2
"""A batch of one would be traced as the constant 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """One Signature's graph and the names of its flat inputs and outputs."""

    program: ExportedProgram
    examples: Sequence[Tensor]
    inputs: Sequence[str]
    outputs: Sequence[str]


def trainable(app: App) -> Tensors:
    """The parameters that travel, by name in rising order. Raises UnsupportedModel."""
    for name, parameter in app.module.named_parameters():
        if parameter.dtype != torch.float32:
            raise UnsupportedModel(
                f"App {app.name}: parameter {name} is {parameter.dtype}, expected torch.float32; call module.float()"
            )
    found = {name: value for name, value in app.module.named_parameters() if value.requires_grad}
    if not found:
        raise UnsupportedModel(f"App {app.name}: no parameter requires a gradient, expected at least one to train")
    taken = sorted(name for name in found if name in PORTS or name.startswith((momentum_port(""), next_port(""))))
    if taken:
        raise UnsupportedModel(f"App {app.name}: parameters {taken} are named like a graph's own ports; rename them")
    return {name: found[name].detach().clone() for name in sorted(found)}


def table_of(parameters: Tensors) -> TensorTable:
    """The layout of these parameters as one flat vector."""
    return TensorTable.of({name: tuple(value.shape) for name, value in parameters.items()})


def check_modules(app: App) -> None:
    """Raise UnsupportedModel for modules that need state or chance in training."""
    for name, module in app.module.named_modules():
        kind = f"App {app.name}: module {name or 'itself'} ({type(module).__name__})"
        if isinstance(module, _NormBase) and module.training and module.track_running_stats:
            raise UnsupportedModel(
                f"{kind} changes its running statistics in training, which a functional graph cannot; "
                "use GroupNorm or LayerNorm, or freeze it with .eval()"
            )
        if isinstance(module, _DropoutNd) and module.training and module.p > 0.0:
            raise UnsupportedModel(
                f"{kind} draws random numbers in training, got p={module.p}; set p to 0.0 or call .eval() on it"
            )


def check_buffers(app: App) -> None:
    """Raise UnsupportedModel if a pass in training changes a buffer in place."""
    module = copy.deepcopy(app.module)
    before = {name: buffer._version for name, buffer in module.named_buffers()}
    with torch.no_grad():
        _guarded(app, "train", lambda: module(app.examples(app.batch_size)))
    changed = sorted(name for name, buffer in module.named_buffers() if buffer._version != before.get(name))
    if changed:
        raise UnsupportedModel(
            f"App {app.name}: module itself ({type(module).__name__}) changes its buffers {changed} in training, "
            "which a functional graph cannot; compute them in forward, or freeze that part with .eval()"
        )


def trace_train(app: App) -> Traced:
    """The train step: one optimizer step on one masked batch."""
    parameters = trainable(app)
    check_modules(app)
    check_buffers(app)
    names = list(parameters)
    module = copy.deepcopy(app.module)

    def step(*flat: Tensor) -> tuple[Tensor, ...]:
        held, momenta = _named(names, flat), _named(names, flat[len(names) :])
        x, y, mask, learning_rate = flat[2 * len(names) :]

        def mean_loss(values: Tensors) -> Tensor:
            total = (mask * _losses(app, _logits(app, module, values, x), y)).sum()
            return total / mask.sum().clamp(min=1.0)

        gradients, loss = torch.func.grad_and_value(mean_loss)(held)
        following = {name: app.momentum * momenta[name] + gradients[name] for name in names}
        moved = [held[name] - learning_rate * following[name] for name in names]
        return (*moved, *following.values(), loss)

    zeros = [torch.zeros_like(value) for value in parameters.values()]
    momentum_names = [momentum_port(name) for name in names]
    examples = [*parameters.values(), *zeros, *example_batch(app), torch.tensor(0.1)]
    traced = _trace(app, "train", step, examples)
    return Traced(
        program=traced,
        examples=examples,
        inputs=[*names, *momentum_names, "x", "y", "mask", "learning_rate"],
        outputs=[*(next_port(name) for name in (*names, *momentum_names)), "loss"],
    )


def trace_evaluate(app: App) -> Traced:
    """Summed loss over the unmasked samples of one batch, and the class chosen for each sample."""
    parameters = trainable(app)
    names = list(parameters)
    module = copy.deepcopy(app.module).eval()

    def evaluate(*flat: Tensor) -> tuple[Tensor, Tensor]:
        x, y, mask = flat[len(names) :]
        logits = _logits(app, module, _named(names, flat), x)
        return (mask * _losses(app, logits, y)).sum(), logits.argmax(dim=1)

    examples = [*parameters.values(), *example_batch(app)]
    return Traced(
        program=_trace(app, "evaluate", evaluate, examples),
        examples=examples,
        inputs=[*names, "x", "y", "mask"],
        outputs=["loss_sum", "predicted"],
    )


def trace_infer(app: App) -> Traced:
    """Logits of any number of samples; parameters are inputs still, so that nothing is folded into them."""
    parameters = trainable(app)
    names = list(parameters)
    infer = _Infer(app, copy.deepcopy(app.module).eval(), names)
    examples = [*parameters.values(), app.examples(max(app.batch_size, MIN_TRACE_BATCH))]
    dynamic = ((*(None for _ in names), {0: Dim("batch")}),)
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        program = _guarded(
            app, "infer", lambda: torch.export.export(infer, tuple(examples), dynamic_shapes=dynamic, strict=False)
        )
    return Traced(program=program, examples=examples, inputs=[*names, "x"], outputs=["logits"])


class _Infer(torch.nn.Module):
    """The module with its parameters as arguments."""

    def __init__(self, app: App, module: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self._app, self._inner, self._names = app, module, names
        self.eval()

    def forward(self, *flat: Tensor) -> Tensor:
        return _logits(self._app, self._inner, _named(self._names, flat), flat[-1])


def example_batch(app: App) -> tuple[Tensor, Tensor, Tensor]:
    """x, y and mask to trace and to verify with: all classes in turn, the last sample masked out if there are two."""
    labels = torch.arange(app.batch_size) % app.num_classes
    mask = torch.ones(app.batch_size)
    if app.batch_size > 1:
        mask[-1] = 0.0
    return app.examples(app.batch_size), labels, mask


def _named(names: Sequence[str], flat: Sequence[Tensor]) -> Tensors:
    return dict(zip(names, flat, strict=False))


def _logits(app: App, module: torch.nn.Module, parameters: Tensors, x: Tensor) -> Tensor:
    logits = torch.func.functional_call(module, parameters, (x,))
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[1] != app.num_classes:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UnsupportedModel(
            f"App {app.name}: the module gave {got}, expected logits of shape (batch, {app.num_classes})"
        )
    return logits


def _losses(app: App, logits: Tensor, labels: Tensor) -> Tensor:
    losses = app.loss(logits, labels)
    if losses.shape != labels.shape:
        raise UnsupportedModel(
            f"App {app.name}: the loss gave shape {tuple(losses.shape)}, expected one loss a sample, "
            f"{tuple(labels.shape)}; use reduction='none'"
        )
    return losses


def _trace(
    app: App, what: str, function: Callable[..., tuple[Tensor, ...]], examples: Sequence[Tensor]
) -> ExportedProgram:
    """The function over flat tensors as a graph of core operators. Raises UnsupportedModel."""

    def trace() -> ExportedProgram:
        # The fused attention kernels have no decomposition; the plain form is what inference runtimes run.
        with sdpa_kernel(SDPBackend.MATH):
            # Some decompositions fill a new tensor in place; functionalize makes values of that, too.
            functional = torch.func.functionalize(function)
            graph = make_fx(functional, decomposition_table=backward_decompositions())(*examples)
        _check_chance(app, what, graph)
        return torch.export.export(graph, tuple(examples))

    return _guarded(app, what, trace)


def _check_chance(app: App, what: str, graph: GraphModule) -> None:
    for node in graph.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
            raise UnsupportedModel(
                f"App {app.name}: the {what} step draws random numbers ({node.target}), expected none; "
                "turn dropout and noise off in the module"
            )


def _guarded(app: App, what: str, trace: Callable[[], Result]) -> Result:
    try:
        return trace()
    except UnsupportedModel:
        raise
    except Exception as exc:  # the tracer runs the App's own code, which may raise anything
        raise UnsupportedModel(
            f"App {app.name} ({type(app.module).__name__}): the {what} step cannot be traced ({exc}); avoid Python "
            "branches and loops that look at tensor values, and operators whose result has no fixed shape"
        ) from exc
