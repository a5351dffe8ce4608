"""An Update that the coordinator refuses is a failure of its client, and harms no other."""

from collections.abc import Callable

import numpy as np
import pytest
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import Context

from fanin.simulation import Result, RunStopped, SimulationSettings, simulate


class Weighted(NumPyClient):
    """A client with a number of examples and a change."""

    def __init__(self, num_examples: int, change: float) -> None:
        self._num_examples, self._change = num_examples, change

    def fit(self, parameters: list[np.ndarray], config: object) -> tuple[list[np.ndarray], int, dict[str, float]]:
        return [parameters[0] + self._change], self._num_examples, {}


def simulated(examples: tuple[int, ...], changes: tuple[float, ...], cohort: int) -> Result:
    def client_fn(context: Context) -> object:
        index = int(context.node_config["partition-id"])
        return Weighted(examples[index], changes[index]).to_client()

    plan = {
        "cohort.quorum": 1,
        "cohort.deadline_s": 60.0,
        "flower.roles": {"0": {"role": "statistic", "highest": 3.0}},
    }
    settings = SimulationSettings(initial=[np.zeros(1)], plan=plan, quiet=True)
    return simulate(ClientApp(client_fn=client_fn), len(examples), cohort=cohort, rounds=2, settings=settings)


@pytest.mark.parametrize(
    ("examples", "changes", "error"),
    [((5, 0, 5), (1.0, 1.0, 1.0), "got examples = 0"), ((5, 5, 5), (1.0, 3.5, 1.0), "out of range")],
)
def test_a_refused_client_is_a_failure_and_the_others_train(
    examples: tuple[int, ...], changes: tuple[float, ...], error: str
) -> None:
    result = simulated(examples, changes, 3)
    assert result.is_complete
    assert result.arrays["0"].tolist() == [2]
    assert {failure.client for failure in result.failures} == {1}
    assert {failure.round for failure in result.failures} == {1, 2}
    assert all(error in failure.error for failure in result.failures)


def test_a_simulation_whose_clients_are_all_refused_says_why() -> None:
    with pytest.raises(
        RunStopped, match=r"the run is failed: .*; first of \d+ failures: client \d in round 1: .*examples = 0"
    ):
        simulated((0, 0), (1.0, 1.0), 2)


def raising(parameters: list[np.ndarray]) -> list[np.ndarray]:
    raise OSError("no examples here")


@pytest.mark.parametrize(
    ("fit", "error"),
    [
        (raising, "flower app client_fn: train: OSError: no examples here"),
        (lambda parameters: [parameters[0][:1]], "array '0': returned float64 (1,), expected float64 (2,) as in the"),
        (lambda parameters: [parameters[0] + np.nan], "array '0': returned NaN or infinity, expected finite values"),
        (
            lambda parameters: [parameters[0].astype(str)],
            "array '0': returned <U32 (2,), expected float64 (2,) as in the",
        ),
        (lambda parameters: [], "train: returned a list of 0 arrays, expected the 1 of the message in their order"),
        (lambda parameters: None, "flower app client_fn: train: "),
    ],
)
def test_a_client_with_a_wrong_result_is_one_failure_a_round_and_the_others_train(
    fit: Callable[[list[np.ndarray]], list[np.ndarray]], error: str
) -> None:
    class Wrong(NumPyClient):
        def __init__(self, partition: int) -> None:
            self._partition = partition

        def fit(self, parameters: list[np.ndarray], config: object) -> tuple[list[np.ndarray], int, dict[str, float]]:
            return ([parameters[0] + 1.0] if self._partition else fit(parameters)), 1, {}

    def client_fn(context: Context) -> object:
        return Wrong(int(context.node_config["partition-id"])).to_client()

    plan = {"cohort.quorum": 2, "cohort.deadline_s": 60.0}
    settings = SimulationSettings(initial=[np.zeros(2)], plan=plan, quiet=True)
    result = simulate(client_fn, 3, cohort=3, rounds=2, settings=settings)
    assert result.is_complete
    assert result.arrays["0"].tolist() == [2.0, 2.0]
    assert {failure.client for failure in result.failures} == {0}
    assert all(error in failure.error for failure in result.failures), result.failures
