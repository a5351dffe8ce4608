"""Values that are not finite inside a module: the export's error names the module and its line, not a graph slot."""

from dataclasses import replace

import pytest
import torch
from support.models import export_bundle
from torch import Tensor, nn

from fanin.edge.export import App
from fanin.edge.export.formats.graphs import FORMATS, graphs_of
from fanin.edge.export.module.prepare import prepare
from fanin.edge.export.verification.ready import check_kept
from fanin.protos.errors import UnsupportedModel


class Divided(nn.Module):
    """A division by a sum that may be 0."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the quotient (n, 4)."""
        return x / x.relu().sum(-1, keepdim=True).clamp(max=0.0)


class Model(nn.Module):
    """A layer, a custom module, and a head."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.body, self.inner, self.head = nn.Linear(4, 4), inner, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, 3)."""
        logits: Tensor = self.head(self.inner(self.body(x)))
        return logits


class InEvaluation(nn.Module):
    """A logarithm of a negative number, in evaluation mode only."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        return x if self.training else torch.log(-x.abs())


class Steep(nn.Module):
    """A function with infinite intermediate values and results between 0 and 1: its gradient is NaN."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        return torch.sigmoid(torch.exp(1000.0 * x))


def app(module: nn.Module, *, factor: float = 1.0) -> App:
    torch.manual_seed(0)
    x = torch.randn(20, 4)
    x[9:] *= factor
    return App(name="a", module=module, calibration=x, batch_size=8, num_classes=3)


def test_a_loss_that_is_not_finite_names_the_module_and_its_line() -> None:
    place = r"module inner \(Divided\) at test_not_finite.py:22 returns infinity, then module head \(Linear\) .*NaN"
    with pytest.raises(UnsupportedModel, match=rf"the loss is not finite on the calibration data; {place}"):
        check_kept(prepare(app(Model(Divided()))))


def test_an_output_in_evaluation_that_is_not_finite_names_the_module_and_its_line() -> None:
    place = r"module inner \(InEvaluation\) at test_not_finite.py:43 returns NaN"
    with pytest.raises(UnsupportedModel, match=rf"output in evaluation is not finite on the calibration data; {place}"):
        check_kept(prepare(app(Model(InEvaluation()))))


def test_each_calibration_sample_is_checked() -> None:
    # Only the last four samples overflow, and they do not fill a batch.
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    nn.init.ones_(module[0].weight)
    large_app = app(module)
    large_app.inputs["x"][16:] = 3e38
    with pytest.raises(
        UnsupportedModel, match=r"in evaluation is not finite .*; module \d \(Linear\) returns infinity"
    ):
        check_kept(prepare(large_app))


def test_a_gradient_that_is_not_finite_in_torch_names_the_line_and_no_defect_of_the_export() -> None:
    place = r"of module body \(Linear\) is not finite in torch either: module inner \(Steep\) at test_not_finite.py:51"
    with pytest.raises(UnsupportedModel, match=rf"{place} returns infinity, expected finite gradients; keep"):
        export_bundle(app(Model(Steep())))


def test_values_too_large_for_int8_name_the_module_that_receives_them() -> None:
    with pytest.raises(UnsupportedModel, match=r"module 0 \(Linear\) receives values of up to about .*e\+3\d on the"):
        graphs_of(
            prepare(app(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), factor=1e34)), FORMATS["onnx"]
        )


def test_values_too_small_for_int8_name_the_module_that_receives_them() -> None:
    small = app(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)))
    small = replace(small, calibration=1e-30 * torch.randn(20, 4))
    with pytest.raises(UnsupportedModel, match=r"module 0 \(Linear\) receives values of up to about .*e-\d\d on the"):
        graphs_of(prepare(small), FORMATS["onnx"])
