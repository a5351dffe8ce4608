"""Writes into a part of a tensor in a forward, with gradients through them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import pytest
import torch
from support.models import app_of, export_bundle
from support.nightly import in_ci
from torch import Tensor, nn

from fanin.edge.export import App
from fanin.edge.export.formats.graphs import FORMATS

Change = Callable[[Tensor], Tensor]


class Written(nn.Module):
    """Two layers with a change of the values between them."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.first, self.head, self.change = nn.Linear(64, 8), nn.Linear(8, 4), change

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(self.change(self.first(x.flatten(1))))
        return logits


def app_with(change: Change) -> App:
    """Return an App of ``Written``, always with the same weights."""
    torch.manual_seed(2)
    return replace(app_of("mlp"), module=Written(change))


def at_integers_and_slices(x: Tensor) -> Tensor:
    """Assign a number, values with a gradient, a slice, and a part of a new tensor."""
    y = x.clone()
    y[:, 2] = 0.0
    y[:, 0] = y[:, 1] * 2.0
    y[..., 3:5] = y[:, -2:].sigmoid()
    y[0:0] = 5.0
    z = torch.zeros(y.shape[0], 2, 4)
    z[:, 1, 1:] = y[:, :3] * y[:, 3:6]
    z[:, 0] = y[:, :4]
    return z.flatten(1)


def of_columns(x: Tensor) -> Tensor:
    """Change a column, a part and a diagonal in place, by numbers and by values with a gradient."""
    y = x.clone()
    y[:, 0] += 1.0
    y[:, 1] *= x[:, 2]
    y[:, 3:6].masked_fill_(x[:, :3] > 0.0, 0.5)
    y[:, :2].copy_(x[:, 2:4] * x[:, 3:5])
    y[:, 6:].relu_()
    squares = y[:, :8].unflatten(1, (2, 4))[..., :2].clone()
    squares.diagonal(dim1=1, dim2=2).add_(y[:, :2])
    return torch.cat([y[:, 4:], squares.flatten(1)], 1)


def with_a_step(x: Tensor) -> Tensor:
    """Assign to every other column."""
    y = x.clone()
    y[:, ::2] = x[:, 1::2] * 2.0
    y[:, 1::4] = 0.0
    return y


def of_a_view(x: Tensor) -> Tensor:
    """Change views of all values, in their order and in another one. The values change, too."""
    y = x * 1.0
    y.unflatten(1, (2, 4))[:, 0] = 0.0
    y.unflatten(1, (2, 4)).transpose(1, 2).mul_(2.0)
    z = y.view(-1, 2, 4)
    z += x.unflatten(1, (2, 4))
    return y


def of_one_after_another(x: Tensor) -> Tensor:
    """Change a view, and then the values, which changes the view."""
    y = x * 1.0
    first = y[:, :4]
    first += 1.0
    y *= 2.0
    return torch.cat([first, y[:, 2:6]], 1)


CHANGES: Final = {
    change.__name__: change
    for change in (at_integers_and_slices, of_columns, with_a_step, of_a_view, of_one_after_another)
}


@pytest.mark.parametrize("name", in_ci(CHANGES, ["of_columns", "of_a_view"]))
@pytest.mark.parametrize("graph_format", in_ci(FORMATS, ["onnx"]))
def test_writes_into_parts_train(name: str, graph_format: str) -> None:
    # An export compares the steps of its graph with eager torch.
    bundle = export_bundle(app_with(CHANGES[name]), (graph_format,))
    assert bundle.manifest.table.num_values == 64 * 8 + 8 + 8 * 4 + 4
