"""Running statistics of norms in a Run: they get the weighted mean, whatever the outer optimizer and the rule.

Each simulation is compared with plain torch: each client trains a copy of the module, the statistics are averaged by
examples, and the outer step changes the trained parameters alone.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
from support.errors import raises
from support.outside import install_module
from torch import nn

from fanin.clients import Examples
from fanin.edge.codecs.known import _installed_stages
from fanin.edge.export import App
from fanin.edge.export.module.prepare import prepare
from fanin.protos.errors import UnsupportedModel
from fanin.protos.roles import RoleKind
from fanin.simulation import Natural, Result, SimulationSettings, partition, simulate

pytestmark = pytest.mark.heavy
SIZES: Final = (48, 24, 16, 12)
"""Examples of the clients. One batch holds all of a client's, so that torch sees the same batches."""
RATE: Final = 0.02
EPOCHS: Final = 2
ROUNDS: Final = 3
State = dict[str, np.ndarray]
Outer = Callable[[str, np.ndarray, np.ndarray], np.ndarray]
"""The outer step of a parameter: name, values before, aggregate -> values after."""
Rule = Callable[[Sequence[np.ndarray]], np.ndarray]


def is_statistic(name: str) -> bool:
    return name.endswith(("running_mean", "running_var"))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
    )


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, sum(SIZES)).astype(np.int32)
    shift = (y[:, None, None, None] - 1) * 0.3
    return (rng.normal(size=(len(y), 1, 6, 6)) * 0.3 + shift).astype(np.float32), y


def app_of(module: nn.Module) -> App:
    return App(name="bn", module=module, calibration=data()[0], batch_size=SIZES[0], num_classes=3)


def simulated(plan: Mapping[str, object], engine: str = "graph") -> Result:
    x, y = data()
    clients = partition(Examples(inputs={"x": x}, y=y), len(SIZES), Natural(ids=np.repeat(range(len(SIZES)), SIZES)))
    app = app_of(net())
    whole = {"training.learning_rate": RATE, "training.epochs": EPOCHS, "cohort.quorum": len(SIZES), **plan}
    settings = SimulationSettings(quiet=True, plan=whole, validation_fraction=0.0, engine=engine)
    return simulate(app, clients, cohort=len(SIZES), rounds=ROUNDS, settings=settings)


def trained_by_torch(module: nn.Module, x: np.ndarray, y: np.ndarray) -> State:
    """Return the state after the training of one client, without the counters of the norms."""
    module = copy.deepcopy(module).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y).long())
        loss.backward()  # type: ignore[no-untyped-call]  # of torch
        optimizer.step()
    return state_of(module)


def state_of(module: nn.Module) -> State:
    return {
        name: value.detach().numpy().astype(np.float64)
        for name, value in module.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }


def weighted_mean(changes: Sequence[np.ndarray]) -> np.ndarray:
    return np.asarray(np.average(changes, axis=0, weights=SIZES))


def trimmed_mean(changes: Sequence[np.ndarray]) -> np.ndarray:
    return np.asarray(np.sort(changes, axis=0)[1:-1].mean(axis=0))


def expected_state(outer: Outer, rule: Rule = weighted_mean, most: float = np.inf) -> State:
    """Return the state after all Rounds by plain torch and numpy.

    Args:
        outer: The outer step of the parameters.
        rule: The mean of the parameters.
        most: Largest norm of a client's change of all parameters together.
    """
    (x, y), module = data(), net()
    ends = np.cumsum(SIZES).tolist()
    parts = [slice(end - size, end) for end, size in zip(ends, SIZES, strict=True)]
    for _ in range(ROUNDS):
        before = state_of(module)
        clients = [trained_by_torch(module, x[part], y[part]) for part in parts]
        norms = [
            np.sqrt(
                sum(np.sum((client[name] - values) ** 2) for name, values in before.items() if not is_statistic(name))
            )
            for client in clients
        ]
        after = {}
        for name, values in before.items():
            changes = [client[name] - values for client in clients]
            if is_statistic(name):
                after[name] = values + weighted_mean(changes)
            else:
                clipped = [change * min(most / norm, 1.0) for change, norm in zip(changes, norms, strict=True)]
                after[name] = outer(name, values, rule(clipped))
        module.load_state_dict({name: torch.from_numpy(value) for name, value in after.items()}, strict=False)
    return after


def nesterov(rate: float, momentum: float) -> Outer:
    velocity: dict[str, np.ndarray] = {}

    def outer(name: str, values: np.ndarray, aggregate: np.ndarray) -> np.ndarray:
        velocity[name] = momentum * velocity.get(name, np.zeros_like(values)) + aggregate
        return np.asarray(values + rate * (aggregate + momentum * velocity[name]))

    return outer


def fedavg(rate: float) -> Outer:
    return lambda _name, values, aggregate: values + rate * aggregate


def assert_equal_to(result: Result, expected: State, rtol: float = 2e-5) -> None:
    actual = state_of(result.module)
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, rtol=rtol, atol=rtol / 10, err_msg=name)


NESTEROV: Final = {"aggregation.outer_optimizer": "nesterov", "aggregation.outer_options.learning_rate": 0.7}
ADAM: Final = """
import numpy as np


class Adam:
    tensors = ("mean", "square")

    def begin(self, parameters):
        return {name: np.zeros_like(parameters) for name in self.tensors}

    def step(self, state, parameters, aggregate, number):
        mean = 0.9 * state["mean"] + 0.1 * aggregate
        square = 0.99 * state["square"] + 0.01 * aggregate * aggregate
        return {"mean": mean, "square": square}, parameters + 0.01 * mean / (np.sqrt(square) + 0.001)


def adam(plan):
    return Adam()
"""
CLIP: Final = """
import numpy as np
from fanin.edge.codecs.vector import PARAMETERS


class Clip:
    tensors = ()

    def __init__(self, most):
        self.most = most

    def apply(self, vector, state, context):
        change = vector[PARAMETERS].astype(np.float64)
        factor = min(self.most / np.sqrt(np.sum(change * change)), 1.0)
        context.send({**vector, PARAMETERS: (change * factor).astype(np.float32)})
        return {}


def clip(most: float):
    return Clip(most)
"""


def adam() -> Outer:
    state: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def outer(name: str, values: np.ndarray, aggregate: np.ndarray) -> np.ndarray:
        mean, square = state.get(name, (np.zeros_like(values), np.zeros_like(values)))
        state[name] = mean, square = 0.9 * mean + 0.1 * aggregate, 0.99 * square + 0.01 * aggregate * aggregate
        return np.asarray(values + 0.01 * mean / (np.sqrt(square) + 0.001))

    return outer


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder of installed distributions. A process reads the names of the stages once."""
    monkeypatch.syspath_prepend(tmp_path)
    _installed_stages.cache_clear()
    yield tmp_path
    _installed_stages.cache_clear()


@pytest.mark.parametrize(
    ("plan", "outer"),
    [
        (NESTEROV, nesterov(0.7, 0.9)),
        pytest.param({"aggregation.outer_options.learning_rate": 1.5}, fedavg(1.5), marks=pytest.mark.nightly),
        pytest.param({}, fedavg(1.0), marks=pytest.mark.nightly),
    ],
    ids=["nesterov", "fedavg-1.5", "fedavg"],
)
def test_statistics_get_the_weighted_mean_under_each_outer_optimizer(plan: Mapping[str, object], outer: Outer) -> None:
    result = simulated(plan)
    assert_equal_to(result, expected_state(outer))
    assert float(result.module[1].running_var.min()) > 0.0  # type: ignore[index, union-attr]
    assert [row.num_clamped for row in result.rounds] == [0] * len(result.rounds)


def test_an_own_optimizer_needs_no_code_for_roles(site: Path) -> None:
    install_module(site, ("adam", "adam_outer:adam"), ADAM, "fanin.outer_optimizers")
    result = simulated({"aggregation.outer_optimizer": "adam"})
    assert_equal_to(result, expected_state(adam()), rtol=1e-3)


def test_a_robust_rule_works_on_parameters_and_statistics_get_the_weighted_mean() -> None:
    result = simulated({"aggregation.rule": "trimmed_mean", "aggregation.rule_options.trim": 0.25, **NESTEROV})
    assert_equal_to(result, expected_state(nesterov(0.7, 0.9), trimmed_mean))


def test_a_stage_that_clips_sees_the_norm_of_the_parameters_alone(site: Path) -> None:
    install_module(site, ("clip", "clip_stage:clip"), CLIP, "fanin.stages")
    result = simulated({"stages": [{"name": "clip", "options": {"most": 0.05}}]})
    assert_equal_to(result, expected_state(fedavg(1.0), most=0.05))


def test_error_feedback_keeps_statistics_of_a_coarse_codec_in_their_range() -> None:
    """A residual of a statistic would add up over Rounds, although each Round measures the statistic anew."""
    result = simulated({"stages": [{"name": "error_feedback"}], "codec.name": "int8", **NESTEROV})
    assert not result.failures
    assert float(result.module[1].running_var.min()) >= 0.0  # type: ignore[index, union-attr]
    expected = expected_state(nesterov(0.7, 0.9))
    assert np.allclose(state_of(result.module)["1.running_var"], expected["1.running_var"], atol=0.02)


def test_clients_that_train_together_get_the_same_roles() -> None:
    assert_equal_to(simulated(NESTEROV, engine="vmap"), expected_state(nesterov(0.7, 0.9)), rtol=1e-4)


def test_an_export_derives_roles_from_the_module() -> None:
    roles = prepare(app_of(net())).table.roles
    assert {name: (role.role, role.lowest) for name, role in roles.items()} == {
        "1.running_mean": (RoleKind.STATISTIC, None),
        "1.running_var": (RoleKind.STATISTIC, 0.0),
    }


def test_an_export_refuses_a_variance_below_zero_by_name() -> None:
    module = net()
    module[1].running_var[2] = -0.5  # type: ignore[index]
    text = "App bn: tensor '1.running_var': got -0.5, expected finite numbers of at least 0, because it is a statistic"
    with raises(UnsupportedModel, f"{text}; correct its values"):
        prepare(app_of(module))
