"""The contract of a Trainer as a check that runs in any test.

check_trainer(MyTrainer(), example_model(bundle), example_assignment(bundle))
"""

from dataclasses import replace
from typing import Final

import numpy as np

from fanin.clients.device.conditions import Interrupted, ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change, Trainer, make_update
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.versions import sign_version
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import foreign_text

STEP_EXPONENT = -24
"""Step of the grid: it holds changes up to 128 with ``fixed32``."""
_TINY: Final = 2.0**-20
"""Factor of a learning rate with which a training changes nearly nothing."""


class Countdown:
    """A ``should_continue`` that returns True ``num_allowed`` times, and then raises Interrupted."""

    def __init__(self, num_allowed: int | None = None) -> None:
        self.num_calls = 0
        self._num_allowed = num_allowed

    def __call__(self) -> bool:
        self.num_calls += 1
        if self._num_allowed is not None and self.num_calls > self._num_allowed:
            raise Interrupted(f"stopped after {self._num_allowed} calls")
        return True


def check_trainer(trainer: Trainer, model: OpenedModel, assignment: m.Assignment) -> Change:
    """Check that a Trainer keeps its contract.

    1. It has a ``runtime`` and a ``graph_format`` of the Bundle.
    2. It returns a Change. The values have the model's shape, are finite float32, and can be encoded with the counts.
       A Bundle with personal parameters receives their new values.
    3. It calls ``should_continue`` at least once for each step and once in all.
    4. It leaves the arrays of the model unchanged. They can be written here, and are read-only on a device.
    5. A repeated training returns bit-identical values, and equal counts.
    6. Interrupted at its first, its middle and its last call, it raises Interrupted and does not call again.
    7. After an interruption it trains as before.
    8. The values are the change of the parameters, not the new parameters: with a tiny learning rate they stay the same
       if the parameters of the Version change.

    Args:
        trainer: The Trainer.
        model: The model to train, for example ``example_model(bundle)``.
        assignment: The work, for example ``example_assignment(bundle)``.

    Returns:
        The Change of an uninterrupted training.

    Raises:
        AssertionError: The Trainer breaks the contract; the message names the rule.
    """
    _check_members(trainer, model.bundle)
    countdown = Countdown()
    change = _train(trainer, model, assignment, countdown)
    num_calls = countdown.num_calls
    _check_change(change, model, assignment)
    if num_calls < max(1, change.num_steps):
        raise AssertionError(
            f"should_continue: called {num_calls} times in {change.num_steps} steps, expected a call before each"
        )
    _check_equal("a repeated training", change, _train(trainer, model, assignment, Countdown()))
    for num_allowed in sorted({0, num_calls // 2, num_calls - 1}):
        _check_interrupted(trainer, model, assignment, num_allowed)
    _check_equal("a training after an interruption", change, _train(trainer, model, assignment, Countdown()))
    _check_difference(trainer, model, assignment)
    return change


def example_model(bundle: Bundle) -> OpenedModel:
    """Return a Bundle's model with its initial parameters."""
    return OpenedModel(bundle=bundle, parameters=bundle.initial_parameters())


def example_assignment(bundle: Bundle, training: m.Training | None = None) -> m.Assignment:
    """Return an Assignment of Version 0 of a Bundle, with ``fixed32``. Its Version is signed by a new key.

    Args:
        bundle: The Bundle.
        training: How to train; by default two epochs with a learning rate of 0.1.
    """
    signed = bundle.signed
    version = sign_version(
        SigningKey.generate(),
        parent=None,
        run_id="run",
        bundle_sha256=bundle.sha256,
        parameters=bundle.manifest.artifacts[bundle.manifest.initial],
    )
    return m.Assignment(
        assignment_id="run.1.device",
        run_id="run",
        round=1,
        bundle=m.BundleRef(manifest=artifact_of(signed.data), public_key=signed.public_key, signature=signed.signature),
        version=version,
        grid=(STEP_EXPONENT,) * len(bundle.manifest.table.specs),
        codec=m.CodecSpec(name="fixed32", max_shift=2),
        training=training or m.Training(epochs=2, learning_rate=0.1, seed=1),
    )


def _check_members(trainer: Trainer, bundle: Bundle) -> None:
    runtime, graph_format = (getattr(trainer, name, None) for name in ("runtime", "graph_format"))
    if not isinstance(runtime, str) or not runtime:
        raise AssertionError(f"runtime: got {runtime!r}, expected a text: the library and its version")
    formats = bundle.manifest.graph_formats
    if graph_format not in formats:
        raise AssertionError(
            f"graph_format: got {graph_format!r}, expected one of the bundle's formats: {', '.join(formats)}"
        )


def _train(trainer: Trainer, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
    """Train with writable copies of the arrays: a write to a read-only array would be an error of numpy."""
    arrays = _arrays_of(model)
    copies = {name: values.copy() for name, values in arrays.items()}
    inputs = {kind: copies[f"inputs[{kind!r}]"] for kind in model.inputs}
    copy = replace(model, parameters=copies["parameters"], local=copies.get("local"), inputs=inputs)
    try:
        return trainer.train(copy, assignment, should_continue)
    except Interrupted:
        raise
    except Exception as exc:  # Any error: it is code of the caller.
        raise AssertionError(f"train: raised {foreign_text(exc)}; expected a Change") from exc
    finally:
        for name, values in arrays.items():
            if copies[name].tobytes() != values.tobytes():
                raise AssertionError(f"model.{name}: changed by the training; train on a copy")


def _arrays_of(model: OpenedModel) -> dict[str, Float32s]:
    arrays = {"parameters": model.parameters} | {f"inputs[{kind!r}]": each for kind, each in model.inputs.items()}
    return arrays if model.local is None else arrays | {"local": model.local}


def _check_change(change: Change, model: OpenedModel, assignment: m.Assignment) -> None:
    if not isinstance(change, Change):
        raise AssertionError(f"train: returned {type(change).__name__}, expected a Change")
    values, expected = change.values, model.parameters
    if (values.dtype, values.shape) != (expected.dtype, expected.shape):
        raise AssertionError(
            f"values: got {values.dtype} {values.shape}, expected {expected.dtype} {expected.shape} as the parameters"
        )
    kept = model.kept_values(assignment.training)
    form = None if kept is None else ("float32", kept.shape)
    received = None if change.local is None else (str(change.local.dtype), change.local.shape)
    if received != form:
        raise AssertionError(f"local: got {received}, expected {form} as the device's own parameters")
    if change.counts.get(m.EXAMPLES, 0) < 1:
        raise AssertionError(f"counts: got {dict(change.counts)}, expected {m.EXAMPLES!r} of at least 1")
    try:
        make_update(assignment, model.bundle.manifest.table, change, m.Telemetry())
    except ValueError as exc:
        raise AssertionError(f"change: cannot be encoded as an Update ({exc})") from exc


def _check_equal(what: str, first: Change, second: Change) -> None:
    locals_ = [b"" if change.local is None else change.local.tobytes() for change in (first, second)]
    has_equal_counts = (first.counts, first.ranges) == (second.counts, second.ranges)
    if first.values.tobytes() != second.values.tobytes() or not has_equal_counts or len(set(locals_)) > 1:
        raise AssertionError(
            f"{what}: returned another change, expected a bit-identical one; derive random numbers from "
            "app_seed(model, assignment, partition)"
        )


def _check_interrupted(trainer: Trainer, model: OpenedModel, assignment: m.Assignment, num_allowed: int) -> None:
    countdown = Countdown(num_allowed)
    try:
        _train(trainer, model, assignment, countdown)
    except Interrupted:
        if countdown.num_calls == num_allowed + 1:
            return
        raise AssertionError(f"Interrupted at call {num_allowed + 1}: continued, expected the end") from None
    raise AssertionError(f"Interrupted at call {num_allowed + 1}: did not leave train; do not catch it")


def _check_difference(trainer: Trainer, model: OpenedModel, assignment: m.Assignment) -> None:
    """Train from two points with a tiny learning rate: the changes are nearly equal, the new parameters are not."""
    training = replace(assignment.training, epochs=1, learning_rate=assignment.training.learning_rate * _TINY)
    work, base = replace(assignment, training=training), model.parameters
    other = base + np.ldexp(np.maximum(np.abs(base), np.float32(1.0)), -7)
    before, after = (
        _train(trainer, replace(model, parameters=each), work, Countdown()).values.astype(np.float64)
        for each in (base, other)
    )
    move = other.astype(np.float64) - base
    # The changes of a convex model contract, also if the trainer ignores the learning rate: the product is negative.
    if move @ (after - before) > 0.5 * (move @ move):
        raise AssertionError(
            "values: follow the parameters of the version, expected their change; return the new parameters minus "
            "model.parameters"
        )
