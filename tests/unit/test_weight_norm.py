"""Layers with normalized weights: the gradient, compared with torch's kernel, and a model in both formats."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import export_bundle
from support.nightly import in_ci
from torch import nn
from torch.nn.utils import parametrizations

from fanin.edge.export import App
from fanin.edge.export.graph.decompositions.norms import weight_norm_backward

aten = torch.ops.aten


@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), is_last=st.booleans())
def test_the_gradient_equals_torch(shape: list[int], is_last: bool) -> None:
    dim = len(shape) - 1 if is_last else 0
    lengths = [size if index == dim else 1 for index, size in enumerate(shape)]
    v, dw = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    g = torch.randn(lengths, dtype=torch.float64)
    _, norms = aten._weight_norm_interface(v, g, dim)
    gradients = weight_norm_backward(dw, v, g, norms, dim)
    for gradient, expected in zip(gradients, aten._weight_norm_interface_backward(dw, v, g, norms, dim), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("graph_format", in_ci(("onnx", "tflite"), ("onnx",)))
def test_a_convolution_with_a_normalized_weight_is_exported(graph_format: str) -> None:
    torch.manual_seed(0)
    body = parametrizations.weight_norm(nn.Conv1d(2, 4, 3, padding=2, dilation=2))
    app = App(
        name="tcn",
        module=nn.Sequential(body, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 8, 3)),
        calibration=torch.randn(16, 2, 8),
        batch_size=4,
        num_classes=3,
    )
    # The export compares its graphs with eager torch.
    assert set(export_bundle(app, (graph_format,)).manifest.slots) == {graph_format}
