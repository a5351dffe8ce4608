"""Flower apps of many forms have the numbers of Flower's own strategy in fanin, too. The apps do not know of fanin."""

import importlib
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from house.tree import ROOT
from support.flower_reference import Setting, by_flower

from fanin.clients import FlowerSettings
from fanin.clients.flower.app import arrays_of
from fanin.simulation import Result, SimulationSettings, simulate

NUM_CLIENTS: Final = 3
NUM_ROUNDS: Final = 3


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form of apps.

    Attributes:
        name: The module.
        config: Entries of the config of each message.
        run_config: Entries of ``context.run_config``.
        local: Arrays that stay on the devices, which Flower averages.
        keep: Patterns of other arrays that stay.
        metrics: The metrics of an evaluation, by the names of both systems.
    """

    name: str
    config: dict[str, object] = field(default_factory=dict)
    run_config: dict[str, object] = field(default_factory=dict)
    local: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()


NUMPY: Final = (
    Form(name="logistic", metrics=("loss", "accuracy")),
    Form(name="rounds"),
    Form(name="mixed", local=("mask",)),
    Form(name="tabular", config={"lr": 0.5}, run_config={"local-epochs": 3}, metrics=("eval_loss", "eval_acc")),
    Form(name="stateful", metrics=("loss", "bias")),
)


TORCH: Final = (
    Form(name="convolution", config={"lr": 0.05}, metrics=("eval_loss", "eval_acc")),
    Form(name="loops", run_config={"max-epochs": 2}, metrics=("eval_loss",)),
    Form(name="variational", config={"lr": 0.01}, metrics=("loss",)),
    Form(name="language", metrics=("loss", "accuracy")),
    Form(name="proximal", config={"proximal-mu": 0.5, "local-epochs": 4}),
    Form(name="doubles"),
    Form(name="adapters"),
)


def check(form: Form) -> Result:
    """Compare the results of both systems. Return that of fanin."""
    module = importlib.import_module(f"support.flower_forms.{form.name}")
    arrays = arrays_of(module.initial)
    record = ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})
    reference = by_flower(
        module.app,
        record,
        Setting(
            num_clients=NUM_CLIENTS,
            num_rounds=NUM_ROUNDS,
            config=form.config,
            run_config=form.run_config,
            evaluates=bool(form.metrics),
        ),
    )
    settings = SimulationSettings(
        initial=module.initial,
        plan={
            "flower.config": form.config,
            "statistics": [{"name": f"evaluate.{name}", "bound": 1 << 40} for name in form.metrics],
        },
        quiet=True,
    )
    words = " ".join(f"{name}={value}" for name, value in form.run_config.items())
    app = FlowerSettings(app=f"support.flower_forms.{form.name}:app", folder=ROOT / "tests", run_config=words)
    result = simulate(app, NUM_CLIENTS, cohort=NUM_CLIENTS, rounds=NUM_ROUNDS, settings=settings)
    assert result.failures == ()
    assert list(result.arrays) == list(arrays)
    for name, value in result.arrays.items():
        assert (value.dtype, value.shape) == (arrays[name].dtype, arrays[name].shape)
        # The mean of integers is a float in Flower, and an app that loads it into integers cuts it off in each round.
        atol = 1e-6 if value.dtype.kind == "f" else NUM_ROUNDS
        if name not in form.local:
            np.testing.assert_allclose(
                np.asarray(value, np.float64), reference.arrays[name], rtol=1e-5, atol=atol, err_msg=name
            )
    # The evaluation of a round is that of its own Version, also of the last one, as in Flower.
    for number, metrics in reference.evaluations.items():
        means = result.rounds[number].means
        assert {name: metrics[name] for name in form.metrics} == pytest.approx(
            {name: means[f"evaluate.{name}"] for name in form.metrics}, rel=1e-5, abs=1e-5
        )
    assert len(reference.evaluations) == (NUM_ROUNDS if form.metrics else 0)
    return result


@pytest.mark.parametrize("form", NUMPY, ids=lambda form: form.name)
def test_an_app_of_numpy_has_the_numbers_of_flower(form: Form) -> None:
    check(form)


@pytest.mark.nightly
@pytest.mark.parametrize("form", TORCH, ids=lambda form: form.name)
def test_an_app_of_torch_has_the_numbers_of_flower(form: Form) -> None:
    check(form)
