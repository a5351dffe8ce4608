"""A traced graph freezes values of its forward: random draws and counters that a step would change are refused."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F

from fanin.edge.bundles.keys import SigningKey
from fanin.edge.export import App, export
from fanin.edge.export.build import UNMEASURED
from fanin.protos.errors import UnsupportedModel

KEY = SigningKey(bytes(32))
GENERATOR = np.random.default_rng(0)


class Own(nn.Module):
    """A custom layer between two of torch's layers."""

    def __init__(self, function: "Callable[[Own, Tensor], Tensor]") -> None:
        super().__init__()
        self.function, self.num_calls = function, 0

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function."""
        return self.function(self, x)


def counting(layer: Own, x: Tensor) -> Tensor:
    layer.num_calls += 1
    return x * layer.num_calls


def noisy(layer: Own, x: Tensor) -> Tensor:
    return x + torch.randn_like(x) if layer.training else x


def app(function: Callable[[Own, Tensor], Tensor] = lambda _, x: x) -> App:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(10, 6), Own(function), nn.Linear(6, 3))
    return App(name="pure", module=module, calibration=torch.rand(32, 10), batch_size=8, num_classes=3)


def per_sample(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none")


def contrastive(logits: Tensor, y: Tensor) -> Tensor:
    return per_sample(logits @ logits.T, torch.arange(len(logits))) + 0.0 * y


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda _, x: x * random.random(), r"module 1 \(Own\) draws from Python's random, and the graph would keep"),
        (lambda _, x: torch.relu(x) if random.random() < 0.5 else x, r"draws from Python's random"),
        (lambda _, x: x * np.random.rand(), r"module 1 \(Own\) draws from numpy\.random"),
        (lambda _, x: x * GENERATOR.random(), r"module 1 \(Own\) returns two results for one batch"),
        (counting, r"module 1 \(Own\) returns two results for one batch"),
        (lambda _, x: x - x.mean(0), r"the output of a sample depends on the other samples of its batch; compute it"),
    ],
)
def test_a_value_that_a_graph_would_keep_is_refused(
    function: Callable[[Own, Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=message) as excinfo:
        export(app(function), tmp_path / "bundle", KEY, ["onnx"])
    assert "please report" not in str(excinfo.value)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (contrastive, "the loss of a sample depends on the other samples of its batch; compute it from that sample"),
        (
            lambda logits, y: per_sample(logits, y) * random.random(),
            "its forward or its loss draws from Python's random",
        ),
    ],
)
def test_a_loss_with_such_a_value_is_refused(
    loss: Callable[[Tensor, Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        export(replace(app(), loss=loss), tmp_path / "bundle", KEY, ["onnx"])


def test_a_forgotten_number_of_classes_is_named(tmp_path: Path) -> None:
    forgetful = replace(app(), num_classes=0, loss=lambda logits, y: F.nll_loss(logits, y, reduction="none"))
    with pytest.raises(UnsupportedModel, match="if the output has the logits of classes, set num_classes=3 in the App"):
        export(forgetful, tmp_path / "bundle", KEY, ["onnx"])


def test_draws_of_torch_and_checks_of_its_distributions_are_no_hindrance(tmp_path: Path) -> None:
    def likelihood(output: Tensor, y: Tensor) -> Tensor:
        scale = F.softplus(output[:, 1]) + 0.1
        return -Normal(output[:, 0], scale).log_prob(output[:, 2]) + per_sample(output, y)

    exported = export(replace(app(noisy), loss=likelihood), tmp_path / "bundle", KEY, ["onnx"])
    assert exported.notes == ("a device draws 192 bytes of random numbers for each train step", UNMEASURED)
    assert torch.distributions.Distribution._validate_args


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_module_that_learnt_nothing_is_noted(is_trained: bool, tmp_path: Path) -> None:
    trained = app()
    x = trained.inputs["x"]
    y = torch.arange(32) % 3
    if is_trained:
        with torch.no_grad():
            y = trained.module(x).argmax(1)
    exported = export(replace(trained, validation=(x, y)), tmp_path / "bundle", KEY, ["onnx"])
    notes = [note for note in exported.notes if "it seems not to be trained" in note]
    assert len(notes) == (0 if is_trained else 1), exported.notes


def test_a_module_in_evaluation_mode_is_noted(tmp_path: Path) -> None:
    plain = app()
    module = nn.Sequential(plain.module, nn.Dropout(0.5)).eval()
    exported = export(replace(plain, module=module), tmp_path / "bundle", KEY, ["onnx"])
    assert exported.notes[0] == (
        "the module is in evaluation mode, and its layers Dropout stay so while devices train; call .train() on it to "
        "change that"
    )
