"""The contract of a Trainer as a check that runs in any test.

check_trainer(MyTrainer(), example_model(bundle), example_assignment(bundle))
"""

from fanin.clients.device.conditions import Interrupted
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change, Trainer, make_update
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.versions import sign_version
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of

STEP_EXPONENT = -24
"""Step of the grid: it holds changes up to 128 with ``fixed32``."""


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

    1. Its values have the model's shape, are finite float32, and can be encoded with its counts. It returns the new
       personal parameters of a Bundle that has some.
    2. It calls ``should_continue`` at least once for each step and once in all.
    3. It leaves the parameters of the model unchanged.
    4. A repeated training returns bit-identical values, and equal counts.
    5. Interrupted at its first, its middle and its last call, it raises Interrupted and does not call again.
    6. After an interruption it trains as before.

    Args:
        trainer: The Trainer.
        model: The model to train, for example ``example_model(bundle)``.
        assignment: The work, for example ``example_assignment(bundle)``.

    Returns:
        The Change of an uninterrupted training.

    Raises:
        AssertionError: The Trainer breaks the contract; the message names the rule.
    """
    base = model.parameters.tobytes()
    countdown = Countdown()
    change = trainer.train(model, assignment, countdown)
    num_calls = countdown.num_calls
    _check_change(change, model, assignment)
    if num_calls < max(1, change.num_steps):
        raise AssertionError(
            f"should_continue: called {num_calls} times in {change.num_steps} steps, expected a call before each"
        )
    _check_base(model, base)
    _check_equal("a repeated training", change, trainer.train(model, assignment, Countdown()))
    for num_allowed in sorted({0, num_calls // 2, num_calls - 1}):
        _check_interrupted(trainer, model, assignment, num_allowed)
        _check_base(model, base)
    _check_equal("a training after an interruption", change, trainer.train(model, assignment, Countdown()))
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


def _check_change(change: Change, model: OpenedModel, assignment: m.Assignment) -> None:
    values, expected = change.values, model.parameters
    if (values.dtype, values.shape) != (expected.dtype, expected.shape):
        raise AssertionError(
            f"values: got {values.dtype} {values.shape}, expected {expected.dtype} {expected.shape} as the parameters"
        )
    local = model.bundle.manifest.local
    form = None if local is None else ("float32", (local.table.num_values,))
    received = None if change.local is None else (str(change.local.dtype), change.local.shape)
    if received != form:
        raise AssertionError(f"local: got {received}, expected {form} as the bundle's personal parameters")
    if change.counts.get(m.EXAMPLES, 0) < 1:
        raise AssertionError(f"counts: got {dict(change.counts)}, expected {m.EXAMPLES!r} of at least 1")
    try:
        make_update(assignment, model.bundle.manifest.table, change, m.Telemetry())
    except ValueError as exc:
        raise AssertionError(f"change: cannot be encoded as an Update ({exc})") from exc


def _check_base(model: OpenedModel, base: bytes) -> None:
    if model.parameters.tobytes() != base:
        raise AssertionError("model.parameters: changed by the training; train on a copy")


def _check_equal(what: str, first: Change, second: Change) -> None:
    locals_ = [b"" if change.local is None else change.local.tobytes() for change in (first, second)]
    if first.values.tobytes() != second.values.tobytes() or first.counts != second.counts or len(set(locals_)) > 1:
        raise AssertionError(
            f"{what}: returned another change, expected a bit-identical one; derive random numbers from "
            "assignment.training.seed, the partition and assignment.round"
        )


def _check_interrupted(trainer: Trainer, model: OpenedModel, assignment: m.Assignment, num_allowed: int) -> None:
    countdown = Countdown(num_allowed)
    try:
        trainer.train(model, assignment, countdown)
    except Interrupted:
        if countdown.num_calls == num_allowed + 1:
            return
        raise AssertionError(f"Interrupted at call {num_allowed + 1}: continued, expected the end") from None
    raise AssertionError(f"Interrupted at call {num_allowed + 1}: did not leave train; do not catch it")
