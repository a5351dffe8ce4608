"""Outer optimizers: their results in any slices, and a contract that catches breaches."""

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.errors import raises
from support.virtual import plan

from fanin.edge.codecs.grid import no_reaches
from fanin.edge.codecs.vector import VectorLayout
from fanin.edge.tensors import Float32s, Float64s, TensorTable
from fanin.protos.errors import Corrupted, InvalidPlan
from fanin.protos.messages import CodecSpec
from fanin.server.aggregation.checked import optimizer_of
from fanin.server.aggregation.contract import check_optimizer
from fanin.server.aggregation.folding import OuterStep
from fanin.server.aggregation.outer import (
    Adaptive,
    FedAvg,
    FedAvgM,
    Nesterov,
    OuterOptimizer,
    RoundStep,
    State,
    adagrad,
    adam,
    yogi,
)
from fanin.server.aggregation.sets import Aggregate

TABLE = TensorTable.of({"first": (3, 4), "second": (5,)})
SIZE = TABLE.num_values
VALUES = st.lists(st.floats(-1e6, 1e6, width=32), min_size=SIZE, max_size=SIZE)
CODEC = CodecSpec(name="fixed32", max_shift=0)


RATE, MOMENTUM, BETA1, BETA2, TAU = 0.3, 0.9, 0.8, 0.95, 1e-3
STATEFUL: Mapping[str, OuterOptimizer] = {
    "fedavgm": FedAvgM(RATE, MOMENTUM),
    "nesterov": Nesterov(RATE, MOMENTUM),
    "fedadagrad": Adaptive(adagrad, RATE, BETA1, 0.0, TAU),
    "fedadam": Adaptive(adam, RATE, BETA1, BETA2, TAU),
    "fedyogi": Adaptive(yogi, RATE, BETA1, BETA2, TAU),
}


def outer_step(optimizer: OuterOptimizer, aggregate: Float64s, number: int = 1, factor: float = 1.0) -> OuterStep:
    mean = Aggregate(
        part=lambda first, last: aggregate[first:last], reaches=no_reaches(TABLE), counts={}, shifts=(0, 0)
    )
    step = RoundStep(optimizer=optimizer, number=number, factor=factor)
    return OuterStep(mean, VectorLayout(table=TABLE), (0, 0), CODEC, step)


def slow_step(name: str, state: dict[str, float], value: float, change: float) -> tuple[dict[str, float], float]:
    """Take one step for one value in plain Python. Each operation rounds once, in the order of the class."""
    if name in {"fedavgm", "nesterov"}:
        momentum = MOMENTUM * state["momentum"] + change
        along = momentum if name == "fedavgm" else change + MOMENTUM * momentum
        return {"momentum": momentum}, value + RATE * along
    mean, square, before = BETA1 * state["mean"] + (1.0 - BETA1) * change, change * change, state["squares"]
    squares = {
        "fedadagrad": before + square,
        "fedadam": BETA2 * before + (1.0 - BETA2) * square,
        "fedyogi": before - (1.0 - BETA2) * square * ((before > square) - (before < square)),
    }[name]
    return {"mean": mean, "squares": squares}, value + RATE * mean / (math.sqrt(squares) + TAU)


@pytest.mark.parametrize("name", STATEFUL)
@given(start=VALUES, aggregates=st.lists(VALUES, min_size=1, max_size=4), data=st.data())
def test_a_step_equals_that_of_plain_python(
    name: str, start: list[float], aggregates: list[list[float]], data: st.DataObject
) -> None:
    """State and parameters are rounded to float32 after each step."""
    optimizer = STATEFUL[name]
    parameters, state = np.array(start, np.float32), dict[str, list[Float32s]]()
    values = [float(value) for value in parameters]
    states = [{each: TAU * TAU if each == "squares" else 0.0 for each in optimizer.tensors} for _ in values]
    cuts = st.lists(st.integers(0, SIZE), max_size=3).map(sorted)
    for aggregate in aggregates:
        step = outer_step(optimizer, np.array(aggregate))
        slices = np.split(parameters, data.draw(cuts))
        after = np.concatenate(list(step.parameters(slices, state)))
        # The stored state is read in other slices than it was written in.
        stored = {each: np.concatenate(list(step.state(each, slices, state))) for each in optimizer.tensors}
        parameters = after
        state = {each: np.split(tensor, data.draw(cuts)) for each, tensor in stored.items()}
        for index, change in enumerate(aggregate):
            next_state, value = slow_step(name, states[index], values[index], change)
            states[index] = {each: float(np.float32(number)) for each, number in next_state.items()}
            values[index] = float(np.float32(value))
    assert parameters.tolist() == values
    for each in optimizer.tensors:
        assert np.concatenate(state[each]).tolist() == [row[each] for row in states]


@given(start=VALUES, aggregate=VALUES)
def test_a_small_square_never_makes_yogis_squares_negative(start: list[float], aggregate: list[float]) -> None:
    optimizer, values = STATEFUL["fedyogi"], np.array(start)
    state = optimizer.begin(values)
    for number in (1, 2, 3):
        state, values = optimizer.step(state, values, np.array(aggregate), number)
        assert (state["squares"] >= 0.0).all() and np.isfinite(values).all()


@given(VALUES, VALUES, st.floats(0.01, 2.0))
def test_without_momentum_nesterov_is_fedavg(start: list[float], aggregate: list[float], rate: float) -> None:
    parameters, mean = np.array(start, np.float32), np.array(aggregate)
    (plain,) = outer_step(FedAvg(rate), mean).parameters([parameters], {})
    (same,) = outer_step(Nesterov(rate, 0.0), mean).parameters([parameters], {})
    assert plain.tobytes() == same.tobytes()


@pytest.mark.parametrize("optimizer", [FedAvg(0.7), *STATEFUL.values()], ids=["fedavg", *STATEFUL])
def test_our_optimizers_keep_the_contract(optimizer: OuterOptimizer) -> None:
    check_optimizer(optimizer)


class Broken(Nesterov):
    """Nesterov with one typical breach of the contract."""

    def __init__(self, fault: str) -> None:
        super().__init__(0.5, 0.9)
        self.fault, self.calls = fault, 0

    def step(self, state: State, parameters: Float64s, aggregate: Float64s, number: int) -> tuple[State, Float64s]:
        self.calls += 1
        after: Mapping[str, Float64s]
        after, values = super().step(state, parameters, aggregate, number)
        match self.fault:
            case "norm":
                return after, values / np.linalg.norm(values)
            case "clock":
                return after, values + self.calls
        return after, values


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("norm", "step: the lengths of slices changed bits"),
        ("clock", "step: a repetition gave other bits"),
    ],
)
def test_the_contract_detects_an_optimizer_whose_bits_depend_on_the_calls(fault: str, error: str) -> None:
    with raises(AssertionError, error):
        check_optimizer(Broken(fault))


@given(VALUES, VALUES, st.floats(1e-3, 4.0))
def test_a_factor_of_the_step_is_a_factor_of_the_learning_rate(
    start: list[float], aggregate: list[float], factor: float
) -> None:
    """As with a scheduler of torch: the rate multiplies the step, and the state is the same."""
    parameters, mean = np.array(start, np.float32), np.array(aggregate)
    scheduled, larger = outer_step(Nesterov(RATE, MOMENTUM), mean, factor=factor), Nesterov(RATE * factor, MOMENTUM)
    after, same = (next(iter(each.parameters([parameters], {}))) for each in (scheduled, outer_step(larger, mean)))
    largest = np.abs(np.concatenate([parameters, mean])).max()
    np.testing.assert_allclose(after, same, rtol=2.0**-23, atol=float(largest) * 2.0**-50)
    (state,) = scheduled.state("momentum", [parameters], {})
    assert state.tolist() == mean.astype(np.float32).tolist()


class Numbered(FedAvg):
    """Adds the number of the step."""

    def step(self, state: State, parameters: Float64s, aggregate: Float64s, number: int) -> tuple[State, Float64s]:
        return state, parameters + number


def test_the_contract_takes_steps_with_their_numbers() -> None:
    check_optimizer(Numbered(1.0))
    (after,) = outer_step(Numbered(1.0), np.zeros(SIZE), number=7, factor=0.5).parameters([np.zeros(SIZE, "f4")], {})
    assert after.tolist() == [3.5] * SIZE


def test_a_state_that_is_too_short_is_corrupted() -> None:
    step = outer_step(Nesterov(1.0, 0.9), np.zeros(SIZE))
    short = {"momentum": [np.zeros(SIZE - 1, np.float32)]}
    with raises(Corrupted, "outer state: ends 1 value too early; restore a backup of the folder"):
        list(step.parameters([np.zeros(SIZE, np.float32)], short))


def test_an_optimizer_that_is_not_installed_is_refused() -> None:
    with raises(
        InvalidPlan,
        "plan: aggregation.outer_optimizer: got 'nestrov', expected one of ['fedadagrad', 'fedadam', 'fedavg', "
        "'fedavgm', 'feddyn', 'fedyogi', 'nesterov'], which are installed here; did you mean nesterov?",
    ):
        optimizer_of(plan(outer_optimizer="nestrov"))
