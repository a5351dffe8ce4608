"""Assignments to a part of a tensor in a forward, with gradients through them."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.models import app_of, export_bundle
from torch import Tensor, nn

from fanin.edge.export import App
from fanin.edge.export.module.plain.writing import write_at
from fanin.protos.errors import UnsupportedModel

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


def several_writes(x: Tensor) -> Tensor:
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


@pytest.mark.parametrize("graph_format", ["onnx", pytest.param("tflite", marks=pytest.mark.nightly)])
def test_writes_at_integers_and_slices_train(graph_format: str) -> None:
    # An export compares the steps of its graph with eager torch.
    assert export_bundle(app_with(several_writes), (graph_format,)).manifest.table.num_values == 64 * 8 + 8 + 8 * 4 + 4


def test_values_are_written_as_in_torch() -> None:
    for shape in ((), (4,), (1, 4), (1, 1, 4)):
        expected, y = torch.zeros(4, 3), torch.zeros(4, 3, requires_grad=True).clone()
        expected[:, 0] = torch.ones(shape)
        assert write_at(y, (slice(None), 0), torch.ones(shape))
        assert torch.equal(y, expected)


def test_values_of_another_shape_are_an_error_as_in_torch() -> None:
    y = torch.zeros(4, 3, requires_grad=True).clone()
    for shape in ((2, 4), (3,)):
        with pytest.raises(RuntimeError, match="size"):
            write_at(y, (slice(None), 0), torch.ones(shape))


def adds_to_a_column(x: Tensor) -> Tensor:
    """Change a view in place."""
    y = x.clone()
    y[:, 0] += 1.0
    return y


def writes_to_a_view(x: Tensor) -> Tensor:
    """Assign to a view."""
    x.unflatten(1, (2, 4))[:, 0] = 0.0
    return x


def writes_with_a_step(x: Tensor) -> Tensor:
    """Assign to every other column."""
    y = x.clone()
    y[:, ::2] = 0.0
    return y


@pytest.mark.parametrize(
    ("change", "call"),
    [
        (adds_to_a_column, "add_ to a view, such as y[:, 0]"),
        (writes_to_a_view, "y[key] = values to a view y"),
        (writes_with_a_step, "y[key] = values at a slice with a step"),
    ],
)
def test_a_write_to_a_view_is_refused_with_its_line(change: Change, call: str) -> None:
    line = change.__code__.co_firstlineno + (2 if change is writes_to_a_view else 3)
    message = (
        "App mlp (Written): the train step for onnx cannot be traced: module itself (Written) at "
        f"test_written_parts.py:{line} calls {call}; its gradient has no form in any format; write into a copy "
        "of the whole tensor: "
    )
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        export_bundle(app_with(change))
