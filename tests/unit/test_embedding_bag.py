"""Bags of embeddings train on devices: the plain form against torch's kernel, and models in both formats."""

from typing import Literal

import pytest
import torch
from support.models import exported
from support.nightly import nightly_but
from torch import Tensor, nn

from fanin.edge.export import App
from fanin.edge.export.modules.bags import PlainBags

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
def test_the_plain_form_is_torchs(mode: Mode, padding_idx: int | None, is_weighted: bool) -> None:
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(NUM_WORDS, 3, mode=mode, padding_idx=padding_idx, dtype=torch.float64)
    # The last bag has padding alone, and the others have words twice.
    words = torch.randint(0, NUM_WORDS, (5, 9))
    words[-1] = 2
    weights = torch.randn(5, 9, dtype=torch.float64, requires_grad=True) if is_weighted else None
    expected = values_and_gradients(bag, words, weights)
    with PlainBags():
        torch.testing.assert_close(values_and_gradients(bag, words, weights), expected, rtol=1e-10, atol=1e-10)
        traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x: bag(x, None, weights))(words)
    assert not [node for node in traced.graph.nodes if "bag" in str(node.target)]


@pytest.mark.parametrize("arguments", [{"mode": "max", "padding_idx": 2}, {"scale_grad_by_freq": True}])
def test_other_bags_are_left_to_torch(arguments: dict[str, object]) -> None:
    bag = nn.EmbeddingBag(NUM_WORDS, 3, **arguments)  # type: ignore[arg-type]  # one of two sets of arguments
    words = torch.randint(0, NUM_WORDS, (5, 9))
    with PlainBags():
        traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x: bag(x))(words)
    assert [node for node in traced.graph.nodes if "bag" in str(node.target)]


@pytest.mark.parametrize("mode", nightly_but(("mean", "sum", "max"), ("mean",)))
@pytest.mark.parametrize("graph_format", nightly_but(("onnx", "tflite"), ("onnx",)))
def test_a_model_of_bags_is_exported(mode: Mode, graph_format: str) -> None:
    torch.manual_seed(0)
    app = App(
        name="bags",
        module=nn.Sequential(nn.EmbeddingBag(NUM_WORDS, 8, mode=mode), nn.Linear(8, 3)),
        calibration=torch.randint(0, NUM_WORDS, (16, 5), dtype=torch.int32),
        batch_size=4,
        num_classes=3,
    )
    # The export compares its graphs with eager torch, which runs its own kernel.
    assert exported(app, (graph_format,)).manifest.num_tokens == {"x": NUM_WORDS}
