"""What is exported must do what the module does: held for every App, before its Bundle is written.

Each of the first four for two batches, the one that was traced and another: what a graph kept of the first is wrong for
the second.

1. One exported train step and eager torch (autograd and ``torch.optim``) from the same state agree. Each tensor's
   change and each state is held relative to its own largest value, so that a small gradient must be right too.
2. The exported evaluation agrees with the module's own loss.
3. The int8 graph takes Version 0's slots and gives finite logits, for a batch and for one sample.
4. It gives about the same logits fused by the runtime and plain: an optimizer's mistake is found here, not on devices.
5. ``preprocess``, where there is one, does what its module does, for several samples and for one.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export.prepare import Prepared
from fanin.edge.export.preprocess import verify_preprocess
from fanin.edge.export.tracing.examples import Examples, example_batch, labels_of, other_batch
from fanin.edge.runtimes.base import PaddedBatch, Runtime, StepSettings, TrainState
from fanin.edge.runtimes.graphs import optimizer_table, state_port
from fanin.edge.tensors import Float32s
from fanin.protos.errors import UnsupportedModel

TOLERANCE: Final = 1e-3
"""Of the largest value of a tensor: rounding stays below, a wrong factor or a missing term does not."""
ROUNDING_TOLERANCE: Final = 0.1
"""The same where training rounds to 8 bits: an activation between two steps may fall either way."""
LOSS_TOLERANCE: Final = 1e-4
"""Of max(1, |loss|): a hundred times what the order of additions changes."""
ROUNDED_LOSS_TOLERANCE: Final = 2e-2
"""The same where training rounds to 8 bits."""
INT8_TOLERANCE: Final = 0.05
"""Mean difference of logits, of their range: a few roundings to 8 bits the other way, not a wrong kernel."""
LEARNING_RATE: Final = 16.0
"""A large step, so that float32 keeps the digits of a gradient when it is added to a parameter."""
OTHER: Final = " for a batch that was not traced"
NOISE_FACTOR: Final = 20.0
"""How many times torch's own rounding a tensor may be off, in addition to the tolerance."""
FLOOR: Final = 1e-5
"""Of the largest value of all tensors: what a tensor may be off where torch's rounding is not known."""

Pair = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
"""A tensor as the graph has it, and as eager torch has it."""


def verify(prepared: Prepared, bundle: Bundle, runtime: Runtime, plain: Runtime) -> None:
    """The module's checklist; ``plain`` is the runtime without fused operators. Raises UnsupportedModel."""
    app = prepared.app
    traced = example_batch(prepared)
    parameters = bundle.initial_parameters()
    step, evaluate = runtime.open_train(bundle), runtime.open_evaluate(bundle)
    predict, predict_plainly = (each.open_predict(bundle, parameters) for each in (runtime, plain))
    module, spread = copy.deepcopy(prepared.eager).eval(), 0.0
    for examples, which in ((traced, ""), (other_batch(prepared, traced), OTHER)):
        x, y, mask = examples
        batch = PaddedBatch(x=x.numpy(), y=y.numpy(), mask=mask.numpy())
        # (1)
        following, _ = step(step.begin(parameters), batch, StepSettings(learning_rate=LEARNING_RATE))
        _check_step(prepared, bundle, following, examples, which)
        # (2)
        with torch.no_grad():
            said = module(x)
            loss_sum = float((mask * app.loss(said, labels_of(prepared, y))).sum())
        sums = evaluate(parameters, batch)
        _check_loss(prepared, f"evaluation: loss{which}", sums.loss_sum, loss_sum)
        # (3)
        logits = predict(batch.x)
        for got, num in ((logits, len(batch.x)), (predict(batch.x[:1]), 1)):
            if got.shape != (num, *said.shape[1:]) or not np.isfinite(got).all():
                raise UnsupportedModel(
                    f"App {app.name}: the int8 graph gave logits {got.shape} for {num} samples, "
                    f"expected finite ones of shape {(num, *said.shape[1:])}"
                )
        # (4)
        expected_logits = predict_plainly(batch.x)
        # The other batch's inputs lie nearer together, and so may its logits: the wider range counts.
        gap, spread = float(np.abs(logits - expected_logits).mean()), max(spread, float(np.ptp(expected_logits)))
        if gap > INT8_TOLERANCE * spread:
            raise UnsupportedModel(
                f"{prepared.what}: {runtime.name} gives int8 logits {gap:.1e} off those of "
                f"the plain graph, expected at most {INT8_TOLERANCE * spread:.1e}; please report the module"
            )
    # (5)
    verify_preprocess(app, bundle, runtime)


def _check_step(prepared: Prepared, bundle: Bundle, following: TrainState, examples: Examples, which: str) -> None:
    optimizer, table = prepared.app.recipe.optimizer, prepared.table
    twin, before = eager_step(prepared, examples), table.views(bundle.initial_parameters())
    noise = rounding_noise(prepared, examples, twin)
    # Adam divides a gradient by its own size: where it should be zero, rounding decides about a whole step.
    compared = [name for name in before if name in prepared.tracked or not optimizer.counts_steps]
    after = table.views(following.parameters)
    changes = {
        name: (
            np.subtract(after[name], before[name], dtype=np.float64),
            np.subtract(twin.parameters[name], before[name], dtype=np.float64),
        )
        for name in compared
    }
    _check_tensors(prepared, "the next {}" + which, changes, noise)
    states = optimizer_table(bundle.manifest).views(following.optimizer)
    for kind in optimizer.states:
        names = [state_port(kind, name) for name in prepared.learned]
        pairs = {name: (states[name].astype(np.float64), twin.states[name].astype(np.float64)) for name in names}
        _check_tensors(prepared, "the next {}" + which, pairs, noise)


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerStep:
    """What eager torch ends with: parameters by name, and the optimizer's states by the names of their ports."""

    parameters: Mapping[str, Float32s]
    states: Mapping[str, Float32s]


def rounding_noise(prepared: Prepared, examples: Examples, twin: EagerStep) -> dict[str, float]:
    """How far torch in float32 is from torch in float64, by name: what no graph can be held to be nearer than.

    Empty for a module that has no form in float64.
    """
    try:
        exact = eager_step(prepared, examples, torch.float64)
    except (RuntimeError, TypeError):
        return {}
    both = ((twin.parameters, exact.parameters), (twin.states, exact.states))
    return {
        name: float(np.abs(value - precise[name]).max(initial=0.0))
        for rough, precise in both
        for name, value in rough.items()
    }


def eager_step(prepared: Prepared, examples: Examples, dtype: torch.dtype = torch.float32) -> EagerStep:
    """One step of eager torch on a batch, its padding cut off."""
    recipe, module = prepared.app.recipe, copy.deepcopy(prepared.eager).to(dtype)
    held = {name: value for name, value in module.named_parameters() if value.requires_grad}
    optimizer = recipe.optimizer.eager(held.values(), LEARNING_RATE)
    x, y, mask = examples
    x, y = (part[mask > 0].to(dtype if part.is_floating_point() else part.dtype) for part in (x, y))
    loss = prepared.app.loss(module(x), labels_of(prepared, y)).mean()
    torch.autograd.backward(loss)
    for value in held.values():
        # Where the loss does not reach, torch's optimizers do nothing, not even decay; in a graph that gradient is 0.
        value.grad = torch.zeros_like(value) if value.grad is None else value.grad
    if recipe.clip_norm:
        torch.nn.utils.clip_grad_norm_(held.values(), recipe.clip_norm)
    optimizer.step()
    buffers = dict(module.named_buffers())
    return EagerStep(
        parameters={
            name: (held[name] if name in held else buffers[name]).detach().numpy() for name in prepared.travelling
        },
        states={
            state_port(state, name): optimizer.state[value][key].numpy()
            for name, value in held.items()
            for state, key in recipe.optimizer.states.items()
        },
    )


def _check_tensors(prepared: Prepared, what: str, pairs: Mapping[str, Pair], noise: Mapping[str, float]) -> None:
    """Hold each tensor of the graph (first of a pair) to eager torch's (second), relative to its largest value.

    A tensor may also be off by torch's own rounding: ``noise``, or ``FLOOR`` where a name is not in it. A gradient that
    is zero but for rounding has no digits to compare.
    """
    tolerance = ROUNDING_TOLERANCE if prepared.app.recipe.quantization_aware else TOLERANCE
    sizes = {name: float(np.abs(expected).max(initial=0.0)) for name, (_, expected) in pairs.items()}
    floor = FLOOR * max(sizes.values(), default=0.0)
    for name, (got, expected) in pairs.items():
        error = float(np.abs(got - expected).max(initial=0.0))
        allowed = tolerance * sizes[name] + (NOISE_FACTOR * noise[name] if name in noise else floor)
        if not error <= allowed:
            raise UnsupportedModel(
                f"{prepared.what}: train step: {what.format(name)} of the exported graph differs from torch's by "
                f"{error:.1e}, expected at most {allowed:.1e} (its own largest change or value is {sizes[name]:.1e}); "
                "please report the module, its export is wrong"
            )


def _check_loss(prepared: Prepared, what: str, got: float, expected: float) -> None:
    tolerance = ROUNDED_LOSS_TOLERANCE if prepared.app.recipe.quantization_aware else LOSS_TOLERANCE
    error = abs(got - expected) / max(1.0, abs(expected))
    if not error <= tolerance:
        raise UnsupportedModel(
            f"{prepared.what}: {what} of the exported graph differs from torch's by {error:.1e}, expected at most "
            f"{tolerance:.0e}; please report the module, its export is wrong"
        )
