"""The ConfigRecord of a Flower app: the Round under the name that an app reads, and a learning rate if it needs one."""

from collections.abc import Mapping
from typing import Final

import numpy as np
import pytest
from flwr.client import NumPyClient
from support.errors import raises

from fanin.clients.planfile import parse_plan
from fanin.protos.errors import InvalidPlan
from fanin.simulation import Result, SimulationSettings, simulate

HEAD: Final = "[cohort]\nconcurrency = 1\n"
NO_RATE: Final = f'bundle = "b"\n{HEAD}'


class Reader(NumPyClient):
    """A client that records its config."""

    configs: Final[list[Mapping[str, object]]] = []

    def fit(self, parameters: list[np.ndarray], config: Mapping[str, object]) -> tuple[list[np.ndarray], int, dict]:
        self.configs.append(config)
        return parameters, 1, {}


@pytest.fixture(autouse=True)
def configs() -> list[Mapping[str, object]]:
    """The configs of all messages, empty at first."""
    Reader.configs.clear()
    return Reader.configs


def simulated(**plan: object) -> Result:
    settings = SimulationSettings(initial=[np.zeros(1, np.float32)], plan=plan, quiet=True)
    result = simulate(Reader, 1, cohort=1, rounds=2, settings=settings)
    assert result.failures == ()
    return result


def test_an_app_that_reads_no_learning_rate_needs_none(configs: list[Mapping[str, object]]) -> None:
    simulated()
    assert [set(config) for config in configs] == [{"server-round", "server_round", "current_round", "round"}] * 2


@pytest.mark.parametrize("name", ["server-round", "server_round", "current_round", "round"])
def test_the_number_of_the_round_has_the_name_that_the_app_reads(
    configs: list[Mapping[str, object]], name: str
) -> None:
    simulated()
    assert [config[name] for config in configs] == [1, 2]


def test_an_entry_of_the_plan_replaces_a_name_of_the_round(configs: list[Mapping[str, object]]) -> None:
    simulated(**{"flower.config": {"round": "first"}, "training.learning_rate": 0.5})
    assert [(config["round"], config["server-round"], config["lr"]) for config in configs] == [
        ("first", 1, 0.5),
        ("first", 2, 0.5),
    ]


def test_a_plan_without_a_learning_rate_has_none_in_any_round() -> None:
    plan = parse_plan(f"{NO_RATE}[stop]\nmax_rounds = 3\n[[schedule]]\nfrom_round = 2\nepochs = 2\n", "p.toml").plan
    assert [plan.training_in(number).learning_rate for number in (1, 2, 9)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("change", ["learning_rate = 0.1", "decay = 0.9"])
def test_a_rate_that_begins_later_is_refused(change: str) -> None:
    text = f"{NO_RATE}[stop]\nmax_rounds = 3\n[[schedule]]\nfrom_round = 2\n{change}\n"
    with raises(
        InvalidPlan,
        "p.toml: schedule.0: got a learning rate or a decay, but the Rounds before have none, expected one; add "
        "training.learning_rate",
    ):
        parse_plan(text, "p.toml")


class Evaluating(Reader):
    """A client that also evaluates, and fails in one round."""

    rounds: Final[list[object]] = []
    fails_in = 0

    def evaluate(self, parameters: list[np.ndarray], config: Mapping[str, object]) -> tuple[float, int, dict]:
        self.rounds.append(config["server-round"])
        if config["server-round"] == self.fails_in:
            raise OSError("no examples here")
        return float(parameters[0].sum()), 2, {}


def failing_in(number: int) -> type:
    """Return a client whose evaluation fails in a round."""
    return type("Evaluating", (Evaluating,), {"fails_in": number})


def test_an_evaluation_has_the_number_of_its_version() -> None:
    Evaluating.rounds.clear()
    settings = SimulationSettings(initial=[np.ones(1, np.float32)], quiet=True)
    result = simulate(Evaluating, 1, cohort=1, rounds=3, settings=settings)
    assert Evaluating.rounds == [1, 1, 2, 3]
    assert [row.validation_loss for row in result.rounds] == [1.0] * 4


def test_a_client_that_cannot_evaluate_the_last_version_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = SimulationSettings(initial=[np.ones(1, np.float32)], quiet=True)
    result = simulate(failing_in(2), 1, cohort=1, rounds=2, settings=settings)
    assert result.is_complete
    assert np.isnan(result.rounds[-1].validation_loss)
    assert (
        "client 0 cannot evaluate version 2: flower app Evaluating: evaluate: OSError: no examples here" in caplog.text
    )


def test_an_evaluation_that_fails_does_not_prevent_the_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = SimulationSettings(initial=[np.ones(1, np.float32)], quiet=True)
    result = simulate(failing_in(1), 1, cohort=1, rounds=2, settings=settings)
    assert result.failures == ()
    assert np.isnan(result.rounds[1].validation_loss) and result.rounds[2].validation_loss == 1.0
    (text,) = (record.getMessage() for record in caplog.records if "is left out" in record.getMessage())
    error = "flower app Evaluating: evaluate: OSError: no examples here"
    assert text.startswith(f"an evaluation is left out: {error}\nTraceback")
