"""Padding with an image's own values, written as slices: the result and the gradient equal torch's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from fanin.edge.export.formats.graphs import FORMATS
from fanin.edge.export.graph.decompositions import padding, resampling
from fanin.edge.export.graph.layers import trace_layer

SIDES = st.tuples(*(st.integers(0, 3) for _ in range(4)))


@given(sides=SIDES, size=st.tuples(st.integers(4, 6), st.integers(4, 6)), num=st.sampled_from([1, 2]))
@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_padding_equals_torch(mode: str, sides: tuple[int, ...], size: tuple[int, int], num: int) -> None:
    shape, widths = (2, 3, *size)[: 2 + num], list(sides[: 2 * num])
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected = functional.pad(x, widths, mode)
    result = padding.pad(x, widths, mode)
    assert isinstance(result, torch.Tensor)
    assert torch.equal(result, expected)
    dy = torch.randn_like(expected)
    (gradient,) = torch.autograd.grad(expected, x, dy)
    backward = padding.reflection_pad_backward if mode == "reflect" else resampling.replication_pad_backward
    torch.testing.assert_close(backward(dy, x, widths), gradient, rtol=1e-12, atol=1e-12)


def test_other_padding_is_unchanged() -> None:
    assert padding.pad(torch.zeros(1, 1, 3), [1, 1]) is NotImplemented


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_a_convolution_with_such_padding_has_a_form_in_tflite(mode: str) -> None:
    layer = torch.nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode)
    tflite = FORMATS["tflite"]
    graph = trace_layer(layer, [torch.randn(2, 2, 5, 4)], tflite.forms, "Conv2d", {})
    assert tflite.encode("layer", graph, "Conv2d")
