"""Operators in place: each trains and predicts where its plain form does."""

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Final

import pytest
import torch
from support.models import export_bundle
from support.nightly import in_ci
from torch import Tensor, nn

from fanin.edge.export import App, BatchLoss
from fanin.edge.export.formats.graphs import FORMATS

CALIBRATION: Final = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
POSITIONS: Final = torch.tensor([0, 2, 2, 1])
IN_PLACE: Final[Sequence[Callable[[Tensor], Tensor]]] = (
    lambda x: x.pow_(2),
    lambda x: x.pow_(torch.full((4,), 1.5)),
    lambda x: x.__ipow__(3),
    lambda x: x.square_(),
    lambda x: x.add_(1.0).sub_(0.5).mul_(2.0).div_(3.0).neg_(),
    lambda x: x.remainder_(0.4).fmod_(0.3),
    *map(
        methodcaller,
        (
            "exp_",
            "log_",
            "sqrt_",
            "rsqrt_",
            "reciprocal_",
            "sin_",
            "cos_",
            "tanh_",
            "sigmoid_",
            "erf_",
            "erfc_",
            "expm1_",
            "log1p_",
            "abs_",
        ),
    ),
    lambda x: x.clamp_(0.3, 0.6).clip_(0.35).clamp_min_(0.4).clamp_max_(0.55),
    lambda x: x.addcmul_(x.detach() * 2.0, torch.ones(4)).addcdiv_(torch.ones(4), torch.full((4,), 3.0)),
    lambda x: x.lerp_(torch.ones(4), 0.3).atan2_(torch.full((4,), 2.0)),
    lambda x: x.masked_fill_(POSITIONS > 1, 0.5),
    lambda x: x.cumsum_(1).div_(4.0).clone().cumprod_(1),
    lambda x: torch.zeros(len(x), 4).scatter_add_(1, POSITIONS.expand(x.shape[0], 4), x),
    lambda x: torch.zeros(len(x), 4).index_add_(1, POSITIONS, x),
)


class InPlace(nn.Module):
    """Arithmetic in place, on a copy of a hidden value for each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 4), nn.Linear(4 * len(IN_PLACE), 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of (B, 8)."""
        hidden = 0.2 + 0.5 * torch.sigmoid(self.first(x))
        logits: Tensor = self.head(torch.cat([change(hidden.clone()) for change in IN_PLACE], 1))
        return logits


@pytest.mark.parametrize("graph_format", in_ci(FORMATS, ["onnx"]))
def test_operators_in_place_are_exported_and_verified(graph_format: str) -> None:
    torch.manual_seed(1)
    app = App(name="a", module=InPlace(), calibration=CALIBRATION, batch_size=4, num_classes=4)
    # An export compares the steps and the predictions of its graphs with eager torch.
    assert export_bundle(app, (graph_format,)).manifest.table.num_values > 0


@pytest.mark.parametrize("graph_format", FORMATS)
def test_a_loss_in_place_trains(graph_format: str) -> None:
    def loss(output: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        kept = output * mask.unsqueeze(1)
        return torch.diagonal(kept.T @ kept / mask.sum()).add_(-1).pow_(2).sum()

    torch.manual_seed(1)
    app = App(
        name="a",
        module=nn.Linear(8, 3),
        calibration=CALIBRATION,
        batch_size=4,
        loss=BatchLoss(loss),
        targets=torch.zeros(40, 1),
    )
    assert export_bundle(app, (graph_format,)).manifest.table.num_values > 0
