"""Simulated clients that hold nothing out: they train on all of their examples and do not evaluate."""

import math

import pytest
from support.digits_fedavg import NUM_CLIENTS, PLAN, app_of, clients_of, federated_average, network

from fanin.protos.errors import InvalidInput
from fanin.simulation import SimulationSettings, simulate


@pytest.mark.parametrize("engine", ["graph", "vmap"])
def test_clients_that_hold_nothing_out_train_on_all_examples_and_do_not_evaluate(engine: str) -> None:
    settings = SimulationSettings(plan=PLAN, seed=4, validation_fraction=0.0, engine=engine, quiet=True)
    result = simulate(app_of(network()), clients_of(), cohort=NUM_CLIENTS, rounds=1, settings=settings)
    (_, row), clients = result.rounds, result.clients
    assert [client.num_examples for client in clients] == [len(part) for part in clients_of()]
    assert [client.num_validation_examples for client in clients] == [0] * NUM_CLIENTS
    assert math.isnan(row.validation_loss)
    assert math.isnan(row.validation_accuracy)
    assert row.train_loss > 0
    expected = federated_average(network(), 4, 1, validation_fraction=0.0).state_dict()
    for name, value in result.module.state_dict().items():
        assert float((value - expected[name]).abs().max()) < 1e-5, name


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("stop.patience", 2, "stop.patience"),
        ("stop.max_int8_drop", 1.0, "stop.max_int8_drop"),
        (
            "statistics",
            [{"name": "evaluate.balanced_accuracy", "unit": "1", "bound": 1}],
            "the statistic evaluate.balanced_accuracy",
        ),
    ],
)
def test_a_plan_that_reads_evaluations_needs_clients_that_hold_examples_out(key: str, value: object, name: str) -> None:
    settings = SimulationSettings(plan={**PLAN, key: value}, validation_fraction=0.0, quiet=True)
    with pytest.raises(InvalidInput, match=f"got {name} in the plan and validation_fraction 0, expected a share above"):
        simulate(app_of(network()), clients_of(), cohort=2, rounds=1, settings=settings)
