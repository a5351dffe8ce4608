"""A strategy of Flower in fanin against Flower itself: the same app, rounds and strategy in both systems.

Flower's own loop, ``Strategy.start``, runs beside ``simulate``. Its grid calls the same ClientApp in this process. The
arrays of fanin are on the grid of each Round, so both differ by rounding alone.
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    MultiKrum,
    Strategy,
)

from fanin.server.strategies.records import RoundNodes, prepare_flower
from fanin.simulation import Result, SimulationSettings, simulate

NUM_CLIENTS: Final = 5
NUM_ROUNDS: Final = 4
NUM_FEATURES: Final = 8
INITIAL: Final = {"weight": np.zeros((NUM_FEATURES, 3), np.float32), "bias": np.zeros(3, np.float32)}
METRICS: Final = ("train.gap", "evaluate.gap")
app = ClientApp()


def data_of(partition: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the examples of a client; clients differ in number and distribution."""
    rng = np.random.default_rng(partition)
    inputs = rng.normal(partition / 4, 1.0, (20 + 10 * partition, NUM_FEATURES))
    return inputs, inputs @ rng.normal(0.0, 1.0, (NUM_FEATURES, 3))


def replied(msg: Message, context: Context, num_steps: int) -> tuple[dict[str, np.ndarray], MetricRecord]:
    """Return the arrays after some steps of gradient descent, and the error before them."""
    arrays = {name: array.numpy().astype(np.float64) for name, array in msg.content["arrays"].items()}
    inputs, targets = data_of(context.node_config["partition-id"])
    gap = float(np.abs(inputs @ arrays["weight"] + arrays["bias"] - targets).mean())
    for _ in range(num_steps):
        error = (inputs @ arrays["weight"] + arrays["bias"] - targets) / len(inputs)
        arrays["weight"] -= msg.content["config"]["lr"] * inputs.T @ error
        arrays["bias"] -= msg.content["config"]["lr"] * error.sum(axis=0)
    return arrays, MetricRecord({"num-examples": len(inputs), "gap": gap})


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train on the examples of the client."""
    arrays, metrics = replied(msg, context, 5)
    record = ArrayRecord({name: Array(value.astype(np.float32)) for name, value in arrays.items()})
    return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Measure the error on the examples of the client."""
    return Message(RecordDict({"metrics": replied(msg, context, 0)[1]}), reply_to=msg)


class Clients(RoundNodes):
    """A grid of Flower that calls the app at once."""

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the clients."""
        return list(range(1, NUM_CLIENTS + 1))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Call the app for each message, in the order of the clients."""
        return [self._called(message) for message in sorted(messages, key=lambda each: each.metadata.dst_node_id)]

    def _called(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        context = Context(
            run_id=1, node_id=node, node_config={"partition-id": node - 1}, state=RecordDict(), run_config={}
        )
        return app(message, context)


@contextlib.contextmanager
def quiet_flower() -> Iterator[None]:
    """Silence the lines of Flower's loop."""
    logger = logging.getLogger("flwr")
    level = logger.level
    try:
        yield
    finally:
        logger.setLevel(level)


def in_flower(strategy: Strategy) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return the final arrays of Flower's loop, and the last metrics."""
    with quiet_flower():
        prepare_flower()
        initial = ArrayRecord({name: Array(value) for name, value in INITIAL.items()})
        clients: Grid = Clients(NUM_CLIENTS)
        result = strategy.start(clients, initial, NUM_ROUNDS, train_config=ConfigRecord({"lr": 0.1}))
    metrics = {"train.gap": result.train_metrics_clientapp[NUM_ROUNDS]["gap"]}
    # fanin measures a Version at the beginning of the next Round.
    metrics["evaluate.gap"] = result.evaluate_metrics_clientapp[NUM_ROUNDS - 1]["gap"]
    return {name: array.numpy() for name, array in result.arrays.items()}, metrics


def in_fanin(name: str, options: dict[str, float]) -> Result:
    """Return the result of a simulation with the same strategy."""
    plan = {
        "training.learning_rate": 0.1,
        "flower.strategy": f"flwr.serverapp.strategy:{name}",
        "flower.strategy_options": options,
        "statistics": [{"name": metric, "bound": 1 << 40} for metric in METRICS],
    }
    settings = SimulationSettings(initial=INITIAL, plan=plan, quiet=True)
    return simulate(app, NUM_CLIENTS, cohort=NUM_CLIENTS, rounds=NUM_ROUNDS, settings=settings)


STRATEGIES: Final = ((FedMedian, {}), (FedTrimmedAvg, {"beta": 0.2}), (FedAdam, {"eta": 0.05, "tau": 0.01}))
OTHERS: Final = (
    (FedAvg, {}),
    (FedAvgM, {"server_momentum": 0.5}),
    (FedAdagrad, {"eta": 0.05, "tau": 0.01}),
    (FedYogi, {"eta": 0.05, "tau": 0.01}),
    (Krum, {"num_malicious_nodes": 1}),
    (MultiKrum, {"num_malicious_nodes": 1, "num_nodes_to_select": 3}),
)


@pytest.mark.parametrize(
    ("kind", "options"), [*STRATEGIES, *(pytest.param(*each, marks=pytest.mark.nightly) for each in OTHERS)]
)
def test_a_strategy_has_the_numbers_of_flower(kind: type[Strategy], options: dict[str, float]) -> None:
    expected, metrics = in_flower(kind(**options))
    result = in_fanin(kind.__name__, options)
    assert result.failures == ()
    moved = max(float(np.abs(value - INITIAL[name]).max()) for name, value in expected.items())
    assert moved > 0.05
    for name, value in expected.items():
        np.testing.assert_allclose(result.arrays[name], value, rtol=0, atol=2e-6 * moved, err_msg=name)
    last = result.rounds[-1].strategy_metrics
    assert last == {name: pytest.approx(value, abs=1e-4) for name, value in metrics.items()}
