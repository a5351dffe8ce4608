"""Ctrl-C at any moment of a simulation, and a baseline that diverges: the completed Rounds are the result."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Context
from flwr.client import Client, NumPyClient
from torch import nn

from fanin.clients.data.examples import Examples
from fanin.edge.export import App, squared_error
from fanin.simulation import Iid, Result, RoundRow, SimulationEvent, SimulationSettings, partition, simulate

FLOWER = SimulationSettings(initial=[np.zeros(3, np.float32)], plan={"training.learning_rate": 0.5}, quiet=True)


class Adding(NumPyClient):
    """A client that adds one to each value."""

    def fit(self, parameters: list[np.ndarray], config: dict[str, object]) -> tuple[list[np.ndarray], int, dict]:
        """Return the parameters after a training."""
        return [parameters[0] + np.float32(1.0)], 1, {}


def client_fn(context: Context) -> Client:
    return Adding().to_client()


def values(learning_rate: float, **settings: object) -> Result:
    """Simulate two clients with a model of values, three train steps each in a Round, and its baseline."""
    torch.manual_seed(0)
    ones = np.ones((12, 3), np.float32)
    app = App(name="values", module=nn.Linear(3, 1), calibration=torch.ones(4, 3), batch_size=2, loss=squared_error)
    clients = partition(Examples(inputs={"x": ones}, y=np.ones((12, 1), np.float32)), 2, Iid())
    every = SimulationSettings(plan={"training.learning_rate": learning_rate}, baseline=True, quiet=True, **settings)
    return simulate(app, clients, cohort=2, rounds=3, settings=every)


@contextmanager
def interrupt_at(text: str) -> Iterator[None]:
    """Send Ctrl-C when the simulation logs a step that begins with a text."""

    class Interrupt(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith(text):
                signal.raise_signal(signal.SIGINT)

    logger, handler = logging.getLogger("fanin.simulation.progress"), Interrupt()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def test_ctrl_c_during_the_baseline_keeps_the_federation_and_ends_the_seeds() -> None:
    with interrupt_at("training the centralized baseline"):
        result = values(0.01, seeds=(1, 2))
    assert not result.is_complete
    (only,) = result.repeats
    assert [row.round for row in only.rounds] == [0, 1, 2, 3]
    assert (only.is_complete, only.baseline, only.baseline_end) == (False, (), "Ctrl-C")


def test_no_baseline_is_trained_after_ctrl_c() -> None:
    def interrupt(row: RoundRow) -> None:
        if row.round == 1:
            signal.raise_signal(signal.SIGINT)

    with interrupt_at("training the centralized baseline"):
        result = values(0.01, on_round=interrupt)
    assert [row.round for row in result.rounds] == [0, 1]
    assert (result.baseline, result.baseline_end) == ((), "")


def test_a_baseline_that_diverges_keeps_the_federation_and_its_own_rounds() -> None:
    # Each step multiplies the error by 79. The grid cuts the Updates of the clients, and nothing cuts the baseline.
    result = values(10.0)
    assert result.is_complete
    assert [row.round for row in result.rounds] == [0, 1, 2, 3]
    assert [row.round for row in result.baseline] == [0, 1]
    assert (
        result.baseline_end
        == "baseline: the loss became inf in round 2, expected a finite one; lower the learning rate"
    )


def test_ctrl_c_before_the_first_round_of_a_later_seed_keeps_the_earlier_ones() -> None:
    num_begun = 0

    def interrupt(event: SimulationEvent) -> None:
        nonlocal num_begun
        num_begun += event.event == "engine"
        if num_begun == 2:
            signal.raise_signal(signal.SIGINT)

    settings = replace(FLOWER, seeds=(3, 4), on_event=interrupt)
    result = simulate(client_fn, 4, cohort=2, rounds=2, settings=settings)
    assert not result.is_complete
    (first,) = result.repeats
    assert first.is_complete
    assert [row.round for row in first.rounds] == [0, 1, 2]


def test_ctrl_c_for_the_second_time_keeps_the_rounds_that_have_ended() -> None:
    def interrupt(event: SimulationEvent) -> None:
        if (event.event, event.round) == ("trained", 2):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    result = simulate(client_fn, 4, cohort=2, rounds=9, settings=replace(FLOWER, on_event=interrupt))
    assert not result.is_complete
    assert [row.round for row in result.rounds] == [0, 1]
    assert (result.arrays["0"] == 1.0).all()


def test_ctrl_c_before_the_first_round_is_ctrl_c() -> None:
    def interrupt(event: SimulationEvent) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        simulate(client_fn, 4, cohort=2, rounds=1, settings=replace(FLOWER, on_event=interrupt))
