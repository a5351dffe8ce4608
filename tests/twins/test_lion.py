"""Lion in exported graphs, against algorithm 2 of its paper, and wrong variants of Lion, which the export refuses."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.models import app_of, batches, export_bundle
from support.mutants import verify_traced
from support.nightly import in_ci
from support.remote_runtime import runtime_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export import App, Lion, Recipe
from fanin.edge.export.app.optimizers.optimizer import StepInputs, Tensors
from fanin.edge.export.graph.decompositions.tables import ONNX
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import StepSettings
from fanin.edge.runtimes.graphs import optimizer_table, state_port
from fanin.protos.errors import UnsupportedModel

RATE = 0.002
MAX_DIFFERENT = 1e-3
"""Share of the values that may differ, because the sign of a number near zero depends on the order of additions."""
Arrays = dict[str, npt.NDArray[np.float64]]


@cache
def lion_bundle(runtime: str) -> Bundle:
    recipe = Recipe(optimizer=Lion(weight_decay=1e-3))
    return export_bundle(replace(app_of("mlp"), recipe=recipe), (runtime_of(runtime).graph_format,))


def algorithm_2(module: nn.Module, settings: Mapping[str, float]) -> Arrays:
    """Return the parameters after twenty steps. The names are those of the paper: theta, m, c, eta and lambda."""
    theta = {name: value.detach().numpy().astype(np.float64) for name, value in module.named_parameters()}
    m = {name: np.zeros_like(value) for name, value in theta.items()}
    for batch in batches(157, seed=7):
        num = int(batch.mask.sum())
        module.load_state_dict({name: torch.from_numpy(value).float() for name, value in theta.items()})
        loss = cross_entropy(module(torch.from_numpy(batch.inputs["x"][:num])), torch.from_numpy(batch.y[:num]).long())
        for (name, _), part in zip(
            module.named_parameters(), torch.autograd.grad(loss, list(module.parameters())), strict=True
        ):
            g = part.numpy().astype(np.float64)
            c = settings["beta1"] * m[name] + (1 - settings["beta1"]) * g
            theta[name] = theta[name] - RATE * (np.sign(c) + settings["weight_decay"] * theta[name])
            m[name] = settings["beta2"] * m[name] + (1 - settings["beta2"]) * g
    return theta


@pytest.mark.parametrize("settings", [{}, {"beta1": 0.5, "beta2": 0.9, "weight_decay": 0.5}], ids=["own", "plan"])
@pytest.mark.parametrize("runtime", in_ci(("onnx", "litert", "tflite"), ("onnx",)))
def test_twenty_steps_are_those_of_algorithm_2(runtime: str, settings: dict[str, float]) -> None:
    bundle = lion_bundle(runtime)
    step = runtime_of(runtime).open_train(bundle)
    state = step.begin(bundle.initial_parameters())
    for batch in batches(157, seed=7):
        state, _ = step(state, batch, StepSettings(learning_rate=RATE, optimizer=settings))
    module = app_of("mlp").module
    expected = algorithm_2(module, {"beta1": 0.9, "beta2": 0.99, "weight_decay": 1e-3} | settings)
    flat = bundle.manifest.table.flatten({name: value.astype(np.float32) for name, value in expected.items()})
    error = np.abs(state.parameters - flat)
    assert np.mean(error > 1e-6) <= MAX_DIFFERENT
    assert error.max() <= 2 * RATE * 20
    assert np.abs(flat - bundle.initial_parameters()).mean() > RATE


@pytest.mark.parametrize("runtime", in_ci(("onnx", "litert", "tflite"), ("onnx",)))
def test_a_sign_of_zero_moves_nothing(runtime: str) -> None:
    bundle = lion_bundle(runtime)
    step = runtime_of(runtime).open_train(bundle)
    batch = next(iter(batches(16, seed=7)))
    start = step.begin(bundle.initial_parameters())
    settings = StepSettings(learning_rate=RATE, optimizer={"weight_decay": 0.0})
    state, _ = step(start, replace(batch, mask=np.zeros_like(batch.mask)), settings)
    np.testing.assert_array_equal(state.parameters, start.parameters)


@pytest.mark.parametrize("runtime", in_ci(("onnx", "litert"), ("onnx",)))
def test_a_gradient_that_is_no_number_reaches_the_parameter(runtime: str) -> None:
    bundle = lion_bundle(runtime)
    step = runtime_of(runtime).open_train(bundle)
    batch = next(iter(batches(16, seed=7)))
    start, settings = step.begin(bundle.initial_parameters()), StepSettings(learning_rate=RATE)
    states = optimizer_table(bundle.manifest)
    means = {name: np.zeros(view.shape, np.float32) for name, view in states.views(start.optimizer).items()}
    means[state_port("mean", "3.bias")][0] = np.nan
    state, _ = step(replace(start, optimizer=states.flatten(means)), batch, settings)
    bias = bundle.manifest.table.views(state.parameters)["3.bias"]
    assert np.isnan(bias).tolist() == [True, False, False, False]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongLion(Lion):
    """Lion with one typical mistake in its two means."""

    mistake: str

    def move(
        self, value: Tensor, gradient: Tensor, state: Mapping[str, Tensor], inputs: StepInputs
    ) -> tuple[Tensor, Tensors]:
        """Compute the step with the mistake."""
        settings, mean = inputs.settings, state["mean"]
        beta1, beta2 = settings["beta1"], settings["beta2"]
        rest1, rest2, decay = settings["beta1.complement"], settings["beta2.complement"], settings["weight_decay"]
        next_mean = beta2 * mean + rest2 * gradient
        direction = beta1 * mean + rest1 * gradient
        match self.mistake:
            case "betas exchanged":
                direction, next_mean = next_mean, direction
            case "along the gradient alone":
                direction = gradient + 0.0 * direction
            case "along the next mean":
                direction = beta1 * next_mean + rest1 * gradient
            case "coupled decay":
                direction = direction + decay * value
        new_value = value - inputs.learning_rate * torch.sign(direction)
        if self.mistake != "coupled decay":
            new_value = new_value - inputs.learning_rate * decay * value
        return new_value, {"mean": next_mean}


def lion_app(optimizer: Lion) -> App:
    return replace(app_of("mlp"), recipe=Recipe(optimizer=optimizer))


@pytest.mark.parametrize(
    "mistake", ["betas exchanged", "along the gradient alone", "along the next mean", "coupled decay"]
)
def test_a_wrong_lion_is_refused(mistake: str) -> None:
    optimizer = WrongLion(weight_decay=0.1, mistake=mistake)
    with pytest.raises(UnsupportedModel, match="FN-0789"):
        verify_traced(lion_app(optimizer), lion_app(Lion(weight_decay=0.1)), ONNX)
    verify_traced(lion_app(WrongLion(weight_decay=0.1, mistake="")), lion_app(Lion(weight_decay=0.1)), ONNX)


@pytest.mark.nightly
def test_a_large_layer_passes_although_some_signs_depend_on_rounding() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh())
    module.append(nn.Linear(1024, 4))
    bundle = export_bundle(replace(lion_app(Lion()), module=module))
    assert bundle.manifest.table.num_values > 1_000_000
    assert open_runtime("onnx").open_train(bundle)
