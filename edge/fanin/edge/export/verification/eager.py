"""The train step of eager torch (autograd and ``torch.optim``), the reference of the exported train step.

A pass computes loss and gradients, an update applies the optimizer to them. One pass serves several updates. Both exist
in float32 and in float64: their difference is torch's own rounding error, and no graph can be required to be closer.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fanin.edge.export.app.inputs.named import numpy_inputs, rows_of
from fanin.edge.export.app.losses import loss_sum
from fanin.edge.export.app.optimizers.optimizer import Tensors
from fanin.edge.export.graph.examples import (
    ExampleBatch,
    check_output,
    example_batch,
    loss_targets,
    other_batch,
)
from fanin.edge.export.module.draws import fixed_draws, values_of
from fanin.edge.export.module.kernels import plain_encoders, plain_kernels
from fanin.edge.export.module.prepare import Prepared
from fanin.edge.runtimes.base import PaddedBatch
from fanin.edge.runtimes.graphs import state_port
from fanin.edge.runtimes.randomness import RandomPort
from fanin.edge.tensors import Array

RANDOM_KEY: Final = 5
NUM_STEPS: Final = 3
"""Steps of a verification of an optimizer that counts them."""
FLOOR: Final = 1e-7
"""Floor of a tensor's error, relative to the largest norm among the tensors. So it fits a loss of any scale."""
UNKNOWN_FLOOR: Final = 1e-5
"""``FLOOR`` for a module that does not run in float64: torch's rounding error is unknown."""
SURE_SHARE: Final = 1e-2
"""A change of all gradients by this share of their root mean square must not reverse the step of a value."""
NEIGHBOR_DISTANCES: Final = (1e-7, 1e-7, 1e-7, 1e-6, 1e-6)
"""Change of the parameters in each neighbor, relative to themselves: a unit in the last place of float32, and the sum
of the roundings of a deep module. Without kinks, both change a tensor by less than the tolerance."""
OTHER: Final = " for a batch that was not traced"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDraws:
    """The random numbers of one step: its ports, the key and the number of the step, from 0 on."""

    ports: Sequence[RandomPort] = ()
    key: int = 0
    step: int = 0


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
        anchor: Parameters towards which the term pulls, by name; none without the term.
        control: Control variates by name, added to the gradients; none without them.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The batch of a step, and torch's results for it.

    Attributes:
        examples: The batch.
        twin: The result in float32.
        exact: The result in float64; None for a module that does not run in it.
        neighbors: Computes the results in float32 from parameters that differ by rounding, at the first call.
        which: The words that name the batch in errors.
        steps: The numbers of the steps, from 0 on, that are checked with this batch.
    """

    examples: ExampleBatch
    twin: EagerPass
    exact: EagerPass | None
    neighbors: Callable[[], tuple[EagerPass, ...]]
    which: str
    steps: Sequence[int]

    @property
    def batch(self) -> PaddedBatch:
        """The batch as runtimes accept it."""
        inputs, y, mask = self.examples
        return PaddedBatch(inputs=numpy_inputs(inputs), y=y.numpy(), mask=mask.numpy())


def eager_pass(
    prepared: Prepared, examples: ExampleBatch, draws: StepDraws, dtype: torch.dtype = torch.float32
) -> EagerPass:
    """Run eager torch on a batch.

    Args:
        prepared: The App.
        examples: The batch.
        draws: The random numbers that the module draws. Without any, the batch runs without its padding. Otherwise they
            have the shapes of the complete batch, and the mask excludes the padding from the loss.
        dtype: Dtype of the module and of float inputs.
    """
    inputs, y, mask = examples
    inputs = {name: _as(part, dtype) for name, part in inputs.items()}
    y, mask = _as(y, dtype), _as(mask, dtype)
    output, evaluated = _evaluation(prepared, (inputs, y, mask), dtype)
    app, module = prepared.app, copy.deepcopy(prepared.eager).to(dtype)
    learned = {name: value for name, value in module.named_parameters() if value.requires_grad}
    with ExitStack() as stack:
        rows = mask > 0
        if draws.ports:
            rows = torch.ones_like(rows)
            stack.enter_context(plain_kernels())
            stack.enter_context(fixed_draws(draws.ports, values_of(draws.ports, draws.key, draws.step)))
        trained = check_output(app, app.call(module, rows_of(inputs, rows)))
        total = loss_sum(app.loss, trained, loss_targets(y[rows]), mask[rows])
    loss = total / mask.sum()
    # A parameter without a gradient has a gradient of 0 here; no step moves it.
    gradients = torch.autograd.grad(loss, list(learned.values()), allow_unused=True, materialize_grads=True)
    buffers = dict(module.named_buffers())
    return EagerPass(
        loss=float(loss.detach()),
        values={name: value.detach() for name, value in learned.items()},
        gradients=dict(zip(learned, gradients, strict=True)),
        tracked={name: buffers[name].detach() for name in prepared.tracked},
        output=output,
        loss_sum=evaluated,
    )


@torch.no_grad()
def _evaluation(prepared: Prepared, examples: ExampleBatch, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Return the output of the module in evaluation mode, and the summed loss of the unmasked samples."""
    app, (inputs, y, mask) = prepared.app, examples
    with plain_encoders():
        output = check_output(app, app.call(copy.deepcopy(prepared.eager).to(dtype).eval(), inputs))
    return app.predicted(output), float(loss_sum(app.loss, output, loss_targets(y), mask))


def _as(part: Tensor, dtype: torch.dtype) -> Tensor:
    return part.to(dtype) if part.is_floating_point() else part


def exact_pass(prepared: Prepared, examples: ExampleBatch, draws: StepDraws) -> EagerPass | None:
    """Run eager torch in float64; None for a module that does not run in it."""
    try:
        return eager_pass(prepared, examples, draws, torch.float64)
    except (RuntimeError, TypeError):
        return None


def neighbor_passes(prepared: Prepared, examples: ExampleBatch, draws: StepDraws) -> tuple[EagerPass, ...]:
    """Run eager torch from parameters that differ by NEIGHBOR_DISTANCES, up or down."""

    def neighbor(seed: int, distance: float) -> EagerPass:
        generator, module = torch.Generator().manual_seed(seed), copy.deepcopy(prepared.eager)
        with torch.no_grad():
            for value in module.parameters():
                signs = 2.0 * (torch.rand(value.shape, generator=generator) < 0.5) - 1.0
                value.mul_(1.0 + distance * signs)
        return eager_pass(replace(prepared, eager=module), examples, draws)

    return tuple(neighbor(*each) for each in enumerate(NEIGHBOR_DISTANCES))


def cases_of(prepared: Prepared) -> Iterator[Case]:
    """Yield the cases of a verification: the traced batch, another one, and the traced one again.

    The last one is only for optimizers that count steps. It is a case of its own if its random numbers differ from
    those of the first one. A case is computed when it is requested. It is several times as large as the model.
    """
    traced, ports = example_batch(prepared), prepared.draws
    batches = [(traced, ""), (other_batch(prepared, traced), OTHER)]
    if ports and prepared.tracked:
        # Running statistics exclude padding, but the draws of eager torch are those of the complete batch.
        batches = [((inputs, y, torch.ones_like(mask)), which) for (inputs, y, mask), which in batches]
    num_steps = NUM_STEPS if prepared.app.recipe.optimizer.counts_steps else len(batches)
    for step in range(num_steps if ports else len(batches)):
        steps = (step,) if ports else range(step, num_steps, len(batches))
        yield _case(prepared, batches[step % 2], StepDraws(ports=ports, key=RANDOM_KEY, step=step), steps)


def _case(prepared: Prepared, batch: tuple[ExampleBatch, str], draws: StepDraws, steps: Sequence[int]) -> Case:
    examples, which = batch
    return Case(
        examples=examples,
        twin=eager_pass(prepared, examples, draws),
        exact=exact_pass(prepared, examples, draws),
        neighbors=cache(partial(neighbor_passes, prepared, examples, draws)),
        which=which,
        steps=steps,
    )


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
    values = {name: value.clone() for name, value in computed.values.items() if name not in prepared.unused}
    optimizer = recipe.optimizer.eager(values.values(), 0.0)
    for _ in range(start.num_steps):
        for value in values.values():
            value.grad = torch.zeros_like(value)
        optimizer.step()
    for name, value in values.items():
        if start.num_steps:
            for state, key in recipe.optimizer.states.items():
                optimizer.state[value][key].copy_(start.states[state_port(state, name)])
        value.grad = computed.gradients[name]
        if start.pull:
            value.grad = value.grad + start.pull * (value - start.anchor[name])
        elif recipe.clip_norm:
            # Clipping changes gradients in place.
            value.grad = value.grad.clone()
    if recipe.clip_norm:
        torch.nn.utils.clip_grad_norm_(values.values(), recipe.clip_norm)
    for name, value in values.items():
        if name in start.control:
            assert value.grad is not None, "it was set above"
            value.grad = value.grad + start.control[name]
    (group,) = optimizer.param_groups
    optimizer.param_groups = [
        {**group, "params": [value], "lr": start.learning_rate * prepared.rates[name]} for name, value in values.items()
    ]
    optimizer.step()
    kept = {name: computed.values[name] for name in prepared.unused}
    states = {
        state_port(state, name): optimizer.state[value][key]
        for name, value in values.items()
        for state, key in recipe.optimizer.states.items()
    } | {
        state_port(state, name): start.states[state_port(state, name)]
        for name in kept
        for state in recipe.optimizer.states
    }
    return EagerStep(
        parameters={name: value.numpy() for name, value in (values | kept).items()},
        states={name: value.numpy() for name, value in states.items()},
    )


def sure_values(prepared: Prepared, case: Case, start: StepStart) -> dict[str, npt.NDArray[np.bool_]]:
    """Return for each parameter a mask of the values whose step direction does not depend on rounding.

    Some steps have the size of the learning rate, such as each of Lion and the first of Adam. They reverse if the sign
    of a number near zero differs. So torch computes the step for slightly larger and for slightly smaller gradients. A
    value is sure if both steps differ by less than half of the learning rate.

    Args:
        prepared: The App.
        case: torch's gradients.
        start: The state and the settings before the step.
    """
    computed = case.exact or case.twin
    sizes = {name: size_of(value) for name, value in computed.gradients.items()}
    least = max((UNKNOWN_FLOOR if case.exact is None else FLOOR) * max(sizes.values()), torch.finfo(torch.float32).tiny)

    def following(sign: float) -> Mapping[str, Array]:
        gradients = {
            name: value + sign * max(SURE_SHARE * sizes[name], least) for name, value in computed.gradients.items()
        }
        return eager_step(prepared, replace(computed, gradients=gradients), start).parameters

    above, below = following(1.0), following(-1.0)
    return {
        name: np.abs(np.subtract(above[name], below[name], dtype=np.float64))
        <= 0.5 * start.learning_rate * prepared.rates[name]
        for name in above
    }


def size_of(value: Tensor) -> float:
    """Return the root mean square of a tensor; 0.0 if it is empty."""
    return float(value.detach().to(torch.float64).square().mean().sqrt()) if value.numel() else 0.0
