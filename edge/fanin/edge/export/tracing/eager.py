"""The train step of eager torch (autograd and ``torch.optim``), the reference of the exported train step.

A pass computes loss and gradients, an update applies the optimizer to them. One pass serves several updates. Both exist
in float32 and in float64: their difference is torch's own rounding error, and no graph can be required to be closer.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fanin.edge.export.optimizers import Tensors
from fanin.edge.export.prepare import Prepared
from fanin.edge.export.tracing.examples import ExampleBatch, labels_of
from fanin.edge.runtimes.graphs import state_port
from fanin.edge.tensors import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerPass:
    """Loss and gradients of one batch.

    Attributes:
        loss: Mean loss over the unmasked samples.
        values: Parameters that learn, before the step.
        gradients: Their gradients.
        tracked: Running statistics after the pass.
        output: Output of the module in evaluation mode (B, ...).
        loss_sum: Summed loss of ``output`` over the unmasked samples.
    """

    loss: float
    values: Tensors
    gradients: Tensors
    tracked: Tensors
    output: Tensor
    loss_sum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStart:
    """The state and the settings with which a step begins.

    Attributes:
        states: Optimizer states by port name, after ``num_steps`` steps.
        num_steps: Steps before this one.
        learning_rate: Of the optimizer.
        pull: Weight of FedProx's proximal term.
        anchor: Parameters towards which the term pulls, by name.
        control: Control variates by name, added to the gradients.
    """

    states: Tensors
    num_steps: int
    learning_rate: float
    pull: float
    anchor: Tensors
    control: Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerStep:
    """The result of one step: parameters that learn by name, and optimizer states by port name."""

    parameters: Mapping[str, Array]
    states: Mapping[str, Array]


def eager_pass(prepared: Prepared, examples: ExampleBatch, dtype: torch.dtype = torch.float32) -> EagerPass:
    """Run eager torch on a batch without its padding."""
    app, module = prepared.app, copy.deepcopy(prepared.eager).to(dtype)
    learned = {name: value for name, value in module.named_parameters() if value.requires_grad}
    x, y, mask = examples
    x, y = (part.to(dtype if part.is_floating_point() else part.dtype) for part in (x, y))
    with torch.no_grad():
        evaluated = copy.deepcopy(module).eval()
        output = evaluated(x)
        loss_sum = float((mask * app.loss(output, labels_of(prepared, y))).sum())
    loss = app.loss(module(x[mask > 0]), labels_of(prepared, y[mask > 0])).mean()
    # torch's optimizers skip a parameter without a gradient, even its decay; in a graph that gradient is 0.
    gradients = torch.autograd.grad(loss, list(learned.values()), allow_unused=True, materialize_grads=True)
    buffers = dict(module.named_buffers())
    return EagerPass(
        loss=float(loss.detach()),
        values={name: value.detach() for name, value in learned.items()},
        gradients=dict(zip(learned, gradients, strict=True)),
        tracked={name: buffers[name].detach() for name in prepared.tracked},
        output=output,
        loss_sum=loss_sum,
    )


def exact_pass(prepared: Prepared, examples: ExampleBatch) -> EagerPass | None:
    """Run eager torch in float64; None for a module that does not run in it."""
    try:
        return eager_pass(prepared, examples, torch.float64)
    except (RuntimeError, TypeError):
        return None


def warm_states(prepared: Prepared, gradients: Iterable[Tensors]) -> Tensors:
    """Return the optimizer's states, by port name, after steps along these gradients that move no parameter."""
    values = {name: value.clone() for name, value in prepared.learned.items()}
    optimizer = prepared.app.recipe.optimizer.eager(values.values(), 0.0)
    for step in gradients:
        for name, value in values.items():
            value.grad = step[name]
        optimizer.step()
    return {
        state_port(state, name): (optimizer.state[value][key] if value in optimizer.state else torch.zeros_like(value))
        for name, value in values.items()
        for state, key in prepared.app.recipe.optimizer.states.items()
    }


def eager_step(prepared: Prepared, computed: EagerPass, start: StepStart) -> EagerStep:
    """Run one step of ``torch.optim`` on the gradients of a pass, in the dtype of the pass."""
    recipe = prepared.app.recipe
    values = {name: value.clone() for name, value in computed.values.items()}
    optimizer = recipe.optimizer.eager(values.values(), 0.0)
    for _ in range(start.num_steps):
        for value in values.values():
            value.grad = torch.zeros_like(value)
        optimizer.step()
    for name, value in values.items():
        if start.num_steps:
            for state, key in recipe.optimizer.states.items():
                optimizer.state[value][key].copy_(start.states[state_port(state, name)])
        value.grad = computed.gradients[name] + start.pull * (value - start.anchor[name])
    if recipe.clip_norm:
        torch.nn.utils.clip_grad_norm_(values.values(), recipe.clip_norm)
    for name, value in values.items():
        assert value.grad is not None, "it was set above"
        value.grad = value.grad + start.control[name]
    for group in optimizer.param_groups:
        group["lr"] = start.learning_rate
    optimizer.step()
    return EagerStep(
        parameters={name: value.numpy() for name, value in values.items()},
        states={
            state_port(state, name): optimizer.state[value][key].numpy()
            for name, value in values.items()
            for state, key in recipe.optimizer.states.items()
        },
    )
