"""Losses of a simulated Round: a client that always fails, and values that the grid clips."""

from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Context
from flwr.client import Client, NumPyClient

from fanin.protos.errors import FaninError
from fanin.simulation import SimulationSettings, simulate
from fanin.simulation.progress import line_of

SETTINGS = SimulationSettings(initial=[np.zeros(3, np.float32)], plan={"training.learning_rate": 0.5}, quiet=True)


class Adding(NumPyClient):
    """A client that adds a number to each value, or fails."""

    def __init__(self, change: float | None) -> None:
        self._change = change

    def fit(
        self, parameters: list[np.ndarray], config: dict[str, object]
    ) -> tuple[list[np.ndarray], int, dict[str, float]]:
        """Return the parameters after a training."""
        if self._change is None:
            raise ArithmeticError("no number")
        return [parameters[0] + np.float32(self._change)], 1, {}


def test_a_client_that_always_fails_costs_no_round_though_no_other_can_replace_it() -> None:
    def client_fn(context: Context) -> Client:
        return Adding(None if context.node_config["partition-id"] == 3 else 1.0).to_client()

    result = simulate(client_fn, 10, cohort=10, rounds=4, settings=SETTINGS)
    assert [row.num_clients for row in result.rounds] == [0, 9, 9, 9, 9]
    assert (result.arrays["0"] == 4.0).all()
    assert {failure.client for failure in result.failures} == {3}
    with pytest.raises(FaninError, match="FN-1188"):
        full_quorum = replace(SETTINGS, plan={"training.learning_rate": 0.5, "cohort.quorum": 10})
        simulate(client_fn, 10, cohort=10, rounds=4, settings=full_quorum)


def test_values_that_the_grid_cuts_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    result = simulate(
        lambda context: Adding(50.0).to_client(), 4, cohort=4, rounds=2, settings=replace(SETTINGS, quiet=True)
    )
    (warning,) = capsys.readouterr().err.splitlines()
    assert "warning: round 1: the grid cut more than 1 % of the values of 4 of 4 clients, 12 values in all" in warning
    result = simulate(lambda context: Adding(50.0).to_client(), 4, cohort=4, rounds=1, settings=SETTINGS)
    assert (result.arrays["0"] == 4.0).all()
    assert result.rounds[-1].num_saturated == 12
    assert result.rounds[-1].num_saturated_clients == 4
    assert "(cut: 12 values out of the grid's range, 4 clients above 1 %)" in line_of(result.rounds[-1])
    assert [client.num_saturated for client in result.clients] == [3] * 4
