"""The outer optimizers with momenta against Flower's strategies and torch's SGD, on the same aggregates.

Flower differs from the paper in two points. Its v begins at 0, and not at tau squared: the tests set it. Its FedAdam
corrects the bias of both means, with one Round too many: the tests divide its learning rate by that factor.
"""

import math

import numpy as np
import pytest
import torch
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedOpt, FedYogi
from support.virtual import plan

from fanin.edge.tensors import Float64s
from fanin.server.aggregation.checked import optimizer_of
from fanin.server.aggregation.outer import OuterOptimizer, State

RATE, BETA1, BETA2, TAU, MOMENTUM = 0.3, 0.8, 0.95, 1e-2, 0.7
NUM_ROUNDS = 6
START = np.random.default_rng(1).normal(0.0, 1.0, 50)
AGGREGATES = np.random.default_rng(2).normal(0.0, [[10.0**-power] for power in range(NUM_ROUNDS)], (NUM_ROUNDS, 50))


def ours(name: str, **options: float) -> list[np.ndarray]:
    """Return the parameters after each Round."""
    return steps_of(optimizer_of(plan(outer_optimizer=name, outer_options=options)))


def steps_of(optimizer: OuterOptimizer) -> list[np.ndarray]:
    """Return the parameters after each step."""
    values, state, results = START, optimizer.begin(START), []
    for number, aggregate in enumerate(AGGREGATES, start=1):
        state, values = optimizer.step(state, values, aggregate, number)
        results.append(values)
    return results


def flowers(strategy: FedAvg) -> list[np.ndarray]:
    """Return the parameters after each Round, in which one client trained."""
    values, results, eta = START, [], getattr(strategy, "eta", 0.0)
    for number, aggregate in enumerate(AGGREGATES, start=1):
        if isinstance(strategy, FedAdam):
            correction = math.sqrt(1.0 - BETA2 ** (number + 1)) / (1.0 - BETA1 ** (number + 1))
            strategy.eta = eta / correction
        trained = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([values + aggregate]), 1, {})
        after, _ = strategy.aggregate_fit(number, [(None, trained)], [])
        assert after is not None
        (values,) = parameters_to_ndarrays(after)
        results.append(values)
    return results


def adaptive(kind: type[FedOpt], **betas: float) -> FedOpt:
    strategy = kind(initial_parameters=ndarrays_to_parameters([START]), eta=RATE, tau=TAU, **betas)
    strategy.v_t = [np.full(START.shape, TAU * TAU)]
    return strategy


class CorrectedAdam:
    """Adam with its correction of the bias (Kingma and Ba 2015, arXiv 1412.6980, algorithm 1), by the step's number."""

    tensors = ("mean", "squares")

    def __init__(self, tau: float, extra: int = 0) -> None:
        self._tau, self._extra = tau, extra

    def begin(self, parameters: Float64s) -> State:
        return {name: np.zeros_like(parameters) for name in self.tensors}

    def step(self, state: State, parameters: Float64s, aggregate: Float64s, number: int) -> tuple[State, Float64s]:
        exponent = number + self._extra
        mean = BETA1 * state["mean"] + (1.0 - BETA1) * aggregate
        squares = BETA2 * state["squares"] + (1.0 - BETA2) * aggregate * aggregate
        rate = RATE * math.sqrt(1.0 - BETA2**exponent) / (1.0 - BETA1**exponent)
        return {"mean": mean, "squares": squares}, parameters + rate * mean / (np.sqrt(squares) + self._tau)


def assert_equal(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    np.testing.assert_allclose(np.stack(actual), np.stack(expected), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("name", "kind"), [("fedadam", FedAdam), ("fedyogi", FedYogi)])
def test_adam_and_yogi_are_flowers(name: str, kind: type[FedOpt]) -> None:
    actual = ours(name, learning_rate=RATE, beta1=BETA1, beta2=BETA2, tau=TAU)
    assert_equal(actual, flowers(adaptive(kind, beta_1=BETA1, beta_2=BETA2)))


def test_a_correction_by_the_number_of_the_step_is_flowers_with_one_round_more() -> None:
    """Nothing is set in Flower's strategy: its v begins at 0, and its correction has the exponent Round + 1."""
    strategy = FedAdam(
        initial_parameters=ndarrays_to_parameters([START]), eta=RATE, tau=TAU, beta_1=BETA1, beta_2=BETA2
    )
    values, expected = START, []
    for number, aggregate in enumerate(AGGREGATES, start=1):
        trained = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([values + aggregate]), 1, {})
        after, _ = strategy.aggregate_fit(number, [(None, trained)], [])
        (values,) = parameters_to_ndarrays(after)
        expected.append(values)
    assert_equal(steps_of(CorrectedAdam(TAU, extra=1)), expected)


def test_a_correction_by_the_number_of_the_step_is_torchs_adam() -> None:
    """Without a term in the denominator, the correction of torch and that of the rate are the same."""
    values = torch.tensor(START, requires_grad=True)
    adam, expected = torch.optim.Adam([values], lr=RATE, betas=(BETA1, BETA2), eps=0.0), []
    for aggregate in AGGREGATES:
        values.grad = torch.tensor(-aggregate)
        adam.step()
        expected.append(values.detach().numpy().copy())
    assert_equal(steps_of(CorrectedAdam(0.0)), expected)


def test_adagrad_is_flowers() -> None:
    # Its strategy has no beta: it is the paper's experiments, with beta1 = 0.
    assert_equal(ours("fedadagrad", learning_rate=RATE, tau=TAU), flowers(adaptive(FedAdagrad)))


def test_a_momentum_is_flowers_and_torchs() -> None:
    strategy = FedAvgM(
        initial_parameters=ndarrays_to_parameters([START]), server_learning_rate=RATE, server_momentum=MOMENTUM
    )
    actual = ours("fedavgm", learning_rate=RATE, momentum=MOMENTUM)
    values = torch.tensor(START, requires_grad=True)
    sgd, expected = torch.optim.SGD([values], lr=RATE, momentum=MOMENTUM), []
    for aggregate in AGGREGATES:
        values.grad = torch.tensor(-aggregate)
        sgd.step()
        expected.append(values.detach().numpy().copy())
    assert_equal(actual, expected)
    assert_equal(actual, flowers(strategy))
