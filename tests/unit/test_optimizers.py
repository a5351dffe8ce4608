"""``edge.export.optimizers``: each step of each optimizer equals torch's, in float64."""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fanin.edge.export import Adagrad, Adam, Adapters, Lion, Optimizer, Recipe, RmsProp, Sgd
from fanin.edge.export.app.optimizers.lion import EagerLion
from fanin.edge.export.app.optimizers.optimizer import StepInputs, clipped, setting_tensors
from fanin.protos.errors import UnsupportedModel
from fanin.protos.plans import OPTIMIZER_SETTINGS

NO_CHANGES: Mapping[str, float] = MappingProxyType({})
CLOSE = {"rtol": 1e-12, "atol": 1e-14}
RATES = st.floats(1e-4, 0.5)
DECAYS = st.just(0.0) | st.floats(1e-4, 0.1)
SGDS = st.builds(Sgd, momentum=st.just(0.0) | st.floats(0.1, 0.99), weight_decay=DECAYS) | st.builds(
    Sgd, momentum=st.floats(0.1, 0.99), nesterov=st.just(True), weight_decay=DECAYS
)
ADAMS = st.builds(
    Adam,
    beta1=st.just(0.0) | st.floats(0.5, 0.99),
    beta2=st.just(0.0) | st.floats(0.9, 0.9999),
    epsilon=st.sampled_from([1e-8, 1e-3]),
    weight_decay=DECAYS,
    decoupled=st.booleans(),
)
RMSPROPS = st.builds(
    RmsProp,
    decay=st.just(0.0) | st.floats(0.5, 0.999),
    momentum=st.just(0.0) | st.floats(0.1, 0.99),
    epsilon=st.sampled_from([1e-8, 1e-3]),
    weight_decay=DECAYS,
)
ADAGRADS = st.builds(Adagrad, epsilon=st.sampled_from([1e-10, 1e-3]), weight_decay=DECAYS)

LIONS = st.builds(
    Lion,
    beta1=st.just(0.0) | st.floats(0.5, 0.99),
    beta2=st.just(0.0) | st.floats(0.9, 0.9999),
    weight_decay=DECAYS,
)


SETTABLE = {
    "sgd": Sgd(momentum=0.0, settable=("momentum", "weight_decay")),
    "adam": Adam(settable=("weight_decay",)),
    "adamw": Adam(decoupled=True, settable=("weight_decay",)),
    "rmsprop": RmsProp(settable=("momentum", "weight_decay")),
    "adagrad": Adagrad(settable=("weight_decay",)),
    "lion": Lion(settable=("weight_decay",)),
}
"""Optimizers whose settings of 0.0 a Plan may set."""


def test_the_protocol_names_every_setting_of_an_optimizer() -> None:
    assert set(OPTIMIZER_SETTINGS) == {name for optimizer in SETTABLE.values() for name in optimizer.settings}


def ours(
    optimizer: Optimizer, start: Tensor, gradients: list[Tensor], rate: float, changes: Mapping[str, float] = NO_CHANGES
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (the parameter, its state) after one step for each gradient. ``changes`` are settings of a Plan."""
    value, state = start, {name: torch.zeros_like(start) for name in optimizer.states}
    learning_rate = torch.tensor(rate, dtype=start.dtype)
    for number, gradient in enumerate(gradients, start=1):
        step = torch.tensor(float(number), dtype=start.dtype) if optimizer.counts_steps else None
        settings = setting_tensors(optimizer, start.dtype)
        settings |= {name: torch.tensor(value, dtype=start.dtype) for name, value in changes.items()}
        inputs = StepInputs(learning_rate=learning_rate, step=step, settings=settings)
        value, state = optimizer.move(value, gradient, state, inputs)
    return value, state


def theirs(
    optimizer: Optimizer, start: Tensor, gradients: list[Tensor], rate: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the same with ``torch.optim``. The state has fanin's names."""
    value = start.clone().requires_grad_()
    twin = optimizer.eager([value], rate)
    for gradient in gradients:
        value.grad = gradient.clone()
        twin.step()
    return value.detach(), {name: twin.state[value][key] for name, key in optimizer.states.items()}


def close(
    actual: tuple[Tensor, Mapping[str, Tensor]], expected: tuple[Tensor, Mapping[str, Tensor]], **bounds: float
) -> None:
    """Check that the parameters and the states are equal within the bounds."""
    torch.testing.assert_close(actual[0], expected[0], **bounds)
    assert actual[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        torch.testing.assert_close(actual[1][name], value, **bounds)


@given(
    optimizer=SGDS | ADAMS | RMSPROPS | ADAGRADS | LIONS,
    rate=RATES,
    num_steps=st.integers(1, 20),
    seed=st.integers(0, 1000),
)
def test_every_step_equals_torch(optimizer: Optimizer, rate: float, num_steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    start, *gradients = torch.randn(num_steps + 1, 5, dtype=torch.float64, generator=generator)
    close(ours(optimizer, start, gradients, rate), theirs(optimizer, start, gradients, rate), **CLOSE)


@pytest.mark.parametrize("name", SETTABLE)
def test_a_plan_sets_a_setting_that_is_zero(name: str) -> None:
    optimizer: Any = SETTABLE[name]
    changes = {each: {"momentum": 0.6, "weight_decay": 0.02}[each] for each in optimizer.settable}
    start, *gradients = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = theirs(replace(optimizer, **changes), start, gradients, 0.1)
    close(ours(optimizer, start, gradients, 0.1, changes), expected, **CLOSE)
    plain, _ = theirs(replace(optimizer, settable=()), start, gradients, 0.1)
    torch.testing.assert_close(ours(optimizer, start, gradients, 0.1)[0], plain, **CLOSE)
    assert not torch.allclose(plain, expected[0], rtol=1e-3)


def test_a_setting_of_zero_is_no_input_unless_it_is_settable() -> None:
    for name, optimizer in SETTABLE.items():
        plain: Any = replace(optimizer, settable=())
        absent = set(optimizer.settable)
        assert plain.settings.keys() == optimizer.settings.keys() - absent, name
        assert set(plain.setting_inputs) == set(optimizer.setting_inputs) - absent, name
        assert set(plain.states) == set(optimizer.states) - absent, name


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        (Sgd(), torch.optim.SGD),
        (Adam(), torch.optim.Adam),
        (Adam(decoupled=True, weight_decay=0.01), torch.optim.AdamW),
        (RmsProp(), torch.optim.RMSprop),
        (Adagrad(), torch.optim.Adagrad),
        (Lion(), EagerLion),
    ],
)
def test_the_twin_is_the_optimizer_that_it_is_named_after(optimizer: Optimizer, kind: type) -> None:
    assert type(optimizer.eager([torch.zeros(1, requires_grad=True)], 0.1)) is kind


def test_the_states_of_each_optimizer() -> None:
    assert dict(Sgd(momentum=0.0).states) == {}
    assert list(Sgd().states) == ["momentum"]
    assert list(Adam().states) == ["mean", "square"]
    assert list(RmsProp().states) == ["square"]
    assert list(RmsProp(momentum=0.9).states) == ["square", "momentum"]
    assert list(Adagrad().states) == ["square"]
    assert list(Lion().states) == ["mean"]
    every = (Sgd(), Adam(), RmsProp(), Adagrad(), Lion())
    assert [each.counts_steps for each in every] == [False, True, False, False, False]
    assert [each.divides for each in every] == [False, True, True, True, True]


@pytest.mark.parametrize("num_steps", [1, 2, 3, 10])
def test_the_bias_correction_keeps_its_digits_in_float32(num_steps: int) -> None:
    # Computed as one minus an exponential, the first steps would be off by 3e-5.
    gradients = [torch.full((1,), 0.5)] * num_steps
    value, _ = ours(Adam(), torch.zeros(1), gradients, 0.001)
    expected, _ = theirs(Adam(), torch.zeros(1, dtype=torch.float64), [row.double() for row in gradients], 0.001)
    assert value.item() == pytest.approx(expected.item(), rel=2e-6)


def test_a_gradient_that_is_always_zero_moves_nothing() -> None:
    for optimizer in (Sgd(), Adam(), RmsProp(momentum=0.5), Adagrad(), Lion()):
        value, state = ours(optimizer, torch.ones(3), [torch.zeros(3)] * 3, 0.1)
        assert torch.equal(value, torch.ones(3))
        assert not any(tensor.any() for tensor in state.values())


@given(
    max_norm=st.floats(1e-3, 1e3), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), power=st.integers(-6, 6)
)
def test_clipping_equals_torch(max_norm: float, sizes: list[int], power: int) -> None:
    generator = torch.Generator().manual_seed(sum(sizes))
    gradients = {
        str(index): 10.0**power * torch.randn(size, dtype=torch.float64, generator=generator)
        for index, size in enumerate(sizes)
    }
    parameters = [torch.zeros_like(value) for value in gradients.values()]
    for parameter, gradient in zip(parameters, gradients.values(), strict=True):
        parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    clipped_gradients = clipped(gradients, max_norm)
    assert list(clipped_gradients) == list(gradients)
    for parameter, gradient in zip(parameters, clipped_gradients.values(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, **CLOSE)
    norm = math.sqrt(sum(float(value.square().sum()) for value in clipped_gradients.values()))
    assert norm <= max_norm * (1 + 1e-9)


def test_without_a_bound_nothing_is_clipped() -> None:
    gradients = {"a": torch.full((2,), 1e6)}
    assert clipped(gradients, 0.0) is gradients


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sgd(momentum=1.0), "optimizer: got momentum 1.0, expected a float of at least 0.0 and below 1.0"),
        (lambda: Sgd(momentum=-0.1), "optimizer: got momentum -0.1"),
        (lambda: Sgd(momentum=float("nan")), "optimizer: got momentum nan"),
        (lambda: Sgd(weight_decay=-1.0), "got weight_decay -1.0, expected a float of at least 0.0 and below inf"),
        (lambda: Sgd(momentum=0.0, nesterov=True), "Sgd: got nesterov with momentum 0.0, expected a momentum"),
        (lambda: Adam(beta1=1.0), "optimizer: got beta1 1.0"),
        (lambda: Adam(beta2=1.5), "optimizer: got beta2 1.5"),
        (lambda: Adam(weight_decay=float("inf")), "optimizer: got weight_decay inf"),
        (lambda: Adam(epsilon=0.0), "Adam: got epsilon 0.0, expected a float of at least 1e-16 and below 1.0"),
        (lambda: RmsProp(epsilon=1e-17), "RmsProp: got epsilon 1e-17, expected a float of at least 1e-16"),
        (lambda: RmsProp(decay=1.0), "optimizer: got decay 1.0"),
        (lambda: RmsProp(momentum=1.0), "optimizer: got momentum 1.0"),
        (lambda: Adagrad(epsilon=1.0), "Adagrad: got epsilon 1.0"),
        (lambda: Adagrad(weight_decay=-0.1), "optimizer: got weight_decay -0.1"),
        (lambda: Lion(beta1=1.0), "optimizer: got beta1 1.0, expected a float of at least 0.0 and below 1.0"),
        (lambda: Lion(beta2=-0.1), "optimizer: got beta2 -0.1"),
        (lambda: Lion(weight_decay=-0.1), "optimizer: got weight_decay -0.1"),
        (
            lambda: Adam(settable=("momentum",)),
            r"Adam: settable: got \('momentum',\), expected a tuple of names of \['beta1', 'beta2', 'weight_decay'\]",
        ),
        (lambda: Sgd(settable="momentum"), "Sgd: settable: got 'momentum', expected a tuple of names"),
        (lambda: Recipe(clip_norm=-1.0), "recipe: got clip_norm -1.0"),
        (lambda: Recipe(clip_norm=float("inf")), "recipe: got clip_norm inf"),
        (lambda: Recipe(trains="all"), r"recipe: got trains 'all', expected 'full', 'head', 'bias' or Adapters"),
        (lambda: Adapters(rank=0), "adapters: got rank 0 and alpha 0.0, expected a rank of at least 1"),
        (lambda: Adapters(rank=1, alpha=-1.0), "adapters: got rank 1 and alpha -1.0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(UnsupportedModel, match=message):
        make()
