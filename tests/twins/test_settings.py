"""Optimizer settings of a Plan: the train graph against eager torch with the same settings."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from support.models import app_of, batches, export_bundle
from support.nightly import in_ci
from support.remote_runtime import runtime_of
from torch.nn.functional import cross_entropy

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export import Adagrad, Adam, Recipe, RmsProp, Sgd
from fanin.edge.export.vectorized.step import VectorSettings, VectorStep
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import StepSettings

OPTIMIZERS: Mapping[str, tuple[Any, Mapping[str, float]]] = MappingProxyType(
    {
        "sgd": (Sgd(nesterov=True, weight_decay=1e-3), {"momentum": 0.5, "weight_decay": 0.02}),
        "adam": (Adam(weight_decay=1e-3), {"beta1": 0.0, "weight_decay": 0.02}),
        "adamw": (Adam(weight_decay=1e-3, decoupled=True), {"beta1": 0.7, "beta2": 0.99, "weight_decay": 0.1}),
        "rmsprop": (RmsProp(momentum=0.9, weight_decay=1e-3), {"decay": 0.8, "momentum": 0.2, "weight_decay": 0.0}),
        "adagrad": (Adagrad(weight_decay=1e-3), {"weight_decay": 0.05}),
        "plain sgd": (
            Sgd(momentum=0.0, settable=("momentum", "weight_decay")),
            {"momentum": 0.5, "weight_decay": 0.02},
        ),
        "plain adamw": (Adam(decoupled=True, settable=("weight_decay",)), {"weight_decay": 0.1}),
        "plain rmsprop": (RmsProp(settable=("momentum", "weight_decay")), {"momentum": 0.2, "weight_decay": 0.02}),
    }
)
"""An exported optimizer, and the settings of a Plan for it."""


@cache
def bundle_of(name: str, graph_format: str = "onnx") -> Bundle:
    return export_bundle(replace(app_of("mlp"), recipe=Recipe(optimizer=OPTIMIZERS[name][0])), (graph_format,))


CASES = [(name, runtime) for name in OPTIMIZERS for runtime in ("onnx", "litert", "tflite")]


@pytest.mark.parametrize("case", in_ci(CASES, [("adamw", "onnx"), ("plain sgd", "onnx")]))
def test_twenty_steps_with_other_settings_equal_torch(case: tuple[str, str]) -> None:
    name, runtime = case
    optimizer, settings = OPTIMIZERS[name]
    bundle, module, epoch = (
        bundle_of(name, runtime_of(runtime).graph_format),
        app_of("mlp").module,
        list(batches(157, seed=7)),
    )
    step = runtime_of(runtime).open_train(bundle)
    state = step.begin(bundle.initial_parameters())
    parameters = dict(module.named_parameters())
    torch_optimizer = replace(optimizer, **settings).eager(parameters.values(), 0.01)
    for batch in epoch:
        state, _ = step(state, batch, StepSettings(learning_rate=0.01, optimizer=settings))
        num = int(batch.mask.sum())
        torch_optimizer.zero_grad()
        output = module(torch.from_numpy(batch.inputs["x"][:num]))
        cross_entropy(output, torch.from_numpy(batch.y[:num]).long()).backward()
        torch_optimizer.step()
    expected = bundle.manifest.table.flatten({name: value.detach().numpy() for name, value in parameters.items()})
    tolerance = 1e-3 if optimizer.divides else 1e-5
    assert np.all(np.abs(state.parameters - expected) <= tolerance * np.maximum(1.0, np.abs(expected)))
    default_state, _ = step(step.begin(bundle.initial_parameters()), epoch[0], StepSettings(learning_rate=0.01))
    defaults = {name: setting.default for name, setting in bundle.manifest.optimizer.items()}
    explicit_state, _ = step(
        step.begin(bundle.initial_parameters()), epoch[0], StepSettings(learning_rate=0.01, optimizer=defaults)
    )
    assert np.array_equal(default_state.parameters, explicit_state.parameters)


@pytest.mark.parametrize("name", in_ci(["plain sgd", "plain adamw", "plain rmsprop"], ["plain sgd"]))
def test_clients_that_train_together_have_the_settings_of_the_graph(name: str) -> None:
    optimizer, changes = OPTIMIZERS[name]
    bundle, (batch, *_) = bundle_of(name), batches(16, seed=7)
    parameters = bundle.initial_parameters()
    step = open_runtime("onnx").open_train(bundle)
    together = VectorStep(replace(app_of("mlp"), recipe=Recipe(optimizer=optimizer)))
    state, joint_state = step.begin(parameters), together.begin(parameters, 2)
    settings = VectorSettings(
        learning_rates=[0.01] * 2,
        proximal_weight=0.0,
        anchor=parameters,
        controls=[None] * 2,
        random_keys=[0, 1],
        optimizer=changes,
    )
    for _ in range(3):
        state, _ = step(state, batch, StepSettings(learning_rate=0.01, optimizer=changes))
        joint_state, _ = together(joint_state, [batch, batch], settings)
    for values in together.parameters(joint_state):
        assert np.abs(values - state.parameters).max() < 1e-4 * np.abs(state.parameters - parameters).max()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.5}, "got the setting 'beta', expected one of the bundle's optimizer: momentum, weight_decay"),
        ({"momentum": 1.0}, "got momentum 1, expected at least 0 and below 1"),
        ({"momentum": -0.1}, "got momentum -0.1, expected at least 0 and below 1"),
        ({"weight_decay": float("nan")}, "got weight_decay nan, expected at least 0 and below "),
    ],
)
def test_a_setting_that_the_graph_lacks_or_excludes_is_refused(settings: dict[str, float], message: str) -> None:
    bundle = bundle_of("sgd")
    step, (batch, *_) = open_runtime("onnx").open_train(bundle), batches(16, seed=7)
    with pytest.raises(ValueError, match=message):
        step(step.begin(bundle.initial_parameters()), batch, StepSettings(learning_rate=0.01, optimizer=settings))
