"""FedNova, q-FedAvg and FedDyn in whole Runs, against plain twins in numpy, and the Plans that they refuse."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.digits_fedavg import BATCH, RATE, clients_of
from torch import nn

from fanin.clients.data.batching import batches
from fanin.clients.data.digits import load_digits
from fanin.clients.data.stores import memory_store
from fanin.clients.planfile import Override, parse_plan
from fanin.edge.codecs.contract import check_stage
from fanin.edge.codecs.methods.feddyn import FedDyn
from fanin.edge.codecs.methods.fednova import FedNova
from fanin.edge.codecs.stage import LocalSteps
from fanin.edge.codecs.stages import ErrorFeedback
from fanin.edge.export import Adam, App, Recipe, Sgd
from fanin.edge.tensors import Float64s
from fanin.protos import messages as m
from fanin.protos.errors import InvalidPlan
from fanin.server.aggregation.methods.checks import check_weights
from fanin.simulation import ClientWork, Result, SimulationSettings, simulate

NUM_CLIENTS, ROUNDS, SEED, EPOCHS = 6, 3, 4, 2
STEPS = (3, 9, 5, 2, 7, 4)
"""Steps of each client in a Round."""


def app_of(recipe: Recipe) -> App:
    torch.manual_seed(3)
    images = torch.from_numpy(load_digits().inputs["x"][:64])
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    return App(name="digits", module=module, calibration=images, batch_size=BATCH, num_classes=10, recipe=recipe)


def run(recipe: Recipe, plan: Mapping[str, object], cohort: int = NUM_CLIENTS, engine: str = "graph") -> Result:
    keys = {"training.learning_rate": RATE, "training.epochs": EPOCHS, "codec.name": "fixed32", **plan}
    settings = SimulationSettings(plan=keys, seed=SEED, work=ClientWork(steps=STEPS), engine=engine, quiet=True)
    return simulate(app_of(recipe), clients_of(), cohort=cohort, rounds=ROUNDS, settings=settings)


def parameters_of(result: Result) -> Float64s:
    weight, bias = (value.detach().numpy().astype(np.float64) for value in result.module.parameters())
    return np.concatenate([weight, bias[:, None]], axis=1)


def first_parameters() -> Float64s:
    weight, bias = (value.detach().numpy().astype(np.float64) for value in app_of(Recipe()).module.parameters())
    return np.concatenate([weight, bias[:, None]], axis=1)


def examples_of(client: int) -> tuple[Float64s, np.ndarray]:
    train = memory_store(clients_of()[client], client, 0.1).train
    return _with_ones(train.inputs["x"]), train.y


def _with_ones(x: np.ndarray) -> Float64s:
    flat = x.reshape(len(x), -1).astype(np.float64)
    return np.concatenate([flat, np.ones((len(x), 1))], axis=1)


def loss_and_gradient(w: Float64s, x: Float64s, y: np.ndarray) -> tuple[float, Float64s]:
    scores = x @ w.T
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    return float(-np.log(odds[np.arange(len(y)), y]).mean()), (odds - np.eye(10)[y]).T @ x / len(y)


def change_of(
    w: Float64s, client: int, number: int, extra: Callable[[Float64s], Float64s | float] = lambda y: 0.0, rho: float = 0
) -> Float64s:
    """Local SGD of a client in numpy. ``extra`` is added to the gradient, by the distance to the Version."""
    train, y, velocity = memory_store(clients_of()[client], client, 0.1).train, w.copy(), np.zeros_like(w)
    rng = np.random.default_rng(np.random.SeedSequence((SEED, client, number)))
    drawn = [batch for _ in range(EPOCHS) for batch in batches(train, BATCH, rng)]
    for batch in drawn[: STEPS[client]]:
        real = batch.mask > 0
        gradient = loss_and_gradient(y, _with_ones(batch.inputs["x"][real]), batch.y[real])[1] + extra(y - w)
        velocity = rho * velocity + gradient
        y = y - RATE * velocity
    return y - w


def sizes() -> Float64s:
    return np.array([len(examples_of(client)[1]) for client in range(NUM_CLIENTS)], np.float64)


FEDNOVA = {"stages": [{"name": "fednova"}], "aggregation.rule": "fednova"}


def norm_of(num_steps: int, rho: float, mu: float) -> float:
    """The norms of the paper in closed form: plain, momentum or proximal."""
    if rho:
        return (num_steps - rho * (1 - rho**num_steps) / (1 - rho)) / (1 - rho)
    return (1 - (1 - RATE * mu) ** num_steps) / (RATE * mu) if mu else float(num_steps)


@pytest.mark.parametrize(("rho", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.5)])
def test_fednova_is_the_plain_twin(rho: float, mu: float) -> None:
    recipe = Recipe(optimizer=Sgd(momentum=rho), proximal=mu > 0)
    result = run(recipe, FEDNOVA | ({"training.proximal_weight": mu} if mu else {}))
    w, shares = first_parameters(), sizes() / sizes().sum()
    for number in range(1, ROUNDS + 1):
        norms = np.array([norm_of(steps, rho, mu) for steps in STEPS])
        changes = [change_of(w, client, number, lambda y: mu * y, rho) for client in range(NUM_CLIENTS)]
        mean = sum(share * change / norm for share, change, norm in zip(shares, changes, norms, strict=True))
        w = w + float(shares @ norms) * mean
    np.testing.assert_allclose(parameters_of(result), w, atol=2e-5)


def steps_of(num_steps: int, rho: float, mu: float) -> LocalSteps:
    training = m.Training(learning_rate=RATE, proximal_weight=mu)
    return LocalSteps(training=training, num_steps=num_steps, planned_steps=num_steps, round=1, momentum=rho)


@given(st.integers(1, 40), st.floats(0.0, 0.99), st.floats(0.001, 5.0))
def test_the_norm_of_steps_is_that_of_the_paper(num_steps: int, rho: float, mu: float) -> None:
    assert steps_of(num_steps, rho, 0.0).norm() == pytest.approx(norm_of(num_steps, rho, 0.0), rel=1e-9)
    assert steps_of(num_steps, 0.0, mu).norm() == pytest.approx(norm_of(num_steps, 0.0, mu), rel=1e-9)


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_norm_of_steps_is_that_of_torchs_sgd(nesterov: bool) -> None:
    """The weight of each gradient, measured by a gradient of 1 in one step alone, with momentum and proximal term."""
    total, mu = 0.0, 0.5
    for pulse in range(7):
        value = torch.zeros(1, dtype=torch.float64)
        optimizer = torch.optim.SGD([value], lr=RATE, momentum=0.8, nesterov=nesterov)
        for step in range(7):
            value.grad = mu * value + (1.0 if step == pulse else 0.0)
            optimizer.step()
        total += abs(float(value)) / RATE
    assert steps_of(7, 0.8, mu).norm(nesterov=nesterov) == pytest.approx(total, rel=1e-12)


def test_fednova_with_equal_steps_is_fedavg() -> None:
    work, keys = ClientWork(steps=[4] * NUM_CLIENTS), {"training.learning_rate": RATE, "codec.name": "fixed32"}
    results = [
        simulate(
            app_of(Recipe(optimizer=Sgd(momentum=0.9))),
            clients_of(),
            cohort=NUM_CLIENTS,
            rounds=2,
            settings=SimulationSettings(plan=keys | plan, seed=SEED, work=work, quiet=True),
        )
        for plan in ({}, FEDNOVA)
    ]
    np.testing.assert_allclose(results[0].parameters, results[1].parameters, atol=1e-6)


@pytest.mark.parametrize("q", [0.0, 0.5, 2.0])
def test_qfedavg_is_the_plain_twin(q: float) -> None:
    plan = {"stages": [{"name": "qfedavg", "options": {"q": q}}], "aggregation.rule": "qfedavg"}
    result = run(Recipe(optimizer=Sgd(momentum=0.0)), plan)
    w = first_parameters()
    for number in range(1, ROUNDS + 1):
        deltas, scales = [], []
        for client in range(NUM_CLIENTS):
            loss = loss_and_gradient(w, *examples_of(client))[0] + 1e-10
            gradient = -change_of(w, client, number) / RATE  # the paper's L (w - w_k), with L = 1 / eta
            deltas.append(loss**q * gradient)
            scales.append(q * loss ** (q - 1) * float(np.square(gradient).sum()) + loss**q / RATE)
        w = w - sum(deltas) / sum(scales)
    np.testing.assert_allclose(parameters_of(result), w, atol=5e-5)


FEDDYN_RECIPE = Recipe(optimizer=Sgd(momentum=0.0), scaffold=True, proximal=True)


def feddyn(num_devices: int = NUM_CLIENTS, alpha: float = 0.1) -> dict[str, object]:
    return {
        "stages": [{"name": "feddyn", "options": {"num_devices": num_devices}}],
        "aggregation.outer_optimizer": "feddyn",
        "training.proximal_weight": alpha,
    }


@pytest.mark.parametrize(("cohort", "engine"), [(NUM_CLIENTS, "graph"), (2, "graph"), (2, "vmap")])
def test_feddyn_is_the_plain_twin(cohort: int, engine: str) -> None:
    alpha, result = 0.1, run(FEDDYN_RECIPE, feddyn(), cohort, engine)
    w, h = first_parameters(), np.zeros((10, 65))
    linear = [np.zeros((10, 65)) for _ in range(NUM_CLIENTS)]
    for number in range(1, ROUNDS + 1):
        chosen = sorted(row.client for row in result.clients if row.round == number)
        assert len(chosen) == cohort
        changes = {
            client: change_of(w, client, number, lambda y, own=linear[client]: alpha * y - own) for client in chosen
        }
        for client, change in changes.items():
            linear[client] = linear[client] - alpha * change
        h = h - alpha / NUM_CLIENTS * sum(changes.values())
        w = w + sum(changes.values()) / cohort - h / alpha
    np.testing.assert_allclose(parameters_of(result), w, atol=5e-5)


def test_the_stages_keep_the_contract_of_stages() -> None:
    check_stage(FedNova())
    check_stage(FedDyn(num_devices=3))


SCAFFOLD = {"name": "scaffold", "options": {"num_devices": NUM_CLIENTS}}
QFEDAVG = {"name": "qfedavg", "options": {"q": 1.0}}


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        ({"stages": [{"name": "fednova"}]}, "FN-1813"),
        ({"aggregation.rule": "fednova"}, "FN-1813"),
        ({"aggregation.rule": "qfedavg"}, "FN-1813"),
        ({"aggregation.outer_optimizer": "feddyn"}, "FN-1813"),
        (feddyn() | {"aggregation.rule": "median"}, "FN-1813"),
        (feddyn() | {"aggregation.outer_optimizer": "fedadam"}, "FN-1813"),
        ({"stages": [QFEDAVG], "aggregation.rule": "qfedavg", "aggregation.outer_optimizer": "fedadam"}, "FN-1813"),
        (FEDNOVA | {"stages": [SCAFFOLD, {"name": "fednova"}]}, "FN-1814"),
        (FEDNOVA | {"stages": [QFEDAVG, {"name": "fednova"}]}, "FN-1814"),
        (feddyn() | {"stages": [*feddyn()["stages"], SCAFFOLD]}, "FN-1814"),  # type: ignore[misc]
        (feddyn(alpha=0.0), "FN-1815"),
        (feddyn() | {"schedule": [{"from_round": 2, "proximal_weight": 0.2}]}, "FN-1815"),
        (feddyn(num_devices=7), "FN-1178"),
        (feddyn(num_devices=5), "FN-0268"),
        (FEDNOVA | {"aggregation.max_staleness": 3}, "FN-0222"),
        (FEDNOVA | {"stages": [{"name": "error_feedback"}, {"name": "fednova"}]}, "FN-0221"),
        ({"stages": [{"name": "qfedavg", "options": {"q": -1.0}}], "aggregation.rule": "qfedavg"}, "FN-0216"),
        ({"training.step_decay": "step"}, "FN-1812"),
        (FEDNOVA | {"aggregation.weights": "uniform"}, "FN-1817"),
        (feddyn() | {"aggregation.weights": "uniform"}, "FN-1817"),
        (
            {"stages": [QFEDAVG], "aggregation.rule": "qfedavg", "aggregation.weights": "sites"}
            | {"aggregation.site_weights": {"simulated-0": 3}},
            "FN-1817",
        ),
    ],
)
def test_a_plan_that_cannot_work_is_refused_before_the_export(plan: dict[str, object], code: str) -> None:
    with pytest.raises(InvalidPlan) as excinfo:
        run(FEDDYN_RECIPE, plan)
    assert excinfo.value.code == code


def test_a_stage_with_a_weighting_has_no_weights_by_site() -> None:
    table = {"bundle": "b", "cohort.concurrency": 3, "aggregation.weights": "sites"}
    keys = [Override(path=key, value=value) for key, value in table.items()]
    plan = parse_plan("", "plan", [*keys, Override(path="aggregation.site_weights", value={"a": 3})]).plan
    check_weights(plan, {"error_feedback": ErrorFeedback()})
    with pytest.raises(InvalidPlan, match="own") as excinfo:
        check_weights(plan, {"own": FedDyn(num_devices=3)})
    assert excinfo.value.code == "FN-1817"


def test_graphs_that_cannot_carry_out_a_method_are_refused() -> None:
    with pytest.raises(InvalidPlan) as excinfo:
        run(Recipe(optimizer=Adam()), FEDNOVA)
    assert excinfo.value.code == "FN-1816"
    for recipe in (replace(FEDDYN_RECIPE, scaffold=False), replace(FEDDYN_RECIPE, proximal=False)):
        with pytest.raises(InvalidPlan) as excinfo:
            run(recipe, feddyn())
        assert excinfo.value.code == "FN-0266"


def test_a_steps_decay_in_a_schedule_needs_its_length() -> None:
    text = "[cohort]\nconcurrency = 1\n[training]\nlearning_rate = 1.0\n"
    text += '[[schedule]]\nfrom_round = 2\nstep_decay = "step"\n'
    with pytest.raises(InvalidPlan) as excinfo:
        parse_plan(f'app = "a"\n{text}', "plan.toml")
    assert excinfo.value.code == "FN-1812"
