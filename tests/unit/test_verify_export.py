"""The exporter's own check: a graph whose gradient is wrong is refused, however small the gradient is."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from support.models import Mlp, app_of, exported
from support.nightly import nightly_but
from torch import Tensor, nn

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export import Adam, App, Recipe, Sgd
from fanin.edge.export.losses import cross_entropy
from fanin.edge.export.prepare import prepare
from fanin.edge.export.verify import verify
from fanin.edge.runtimes.available import open_runtime
from fanin.protos.errors import UnsupportedModel

RECIPES = {"sgd": Recipe(optimizer=Sgd()), "momentum": Recipe(), "adam": Recipe(optimizer=Adam())}


class Steeper(Mlp):
    """The perceptron with the same outputs, and with the last weight's gradient times a factor."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, classes)."""
        flat, first, relu, last = self
        weight = self.factor * last.weight + (1.0 - self.factor) * last.weight.detach()
        return nn.functional.linear(relu(first(flat(x))), weight, last.bias)


def small_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose gradients are about 1e-5, a tenth of what an absolute tolerance of 1e-4 lets pass."""
    return 1e-4 * cross_entropy(outputs, targets)


@cache
def case(name: str) -> tuple[App, Bundle]:
    """The App with a recipe, and its Bundle."""
    app = replace(app_of("mlp"), loss=small_loss, recipe=RECIPES[name])
    return app, exported(app)


def check(name: str, factor: float) -> None:
    """Hold the exported graphs to eager torch with another gradient."""
    app, bundle = case(name)
    prepared = prepare(app)
    eager = Steeper()
    eager.load_state_dict(prepared.eager.state_dict())
    eager.factor = factor
    verify(replace(prepared, eager=eager), bundle, open_runtime("onnx"), open_runtime("onnx", plain=True))


@pytest.mark.parametrize("name", nightly_but(RECIPES, ("sgd",)))
def test_a_right_gradient_passes(name: str) -> None:
    check(name, 1.0)


@pytest.mark.parametrize("name", nightly_but(RECIPES, ("sgd",)))
@pytest.mark.parametrize("factor", [1.5, 0.99, 0.0])
def test_a_wrong_gradient_is_refused_however_small(name: str, factor: float) -> None:
    with pytest.raises(UnsupportedModel, match=r"train step: the next \S*3\.weight.* differs from torch's"):
        check(name, factor)


@pytest.mark.nightly
def test_a_gradient_of_rounding_alone_passes() -> None:
    # A bias before a batch norm has no gradient but rounding: there is nothing to compare.
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    assert exported(replace(app_of("mlp"), module=module)).manifest.table.num_values > 0
