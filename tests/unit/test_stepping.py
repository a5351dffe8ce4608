"""The train step's slabs: states are immutable, and a loop that keeps only the last state uses two slabs."""

import weakref

import numpy as np
from support.models import BATCH_SIZE, batches, bundle_of

from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import StepSettings, TrainState
from fanin.edge.runtimes.stepping import MAX_SLABS

RATE = StepSettings(learning_rate=0.05)


def states(num: int) -> list[TrainState]:
    """Return the states of ``num`` consecutive steps."""
    bundle = bundle_of("mlp")
    step = open_runtime("onnx").open_train(bundle)
    history = [step.begin(bundle.initial_parameters())]
    for index in range(num):
        (batch,) = batches(BATCH_SIZE, seed=index)
        history.append(step(history[-1], batch, RATE)[0])
    return history


def test_states_that_are_kept_are_not_written_to() -> None:
    history = states(7)
    bundle = bundle_of("mlp")
    step = open_runtime("onnx").open_train(bundle)
    state = step.begin(bundle.initial_parameters())
    for index, expected in enumerate(history[1:]):
        (batch,) = batches(BATCH_SIZE, seed=index)
        state, _ = step(state, batch, RATE)
        np.testing.assert_array_equal(state.parameters, expected.parameters)
        np.testing.assert_array_equal(state.optimizer, expected.optimizer)
        assert state.num_steps == index + 1


def test_a_piece_of_a_state_is_kept_too() -> None:
    bundle = bundle_of("mlp")
    step = open_runtime("onnx").open_train(bundle)
    state = step.begin(bundle.initial_parameters())
    (batch,) = batches(BATCH_SIZE, seed=1)
    state, _ = step(state, batch, RATE)
    piece, copy = state.parameters[:5], state.parameters[:5].copy()
    for _ in range(5):
        state, _ = step(state, batch, RATE)
    np.testing.assert_array_equal(piece, copy)


def test_two_steps_from_one_state_are_the_same() -> None:
    first, *_ = states(1)
    bundle = bundle_of("mlp")
    step = open_runtime("onnx").open_train(bundle)
    (batch,) = batches(BATCH_SIZE, seed=2)
    one, loss = step(first, batch, RATE)
    two, second_loss = step(first, batch, RATE)
    assert loss == second_loss
    assert one.parameters.tobytes() == two.parameters.tobytes()
    assert one.parameters is not two.parameters


def test_a_loop_works_in_two_slabs() -> None:
    bundle = bundle_of("mlp")
    step = open_runtime("onnx").open_train(bundle)
    state = step.begin(bundle.initial_parameters())
    (batch,) = batches(BATCH_SIZE, seed=3)
    seen = set()
    for _ in range(10):
        state, _ = step(state, batch, RATE)
        seen.add(id(state.parameters))
    assert len(seen) == 2


def test_slabs_that_a_step_has_forgotten_are_freed_with_their_states() -> None:
    bundle = bundle_of("mlp")
    step = open_runtime("onnx").open_train(bundle)
    state, history = step.begin(bundle.initial_parameters()), []
    (batch,) = batches(BATCH_SIZE, seed=3)
    for _ in range(MAX_SLABS + 1):
        state, _ = step(state, batch, RATE)
        history.append(state)
    memory = weakref.ref(history[0].parameters.base)
    assert memory() is not None
    history.clear()
    assert memory() is None


def test_a_state_cannot_be_written_to_by_accident() -> None:
    state = states(1)[-1]
    assert not state.parameters.flags.writeable
    assert not state.optimizer.flags.writeable
