"""Factors of the learning rate against the parameter groups of ``torch.optim``."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.models import app_of, batches, export_bundle
from torch.nn.functional import cross_entropy

from fanin.edge.export import Adam, Recipe, Sgd
from fanin.edge.export.app.optimizers.optimizer import Optimizer
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import StepSettings

RATES = {"1.bias": 0.0125, "1.weight": 0.0125, "3.bias": 0.05, "3.weight": 0.2}


@pytest.mark.parametrize(
    ("optimizer", "twin"),
    [
        (Sgd(momentum=0.9), torch.optim.SGD),
        pytest.param(Adam(), torch.optim.Adam, marks=pytest.mark.nightly),
    ],
)
def test_twenty_steps_are_those_of_parameter_groups(optimizer: Optimizer, twin: type[torch.optim.Optimizer]) -> None:
    recipe = Recipe(optimizer=optimizer, rates={"1.*": 0.25, "3.weight": 4.0}, clip_norm=0.8)
    app = replace(app_of("mlp"), recipe=recipe)
    bundle, module, epoch = export_bundle(app), app_of("mlp").module, list(batches(157, seed=7))
    step = open_runtime("onnx").open_train(bundle)
    state = step.begin(bundle.initial_parameters())
    parameters = dict(module.named_parameters())
    momentum = {"momentum": 0.9} if twin is torch.optim.SGD else {}
    torch_optimizer = twin([{"params": [parameters[name]], "lr": rate} for name, rate in RATES.items()], **momentum)
    for batch in epoch:
        state, _ = step(state, batch, StepSettings(learning_rate=0.05))
        num = int(batch.mask.sum())
        torch_optimizer.zero_grad()
        cross_entropy(
            module(torch.from_numpy(batch.inputs["x"][:num])), torch.from_numpy(batch.y[:num]).long()
        ).backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 0.8)
        torch_optimizer.step()
    expected = bundle.manifest.table.flatten({name: value.detach().numpy() for name, value in parameters.items()})
    tolerance = 1e-5 if momentum else 1e-3
    assert np.all(np.abs(state.parameters - expected) <= tolerance * np.maximum(1.0, np.abs(expected)))
