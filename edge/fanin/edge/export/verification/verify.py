"""The check of the exported graphs against the module. It runs for every App before its Bundle is written.

The checks run on two batches: the traced batch and another one. A graph that captured a value of the traced batch fails
on the other.

1. Exported train steps equal steps of eager torch (autograd and ``torch.optim``) from the same state. The check
   compares the loss, the change of each parameter, each optimizer state and each running statistic. An optimizer that
   counts steps is checked at the steps 1, 2 and 3. The states before the steps 2 and 3 are as large as the gradients,
   so each term matters. A setting that is 0.0 has another value in the check, as a Plan may set it.
2. The exported evaluation equals the module's own loss and predictions.
3. The int8 graph accepts Version 0's slots and returns finite logits, for a batch and for one sample.
4. The int8 logits are similar with and without the runtime's fused operators: an error of its optimizer is detected
   here and not on devices.
5. ``preprocess``, if present, equals its module, for several samples and for one.

A tensor is compared by the L2 norm of its error (``comparison``). Small gradients must be correct, too. So the learning
rate is large enough that each parameter's change exceeds the parameter, and float32 keeps the digits of the gradient.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from itertools import repeat
from typing import Final, cast

import numpy as np
import numpy.typing as npt
import torch

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.manifest import Manifest
from fanin.edge.export.app.optimizers.optimizer import Optimizer, Tensors
from fanin.edge.export.formats.preprocess import verify_preprocess
from fanin.edge.export.module.prepare import Prepared
from fanin.edge.export.verification.comparison import Triple, advice, check_loss, check_tensors, float64s_of
from fanin.edge.export.verification.eager import (
    RANDOM_KEY,
    UNKNOWN_FLOOR,
    Case,
    EagerPass,
    StepStart,
    cases_of,
    eager_step,
    size_of,
    sure_values,
    warm_states,
)
from fanin.edge.runtimes.base import Evaluate, NamedInputs, Predict, Runtime, StepSettings, TrainState, TrainStep
from fanin.edge.runtimes.graphs import optimizer_table, state_port
from fanin.edge.tensors import Array, Float32s
from fanin.protos.errors import UnsupportedModel

INT8_TOLERANCE: Final = 0.05
"""Mean difference of logits relative to their range: above a few different roundings, below a wrong kernel."""
MIN_RATE: Final = 16.0
MAX_CHANGE: Final = 2.0**100
"""Largest change of a parameter by a step, far below the end of float32."""
CLEAR_MARGIN: Final = 1e-3
"""Difference of the two largest logits, relative to their range, from which on a prediction must be equal."""
WARM_STEPS: Final = 12
"""Steps with one gradient that an optimizer that divides has made before a step. A mean with a decay of 0.99 has a
tenth of the gradient then, so that both decide the sign of a step of Lion."""
CHECKED_SHARE: Final = 0.5
"""Value in the check of a setting below 1.0 that is 0.0 in the App."""
CHECKED_FACTOR: Final = 2.0**-10
"""Value in the check of any other setting that is 0.0, such as a weight decay. Larger ones would hide the gradient."""
SEED: Final = 3
NUM_BATCHES: Final = 2
"""The traced batch and another one."""
Forward = tuple[NamedInputs, tuple[int, ...]]
"""The inputs of a batch, and the shape (B, ...) of the module's output for it."""


def verify(prepared: Prepared, bundle: Bundle, runtime: Runtime, plain: Runtime) -> None:
    """Check the graphs of a Bundle in one runtime against eager torch: the five checks of this module.

    Args:
        prepared: The App that was exported.
        bundle: Its Bundle.
        runtime: The runtime to verify in.
        plain: The same runtime without fused operators.

    Raises:
        UnsupportedModel: A graph differs from torch by more than the tolerance, or returns values that are not finite.
            The message names the tensor and its module.
    """
    # (1), (2)
    step, evaluate = runtime.open_train(bundle), runtime.open_evaluate(bundle)
    forwards = verify_training(prepared, bundle.manifest, step, evaluate, cases_of(prepared))
    parameters = bundle.completed(bundle.initial_parameters())
    # (3), (4)
    predict, predict_plainly = (each.open_predict(bundle, parameters) for each in (runtime, plain))
    _check_int8(prepared, runtime.name, (predict, predict_plainly), forwards)
    # (5)
    verify_preprocess(prepared.app, bundle, runtime)


def verify_training(
    prepared: Prepared, manifest: Manifest, step: TrainStep, evaluate: Evaluate, cases: Iterator[Case]
) -> list[Forward]:
    """Check the float graphs against eager torch: the checks 1 and 2 of this module.

    Args:
        prepared: The App that was exported.
        manifest: Has the ports of the graphs.
        step: The exported train step.
        evaluate: The exported evaluation.
        cases: The cases, from ``cases_of``.

    Returns:
        The inputs of each evaluated batch, and the shape of torch's output for it.

    Raises:
        UnsupportedModel: A result differs from torch's by more than the tolerance.
    """
    initial = prepared.table.flatten({name: value.numpy() for name, value in prepared.parameters.items()})
    forwards: list[Forward] = []
    for case in cases:
        _check_steps(prepared, manifest, (step, initial), case)
        if len(forwards) < NUM_BATCHES:
            _check_evaluation(prepared, evaluate, initial, case)
            forwards.append((case.batch.inputs, tuple(case.twin.output.shape)))
        # A case is several times as large as the model, so this one is freed before the next one is computed.
        del case
    return forwards


def verify_train(prepared: Prepared, bundle: Bundle, runtime: Runtime) -> None:
    """Check the train graph of another batch size against eager torch: the first check of this module.

    Args:
        prepared: The App with this batch size.
        bundle: Its Bundle for training with this batch size.
        runtime: The runtime to verify in.

    Raises:
        UnsupportedModel: A result differs from torch's by more than the tolerance.
    """
    initial = prepared.table.flatten({name: value.numpy() for name, value in prepared.parameters.items()})
    step = runtime.open_train(bundle)
    for case in cases_of(prepared):
        _check_steps(prepared, bundle.manifest, (step, initial), case)
        del case


def _check_int8(
    prepared: Prepared, runtime: str, predicts: tuple[Predict, Predict], forwards: Sequence[Forward]
) -> None:
    predict, predict_plainly = predicts
    spread = 0.0
    for inputs, (num_samples, *shape) in forwards:
        logits, first = predict(inputs), {name: array[:1] for name, array in inputs.items()}
        for rows, num in ((logits, num_samples), (predict(first), 1)):
            if rows.shape != (num, *shape) or not np.isfinite(rows).all():
                raise UnsupportedModel(
                    f"App {prepared.app.name}: the int8 graph returned logits {rows.shape} for {num} samples, "
                    f"expected finite ones of shape {(num, *shape)}; please report the module",
                    code="FN-0787",
                )
        expected = predict_plainly(inputs)
        # The inputs of the other batch are closer together, and so may be its logits: the wider range counts.
        gap, spread = float(np.abs(logits - expected).mean()), max(spread, float(np.ptp(expected)))
        if gap > INT8_TOLERANCE * spread:
            raise UnsupportedModel(
                f"{prepared.what}: {runtime} returns int8 logits that differ by {gap:.1e} from those of "
                f"the plain graph, expected at most {INT8_TOLERANCE * spread:.1e}; please report the module",
                code="FN-0787",
            )


def _check_evaluation(prepared: Prepared, evaluate: Evaluate, parameters: Float32s, case: Case) -> None:
    sums, twin, exact = evaluate(parameters, case.batch), case.twin, case.exact
    sure = None if exact is None else exact.loss_sum
    check_loss(prepared, f"evaluation: loss{case.which}", sums.loss_sum, (twin.loss_sum, sure))
    expected = twin.output.numpy()
    if not prepared.app.num_classes:
        triple = Triple(actual=sums.predicted, expected=expected, exact=None if exact is None else exact.output.numpy())
        check_tensors(
            prepared,
            "evaluation: {}" + case.which,
            {"predicted": triple},
            lambda: [float64s_of({"predicted": each.output.numpy()}, {}) for each in case.neighbors()],
        )
        return
    ordered = np.sort(expected, axis=-1)
    clear = ordered[..., -1] - ordered[..., -2] > CLEAR_MARGIN * np.ptp(expected)
    num = int(np.count_nonzero((sums.predicted != expected.argmax(-1)) & clear))
    if num and not prepared.app.recipe.quantization_aware:
        raise UnsupportedModel(
            f"{prepared.what}: evaluation: predicted{case.which}: {num} of {clear.size} classes of the exported graph "
            f"differ from torch's, expected none; {advice(prepared)}",
            code="FN-0789",
        )


def _check_steps(prepared: Prepared, manifest: Manifest, begin: tuple[TrainStep, Float32s], case: Case) -> None:
    (step, initial), states = begin, optimizer_table(manifest)
    prepared, settings = _with_every_term(prepared)
    table, tracked = prepared.table, {name: value.numpy() for name, value in prepared.tracked.items()}
    for num_steps in case.steps:
        start = _start(prepared, case, num_steps)
        anchor, control = (
            table.flatten({name: value.numpy() for name, value in part.items()} | tracked) if part else None
            for part in (start.anchor, start.control)
        )
        following, loss = step(
            TrainState(
                parameters=initial,
                optimizer=states.flatten({name: value.numpy() for name, value in start.states.items()}),
                num_steps=num_steps,
            ),
            case.batch,
            StepSettings(
                learning_rate=start.learning_rate,
                proximal_weight=start.pull,
                anchor=anchor,
                control=control,
                random_key=RANDOM_KEY,
                optimizer=settings,
            ),
        )
        _check_step(prepared, states.views(following.optimizer), following, (case, start))
        sure = None if case.exact is None else case.exact.loss
        check_loss(prepared, f"train step {num_steps + 1}: the loss{case.which}", loss, (case.twin.loss, sure))


def _with_every_term(prepared: Prepared) -> tuple[Prepared, dict[str, float]]:
    """Return the App with other values for the settings that are 0.0, and these values by name.

    Their terms would be 0.0 in the graph, and no error in them would be noticed. An optimizer of another package stays
    as it is if it is no dataclass.
    """
    app, optimizer = prepared.app, cast("object", prepared.app.recipe.optimizer)
    if not is_dataclass(optimizer) or isinstance(optimizer, type):
        return prepared, {}
    names = {each.name for each in fields(optimizer)}
    settings = {
        name: CHECKED_SHARE if setting.below <= 1.0 else CHECKED_FACTOR
        for name, setting in app.recipe.optimizer.settings.items()
        if setting.default == 0.0 and name in names
    }
    if not settings:
        return prepared, {}
    recipe = replace(app.recipe, optimizer=cast("Optimizer", replace(optimizer, **settings)))
    return replace(prepared, app=replace(app, recipe=recipe, validation=None)), settings


def _check_step(
    prepared: Prepared, states: Mapping[str, Array], following: TrainState, expected: tuple[Case, StepStart]
) -> None:
    case, start = expected
    what = f"train step {start.num_steps + 1}: the next {{}}{case.which}"
    twin = eager_step(prepared, case.twin, start)
    exact = None if case.exact is None else eager_step(prepared, case.exact, start)
    near = cache(lambda: [(each, eager_step(prepared, each, start)) for each in case.neighbors()])
    for kind in prepared.app.recipe.optimizer.states:
        names = [state_port(kind, name) for name in prepared.learned]
        triples = {
            name: Triple(
                actual=states[name], expected=twin.states[name], exact=None if exact is None else exact.states[name]
            )
            for name in names
        }
        check_tensors(prepared, what, triples, lambda: [float64s_of(step.states, {}) for _, step in near()])
    after = prepared.table.views(following.parameters)
    _check_tracked(prepared, what, after, case)
    if (sure := _sure(prepared, case, start)) is None:
        return
    before = {name: value.numpy() for name, value in prepared.learned.items()}
    changes = {
        name: Triple(
            actual=after[name],
            expected=twin.parameters[name],
            exact=None if exact is None else exact.parameters[name],
            before=value,
            kept=sure.get(name),
        )
        for name, value in before.items()
    }

    def changes_near() -> Sequence[Mapping[str, npt.NDArray[np.float64]]]:
        return [
            float64s_of(step.parameters, {name: value.numpy() for name, value in each.values.items()})
            for each, step in near()
        ]

    check_tensors(prepared, what, changes, changes_near)


def _check_tracked(prepared: Prepared, what: str, after: Mapping[str, Array], case: Case) -> None:
    """Check the running statistics after a step."""
    before = {name: value.numpy() for name, value in prepared.tracked.items()}

    def arrays_of(each: EagerPass) -> Mapping[str, Array]:
        return {name: each.tracked[name].numpy() for name in prepared.tracked}

    expected, exact = arrays_of(case.twin), None if case.exact is None else arrays_of(case.exact)
    tracked = {
        name: Triple(
            actual=after[name], expected=expected[name], exact=None if exact is None else exact[name], before=value
        )
        for name, value in before.items()
    }
    check_tensors(prepared, what, tracked, lambda: [float64s_of(arrays_of(each), before) for each in case.neighbors()])


def _sure(prepared: Prepared, case: Case, start: StepStart) -> Mapping[str, npt.NDArray[np.bool_]] | None:
    """Return masks of the values whose step direction does not depend on rounding; None if unknown.

    A parameter without a mask is compared completely.
    """
    if not prepared.app.recipe.optimizer.divides:
        return {}
    sure = sure_values(prepared, case, start)
    are_all_sure = all(each.all() for each in sure.values())
    # With quantization-aware training, a gradient may differ by a tenth of its norm, and so may any sign.
    is_unknown = prepared.app.recipe.quantization_aware and not (start.num_steps and are_all_sure)
    return None if is_unknown else sure


def _start(prepared: Prepared, case: Case, num_steps: int) -> StepStart:
    """Return the state and the settings before a step: those of a new device, then ones of the gradients' size."""
    computed, values, recipe = case.exact or case.twin, prepared.learned, prepared.app.recipe
    sizes = {name: size_of(value) for name, value in computed.gradients.items()}
    largest = max(sizes.values())
    generator = torch.Generator().manual_seed(SEED + num_steps)

    def random() -> Tensors:
        # Values far from zero, so that Adam's quotient of the states is well conditioned.
        return {
            name: (torch.rand(value.shape, generator=generator) + 0.5)
            * torch.where(torch.rand(value.shape, generator=generator) < 0.5, -1.0, 1.0)
            * (max(sizes[name], 1e-3 * largest) or 1.0)
            for name, value in values.items()
        }

    rate = MIN_RATE
    if not recipe.optimizer.divides:
        rates = (size_of(values[name]) / size for name, size in sizes.items() if size > UNKNOWN_FLOOR * largest)
        rate = max(MIN_RATE, min(MIN_RATE * max(rates, default=1.0), MAX_CHANGE / max(largest, 1e-30)))
    pull, anchor, control = 0.0, dict(values) if recipe.proximal else {}, {}
    if recipe.proximal and num_steps:
        pull = max(sizes[name] / max(size_of(value), 1e-3) for name, value in values.items()) or 1.0
        offsets = random()
        anchor = {name: value - offsets[name] / pull for name, value in values.items()}
    if recipe.scaffold:
        control = random() if num_steps else {name: torch.zeros_like(value) for name, value in values.items()}
    repeats = WARM_STEPS if recipe.optimizer.divides and not recipe.optimizer.counts_steps else 1
    gradients = (each for _ in range(num_steps) for each in repeat(random(), repeats))
    return StepStart(
        states=warm_states(prepared, gradients),
        num_steps=num_steps,
        learning_rate=2.0 ** round(math.log2(rate)),
        pull=float(np.float32(pull)),
        anchor=anchor,
        control=control,
    )
