"""The exported graphs do what the module does. This is checked for every App before its Bundle is written.

The first four checks run on two batches: the traced batch and another one. A graph that captured a value of the traced
batch fails on the other.

1. One exported train step equals one step of eager torch (autograd and ``torch.optim``) from the same state. The change
   of each tensor and each state is compared relative to its own largest value, so small gradients must be right, too.
2. The exported evaluation equals the module's own loss.
3. The int8 graph accepts Version 0's slots and returns finite logits, for a batch and for one sample.
4. The int8 logits are similar with and without the runtime's fused operators: an error of its optimizer is found here
   and not on devices.
5. ``preprocess``, if present, equals its module, for several samples and for one.
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
from fanin.edge.export.tracing.examples import ExampleBatch, example_batch, labels_of, other_batch
from fanin.edge.runtimes.base import PaddedBatch, Runtime, StepSettings, TrainState
from fanin.edge.runtimes.graphs import optimizer_table, state_port
from fanin.edge.tensors import Float32s
from fanin.protos.errors import UnsupportedModel

TOLERANCE: Final = 1e-3
"""Relative to the largest value of a tensor: above rounding errors, below a wrong factor or a missing term."""
ROUNDING_TOLERANCE: Final = 0.1
"""The same for quantization-aware training, where an activation between two levels may round either way."""
LOSS_TOLERANCE: Final = 1e-4
"""Relative to max(1, |loss|): a hundred times the effect of the order of additions."""
ROUNDED_LOSS_TOLERANCE: Final = 2e-2
"""The same for quantization-aware training."""
INT8_TOLERANCE: Final = 0.05
"""Mean difference of logits relative to their range: above a few different roundings, below a wrong kernel."""
LEARNING_RATE: Final = 16.0
"""A large step, so that float32 keeps the digits of a gradient when it is added to a parameter."""
OTHER: Final = " for a batch that was not traced"
NOISE_FACTOR: Final = 20.0
"""A tensor may differ by this many times torch's own rounding error, in addition to the tolerance."""
FLOOR: Final = 1e-5
"""Allowed difference relative to the largest value of all tensors where torch's rounding error is unknown."""
TensorPair = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
"""A tensor of the graph, and the same tensor of eager torch."""


def verify(prepared: Prepared, bundle: Bundle, runtime: Runtime, plain: Runtime) -> None:
    """Check the graphs of a Bundle in one runtime against eager torch: the five checks of this module.

    Args:
        prepared: The App that was exported.
        bundle: Its Bundle.
        runtime: The runtime to verify in.
        plain: The same runtime without fused operators.

    Raises:
        UnsupportedModel: A graph differs from torch by more than the tolerance, or returns values that are not finite.
    """
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
            output = module(x)
            loss_sum = float((mask * app.loss(output, labels_of(prepared, y))).sum())
        sums = evaluate(parameters, batch)
        _check_loss(prepared, f"evaluation: loss{which}", sums.loss_sum, loss_sum)
        # (3)
        logits = predict(batch.x)
        for rows, num in ((logits, len(batch.x)), (predict(batch.x[:1]), 1)):
            if rows.shape != (num, *output.shape[1:]) or not np.isfinite(rows).all():
                raise UnsupportedModel(
                    f"App {app.name}: the int8 graph returned logits {rows.shape} for {num} samples, "
                    f"expected finite ones of shape {(num, *output.shape[1:])}; please report the module"
                )
        # (4)
        expected_logits = predict_plainly(batch.x)
        # The inputs of the other batch are closer together, and so may be its logits: the wider range counts.
        gap, spread = float(np.abs(logits - expected_logits).mean()), max(spread, float(np.ptp(expected_logits)))
        if gap > INT8_TOLERANCE * spread:
            raise UnsupportedModel(
                f"{prepared.what}: {runtime.name} returns int8 logits that differ by {gap:.1e} from those of "
                f"the plain graph, expected at most {INT8_TOLERANCE * spread:.1e}; please report the module"
            )
    # (5)
    verify_preprocess(app, bundle, runtime)


def _check_step(prepared: Prepared, bundle: Bundle, following: TrainState, examples: ExampleBatch, which: str) -> None:
    optimizer, table = prepared.app.recipe.optimizer, prepared.table
    twin, before = eager_step(prepared, examples), table.views(bundle.initial_parameters())
    noise = rounding_noise(prepared, examples, twin)
    # Adam divides a gradient by its own size: where it should be zero, rounding errors decide a full step.
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
    """The result of one step of eager torch: parameters by name, and optimizer states by port name."""

    parameters: Mapping[str, Float32s]
    states: Mapping[str, Float32s]


def rounding_noise(prepared: Prepared, examples: ExampleBatch, twin: EagerStep) -> dict[str, float]:
    """Return how far torch in float32 is from torch in float64, for each tensor.

    No graph can be required to be closer than that. Empty for a module that does not run in float64.
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


def eager_step(prepared: Prepared, examples: ExampleBatch, dtype: torch.dtype = torch.float32) -> EagerStep:
    """Run one step of eager torch on a batch without its padding."""
    recipe, module = prepared.app.recipe, copy.deepcopy(prepared.eager).to(dtype)
    learned = {name: value for name, value in module.named_parameters() if value.requires_grad}
    optimizer = recipe.optimizer.eager(learned.values(), LEARNING_RATE)
    x, y, mask = examples
    x, y = (part[mask > 0].to(dtype if part.is_floating_point() else part.dtype) for part in (x, y))
    loss = prepared.app.loss(module(x), labels_of(prepared, y)).mean()
    torch.autograd.backward(loss)
    for value in learned.values():
        # torch's optimizers skip a parameter without a gradient, even its decay; in a graph that gradient is 0.
        value.grad = torch.zeros_like(value) if value.grad is None else value.grad
    if recipe.clip_norm:
        torch.nn.utils.clip_grad_norm_(learned.values(), recipe.clip_norm)
    optimizer.step()
    buffers = dict(module.named_buffers())
    return EagerStep(
        parameters={
            name: (learned[name] if name in learned else buffers[name]).detach().numpy() for name in prepared.travelling
        },
        states={
            state_port(state, name): optimizer.state[value][key].numpy()
            for name, value in learned.items()
            for state, key in recipe.optimizer.states.items()
        },
    )


def _check_tensors(prepared: Prepared, what: str, pairs: Mapping[str, TensorPair], noise: Mapping[str, float]) -> None:
    """Compare each tensor of the graph with eager torch's, relative to its largest value.

    Args:
        prepared: The App.
        what: What is compared, with ``{}`` for the tensor's name.
        pairs: (tensor of the graph, tensor of eager torch) by name.
        noise: Rounding error of torch by name. It is allowed in addition; ``FLOOR`` replaces it for other names. A
            gradient that is zero except for rounding has no digits to compare.
    """
    tolerance = ROUNDING_TOLERANCE if prepared.app.recipe.quantization_aware else TOLERANCE
    sizes = {name: float(np.abs(expected).max(initial=0.0)) for name, (_, expected) in pairs.items()}
    floor = FLOOR * max(sizes.values(), default=0.0)
    for name, (actual, expected) in pairs.items():
        error = float(np.abs(actual - expected).max(initial=0.0))
        allowed = tolerance * sizes[name] + (NOISE_FACTOR * noise[name] if name in noise else floor)
        if not error <= allowed:
            raise UnsupportedModel(
                f"{prepared.what}: train step: {what.format(name)} of the exported graph differs from torch's by "
                f"{error:.1e}, expected at most {allowed:.1e} (its own largest change or value is {sizes[name]:.1e}); "
                "please report the module, its export is wrong"
            )


def _check_loss(prepared: Prepared, what: str, actual: float, expected: float) -> None:
    tolerance = ROUNDED_LOSS_TOLERANCE if prepared.app.recipe.quantization_aware else LOSS_TOLERANCE
    error = abs(actual - expected) / max(1.0, abs(expected))
    if not error <= tolerance:
        raise UnsupportedModel(
            f"{prepared.what}: {what} of the exported graph differs from torch's by {error:.1e}, expected at most "
            f"{tolerance:.0e}; please report the module, its export is wrong"
        )
