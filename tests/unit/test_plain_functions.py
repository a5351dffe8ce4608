"""Bags of embeddings, ``one_hot`` and LSTMs on devices: plain forms compared with torch's, and exported models."""

from typing import Literal

import pytest
import torch
from support.models import export_bundle
from support.nightly import in_ci
from torch import Tensor, nn
from torch.nn.functional import one_hot

from fanin.edge.export import App
from fanin.edge.export.module.plain.functions import PlainFunctions

Mode = Literal["sum", "mean", "max"]
NUM_WORDS = 7


def values_and_gradients(bag: nn.EmbeddingBag, words: Tensor, weights: Tensor | None) -> tuple[Tensor, ...]:
    parts = [bag.weight, *(() if weights is None else (weights,))]
    values = bag(words, None, weights)
    return (values, *torch.autograd.grad(values.square().sum(), parts))


@pytest.mark.parametrize(
    ("mode", "padding_idx", "is_weighted"),
    [
        *(("sum", None, False), ("sum", 2, False), ("sum", 2, True)),
        *(("mean", None, False), ("mean", 2, False), ("max", None, False)),
    ],
)
def test_the_plain_form_of_a_bag_equals_torch(mode: Mode, padding_idx: int | None, is_weighted: bool) -> None:
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(NUM_WORDS, 3, mode=mode, padding_idx=padding_idx, dtype=torch.float64)
    # The last bag has only padding, and the others have repeated words.
    words = torch.randint(0, NUM_WORDS, (5, 9))
    words[-1] = 2
    weights = torch.randn(5, 9, dtype=torch.float64, requires_grad=True) if is_weighted else None
    expected = values_and_gradients(bag, words, weights)
    with PlainFunctions():
        torch.testing.assert_close(values_and_gradients(bag, words, weights), expected, rtol=1e-10, atol=1e-10)
        traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x: bag(x, None, weights))(words)
    assert not [node for node in traced.graph.nodes if "bag" in str(node.target)]


@pytest.mark.parametrize("arguments", [{"mode": "max", "padding_idx": 2}, {"scale_grad_by_freq": True}])
def test_other_bags_are_left_to_torch(arguments: dict[str, object]) -> None:
    bag = nn.EmbeddingBag(NUM_WORDS, 3, **arguments)  # type: ignore[arg-type]  # one of two sets of arguments
    words = torch.randint(0, NUM_WORDS, (5, 9))
    with PlainFunctions():
        traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x: bag(x))(words)
    assert [node for node in traced.graph.nodes if "bag" in str(node.target)]


@pytest.mark.parametrize("mode", in_ci(("mean", "sum", "max"), ("mean",)))
@pytest.mark.parametrize("graph_format", in_ci(("onnx", "tflite"), ("onnx",)))
def test_a_model_of_bags_is_exported(mode: Mode, graph_format: str) -> None:
    torch.manual_seed(0)
    app = App(
        name="bags",
        module=nn.Sequential(nn.EmbeddingBag(NUM_WORDS, 8, mode=mode), nn.Linear(8, 3)),
        calibration=torch.randint(0, NUM_WORDS, (16, 5), dtype=torch.int32),
        batch_size=4,
        num_classes=3,
    )
    # The export compares its graphs with eager torch, which runs its own kernels.
    assert export_bundle(app, (graph_format,)).manifest.num_tokens == {"x": NUM_WORDS}


class Gated(nn.Module):
    """Two layers and a gate that selects one of them for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.layers = nn.Linear(6, 2), nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, 3)."""
        shares = self.gate(x).softmax(dim=-1)
        selected = shares * one_hot(shares.argmax(dim=-1), num_classes=2)
        return (selected.unsqueeze(-1) * torch.stack([layer(x) for layer in self.layers], dim=1)).sum(dim=1)


def test_the_plain_form_of_one_hot_equals_torch() -> None:
    classes = torch.tensor([[0, 3], [1, 4]])
    expected = one_hot(classes, 5)
    with PlainFunctions():
        torch.testing.assert_close(one_hot(classes, num_classes=5), expected, rtol=0, atol=0)
        torch.testing.assert_close(one_hot(classes), expected, rtol=0, atol=0)


@pytest.mark.parametrize("graph_format", in_ci(("onnx", "tflite"), ("onnx",)))
def test_a_model_that_selects_by_one_hot_is_exported(graph_format: str) -> None:
    torch.manual_seed(0)
    app = App(name="gated", module=Gated(), calibration=torch.randn(16, 6), batch_size=4, num_classes=3)
    assert export_bundle(app, (graph_format,)).manifest.num_classes == 3


class LastState(nn.Module):
    """The last state of an LSTM over two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, 3)."""
        states, _ = self.cell(x)
        return self.head(states[:, -1])


@pytest.mark.parametrize("graph_format", in_ci(("onnx", "tflite"), ("onnx",)))
def test_an_lstm_is_exported_without_onednn(graph_format: str) -> None:
    torch.manual_seed(0)
    app = App(name="lstm", module=LastState(), calibration=torch.randn(16, 2, 3), batch_size=4, num_classes=3)
    assert export_bundle(app, (graph_format,)).manifest.num_classes == 3
