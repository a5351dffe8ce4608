"""``edge.export.modules.heads``: the head is the layer that computes the output, or the App is refused."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fanin.edge.export import App, Recipe
from fanin.edge.export.module.prepare import prepare
from fanin.protos.errors import UnsupportedModel


class Backwards(nn.Module):
    """A module that calls its layers in another order than it registers them."""

    def __init__(self, *, around: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(())) if around else 1.0
        self.classifier = nn.Linear(16, 4)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.classifier(self.scale * self.body(x))


@pytest.mark.parametrize("around", [False, True])
def test_a_head_that_is_not_the_output_layer_is_refused(around: bool) -> None:
    app = App(name="back", module=Backwards(around=around), calibration=torch.randn(4, 8), batch_size=2, num_classes=4)
    with pytest.raises(
        UnsupportedModel,
        match=r"selects module body.0 \(Linear 8 -> 16\), .* output comes from module classifier \(Linear 16 -> 4\)",
    ):
        prepare(replace(app, recipe=Recipe(trains="head")))
    module = Backwards(around=around)
    body = module.body
    del module.body
    module.body = body.requires_grad_(False)
    assert set(prepare(replace(app, module=module, recipe=Recipe(trains="head"))).learned) == {
        "classifier.bias",
        "classifier.weight",
    }


def test_a_head_inside_a_module_that_has_parameters_itself_is_the_last() -> None:
    class Around(Backwards):
        def __init__(self) -> None:
            super().__init__(around=True)
            self.classifier = self._modules.pop("classifier")

    app = App(name="around", module=Around(), calibration=torch.randn(4, 8), batch_size=2, num_classes=4)
    prepared = prepare(replace(app, recipe=Recipe(trains="head")))
    assert set(prepared.learned) == {"classifier.bias", "classifier.weight"}


def test_a_module_that_fails_on_its_data_is_named() -> None:
    module = nn.Sequential(nn.Linear(8, 4), nn.Linear(5, 4))
    app = App(name="odd", module=module, calibration=torch.randn(4, 8), batch_size=2, num_classes=4)
    with pytest.raises(UnsupportedModel, match="FN-0775"):
        prepare(replace(app, recipe=Recipe(trains="head")))
