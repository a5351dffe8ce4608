"""Work of a device's own: fewer steps than planned, on devices, in simulations and over gRPC."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from support.digits_fedavg import BATCH, PLAN, RATE, app_of, clients_of, network
from support.hosted import Hosted
from support.models import PUBLISHER, bundle_of, samples
from support.values import plan

from fanin.clients.data.batching import batches
from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import MemoryStore, memory_store
from fanin.clients.device.client import Client, ClientOptions, ClientParts
from fanin.clients.device.contract import example_assignment, example_model
from fanin.clients.device.storage.cache import Cache
from fanin.clients.device.training.trainer import RuntimeTrainer
from fanin.clients.device.training.work import TooLittleWork, WorkLimit, WorkPolicy
from fanin.clients.transport import Connection, GrpcTransport
from fanin.commands.console.usage import WrongUsage
from fanin.commands.join import main as join
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.errors import FaninError
from fanin.simulation import ClientWork, Result, SimulationSettings, simulate

PLANNED = 12
"""Steps of 45 examples in batches of 8, over two epochs."""


def store() -> MemoryStore:
    x, y = samples(45, seed=3)
    return MemoryStore(train=Examples(inputs={"x": x}, y=y), validation=None, partition=1)


def assignment(**training: float) -> m.Assignment:
    settings = m.Training(epochs=2, learning_rate=0.1, seed=1, **training)  # type: ignore[arg-type]
    return replace(example_assignment(bundle_of("mlp")), training=settings)


def train(work: WorkPolicy, **training: float) -> Float32s:
    trainer = RuntimeTrainer(open_runtime("onnx"), store(), work=work)
    return trainer.train(example_model(bundle_of("mlp")), assignment(**training), lambda: True).values


@pytest.mark.parametrize(
    ("limit", "steps"),
    [(WorkLimit(steps=5), 5), (WorkLimit(epochs=0.5), 3), (WorkLimit(steps=7, epochs=1), 6), (WorkLimit(steps=99), 12)],
)
def test_a_limited_device_sends_the_change_after_its_steps_and_says_so(limit: WorkLimit, steps: int) -> None:
    trainer = RuntimeTrainer(open_runtime("onnx"), store(), work=limit)
    change = trainer.train(example_model(bundle_of("mlp")), assignment(), lambda: True)
    assert (change.num_steps, change.planned_steps) == (steps, PLANNED)
    reported = {name: change.counts[name] for name in ("steps", "planned_steps", "partial_work", m.EXAMPLES)}
    assert reported == {"steps": steps, "planned_steps": PLANNED, "partial_work": int(steps < PLANNED), m.EXAMPLES: 45}
    np.testing.assert_array_equal(change.values, train(lambda _, __: steps))
    # The mean loss of the steps, not a share of it.
    loss = change.counts[m.TRAIN_LOSS] / m.LOSS_UNIT / 45
    assert 0.3 < loss < 3.0


def test_a_device_below_the_least_work_of_the_plan_gives_up() -> None:
    assert train(WorkLimit(steps=6), min_work=0.5).any()
    with pytest.raises(TooLittleWork) as excinfo:
        train(WorkLimit(steps=5), min_work=0.5)
    assert excinfo.value.code == "FN-1810"
    assert "got a limit of 5 of 12 steps, expected at least 6" in str(excinfo.value)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: WorkLimit(steps=0),
        lambda: WorkLimit(epochs=-1.0),
        lambda: ClientWork(stragglers=1.5),
        lambda: ClientWork(stragglers=1.0, drop=True),
        lambda: ClientWork(steps=[1, 2.5]),
        lambda: ClientWork(epochs=[1.0]).bound(2),
        lambda: ClientWork(epochs=2),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_limit_is_one_error(wrong: Callable[[], object]) -> None:
    with pytest.raises(FaninError) as excinfo:
        wrong()
    assert excinfo.value.code == "FN-1811"


def test_fanin_join_refuses_a_wrong_limit_and_one_for_a_flower_app() -> None:
    options = ["--server", "localhost:1", "--ca", "c", "--publisher", "p"]
    for wrong, text in (
        (["--data", "d.npz", "--max-steps", "0"], "--max-steps: got 0, expected a whole number of at least 1"),
        (["--flower", "a:b", "--max-epochs", "1"], "--flower: got it with --max-steps or --max-epochs"),
    ):
        with pytest.raises(WrongUsage, match=text):
            join([*options, *wrong])


STATISTICS = [{"name": name, "bound": 10**6} for name in ("steps", "planned_steps", "partial_work")]


def run(work: ClientWork | None, cohort: int = 6, rounds: int = 1, **plan: object) -> Result:
    keys = PLAN | {"training.epochs": 4, "statistics": STATISTICS} | {k.replace("__", "."): v for k, v in plan.items()}
    settings = SimulationSettings(plan=keys, seed=4, work=work, quiet=True)
    return simulate(app_of(network()), clients_of(), cohort=cohort, rounds=rounds, settings=settings)


def plain_average(steps: list[int]) -> list[Float32s]:
    """The plain twin: FedAvg of softmax regression with one hidden layer, in numpy, for given steps of each client."""
    start = [value.detach().numpy().astype(np.float64) for value in network().parameters()]
    sums, total = [np.zeros_like(value) for value in start], 0
    for client, num_steps in enumerate(steps):
        train, left = memory_store(clients_of()[client], client, 0.1).train, num_steps
        w1, b1, w2, b2 = (value.copy() for value in start)
        rng = np.random.default_rng(np.random.SeedSequence((4, client, 1)))
        for batch in (batch for _ in range(4) for batch in batches(train, BATCH, rng)):
            if not left:
                continue
            real = batch.mask > 0
            x, y, left = batch.inputs["x"][real].reshape(-1, 64).astype(np.float64), batch.y[real], left - 1
            hidden = np.maximum(x @ w1.T + b1, 0.0)
            scores = hidden @ w2.T + b2
            odds = np.exp(scores - scores.max(axis=1, keepdims=True))
            error = (odds / odds.sum(axis=1, keepdims=True) - np.eye(10)[y]) / len(y)
            back = (error @ w2) * (hidden > 0)
            w2, b2 = w2 - RATE * error.T @ hidden, b2 - RATE * error.sum(axis=0)
            w1, b1 = w1 - RATE * back.T @ x, b1 - RATE * back.sum(axis=0)
        total += len(train)
        for each, value in zip(sums, (w1, b1, w2, b2), strict=True):
            each += len(train) * value
    return [(each / total).astype(np.float32) for each in sums]


def test_clients_with_steps_of_their_own_are_averaged_as_by_the_plain_twin() -> None:
    steps = [1, 2, 3, 5, 8, 4]
    result = run(ClientWork(steps=steps))
    for ours, theirs in zip(result.module.parameters(), plain_average(steps), strict=True):
        np.testing.assert_allclose(ours.detach().numpy(), theirs, atol=2e-6)
    assert result.rounds[1].statistics["steps"] == sum(steps)
    assert result.rounds[1].statistics["partial_work"] == 6


def test_stragglers_do_one_to_all_epochs_and_their_share_is_exact() -> None:
    full = run(None, rounds=3)
    assert [row.statistics["partial_work"] for row in full.rounds[1:]] == [0, 0, 0]
    partial = run(ClientWork(stragglers=0.5), rounds=3)
    planned = full.rounds[1].statistics["planned_steps"]
    for row in partial.rounds[1:]:
        assert 1 <= row.statistics["partial_work"] <= 3 and planned / 4 < row.statistics["steps"] < planned
    assert not partial.failures
    again = run(ClientWork(stragglers=0.5), rounds=3)
    np.testing.assert_array_equal(partial.parameters, again.parameters)


def test_dropped_stragglers_give_up_and_are_no_failures() -> None:
    result = run(ClientWork(stragglers=0.5, drop=True), cohort=2, rounds=4)
    assert not result.failures and len(result.rounds) == 5
    assert all(row.statistics["partial_work"] == 0 and row.num_clients == 2 for row in result.rounds[1:])
    assert "gave up" in {event.event.replace("_", " ") for event in result.events}
    # The same, by the Plan: a client below the least work gives up.
    by_plan = run(ClientWork(epochs=[1, 4, 4, 4, 4, 4]), cohort=2, rounds=4, training__min_work=1.0)
    assert not by_plan.failures and 0 not in {row.client for row in by_plan.clients}


def test_the_engines_train_the_same_partial_work() -> None:
    work = ClientWork(epochs=lambda client, number: 1.0 + client / 2)
    keys = PLAN | {"training.epochs": 4}
    graph, vmap = (
        simulate(
            app_of(network()),
            clients_of(),
            cohort=6,
            rounds=1,
            settings=SimulationSettings(plan=keys, seed=4, work=work, engine=engine, quiet=True),
        )
        for engine in ("graph", "vmap")
    )
    np.testing.assert_allclose(graph.parameters, vmap.parameters, atol=1e-5)


def test_a_device_over_grpc_reports_its_partial_work(tmp_path: Path) -> None:
    host = Hosted(tmp_path).start()
    try:
        statistics = tuple(m.Statistic(name=each, bound=10**6) for each in ("steps", "planned_steps", "partial_work"))
        run_plan = replace(plan(buffer=1, max_rounds=1), statistics=statistics)
        host.start_run(replace(run_plan, training=assignment().training), bundle_of("mlp"), PUBLISHER)
        with closing(Connection(host.address, host.ca)) as connection:
            cache = Cache(tmp_path / "device")
            parts = ClientParts(
                transport=GrpcTransport(connection, cache.key()),
                cache=cache,
                trainer=RuntimeTrainer(open_runtime("onnx"), store(), work=WorkLimit(steps=5)),
                trusted=(PUBLISHER.public,),
                rng=Random(1),
            )
            Client(parts, ClientOptions(token=host.device_token, max_updates=1)).run()
        (published,) = host.published_versions()
        assert published.statistics == {"steps": 5, "planned_steps": PLANNED, "partial_work": 1}
    finally:
        host.stop()
