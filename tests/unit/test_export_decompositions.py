"""Our backward forms against torch's own kernels, in float64."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fanin.edge.export.decompositions import (
    adaptive_avg_pool2d_backward,
    avg_pool2d_backward,
    convolution_backward,
    max_pool2d_backward,
)
from fanin.protos.errors import UnsupportedModel

aten = torch.ops.aten
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[object, ...]:
    """x, weight and constants of a convolution of one or two dimensions."""
    dims = draw(st.integers(1, 2))
    groups = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["plain", "depthwise", "transposed"]))
    ins, outs = (1, 1) if kind == "depthwise" else (draw(st.integers(1, 3)), draw(st.integers(1, 3)))

    def each(low: int, high: int) -> list[int]:
        return [draw(st.integers(low, high)) for _ in range(dims)]

    size, kernel, stride, padding, dilation = each(1, 8), each(1, 3), each(1, 3), each(0, 2), each(1, 2)
    for have, taps, pad, step in zip(size, kernel, padding, dilation, strict=True):
        assume(have + 2 * pad >= step * (taps - 1) + 1)
    extra = [draw(st.integers(0, step - 1)) for step in stride] if kind == "transposed" else [0] * dims
    if kind == "transposed":
        for have, taps, pad, step, dil in zip(size, kernel, padding, stride, dilation, strict=True):
            assume((have - 1) * step - 2 * pad + dil * (taps - 1) + 1 > 0)
    torch.manual_seed(draw(st.integers(0, 1000)))
    x = torch.randn(draw(st.integers(1, 3)), groups * ins, *size, dtype=torch.float64)
    rows = (groups * ins, outs) if kind == "transposed" else (groups * outs, ins)
    weight = torch.randn(*rows, *kernel, dtype=torch.float64)
    return x, weight, stride, padding, dilation, kind == "transposed", extra, groups


@settings(deadline=None)
@given(case=convolutions())
def test_gradients_of_a_convolution(case: tuple[object, ...]) -> None:
    x, weight, *form = case
    y = aten.convolution(x, weight, None, *form)
    dy = torch.randn_like(y)
    arguments = (dy, x, weight, [y.shape[1]], *form, [True, True, True])
    for got, expected in zip(convolution_backward(*arguments), aten.convolution_backward(*arguments), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


@settings(deadline=None)
@given(
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.one_of(st.just(()), st.tuples(st.integers(1, 3), st.integers(1, 3))),
    share=st.tuples(st.integers(0, 1), st.booleans(), st.sampled_from([None, 2])),
    size=st.tuples(st.integers(3, 8), st.integers(3, 8)),
)
def test_gradient_of_an_average_pool(
    kernel: tuple[int, int], stride: tuple[int, ...], share: tuple[int, bool, int | None], size: tuple[int, int]
) -> None:
    pad, counts_padding, divisor = share
    padding = [min(pad, taps // 2) for taps in kernel]
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    form = (list(kernel), list(stride), padding, False, counts_padding, divisor)
    dy = torch.randn_like(aten.avg_pool2d(x, *form))
    torch.testing.assert_close(avg_pool2d_backward(dy, x, *form), aten.avg_pool2d_backward(dy, x, *form), **CLOSE)


@settings(deadline=None)
@given(
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.one_of(st.just(()), st.tuples(st.integers(1, 3), st.integers(1, 3))),
    pad=st.integers(0, 1),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    levels=st.integers(1, 50),
)
def test_gradient_of_a_max_pool_goes_to_the_first_maximum(
    kernel: tuple[int, int], stride: tuple[int, ...], pad: int, dilation: tuple[int, int], levels: int
) -> None:
    # Few levels make many ties.
    x = torch.randint(0, levels, (2, 3, 7, 6)).to(torch.float64)
    form = (list(kernel), list(stride), [min(pad, taps // 2) for taps in kernel], list(dilation), False)
    y, indices = aten.max_pool2d_with_indices(x, *form)
    dy = torch.randn_like(y)
    expected = aten.max_pool2d_with_indices_backward(dy, x, *form, indices)
    torch.testing.assert_close(max_pool2d_backward(dy, x, *form, indices), expected, **CLOSE)


def test_gradient_of_an_adaptive_average_pool() -> None:
    x = torch.randn(2, 3, 8, 6, dtype=torch.float64)
    dy = torch.randn(2, 3, 4, 3, dtype=torch.float64)
    expected = aten._adaptive_avg_pool2d_backward(dy, x)
    torch.testing.assert_close(adaptive_avg_pool2d_backward(dy, x), expected, **CLOSE)


def test_pools_whose_windows_differ_are_refused() -> None:
    x, dy = torch.randn(1, 1, 5, 5), torch.randn(1, 1, 2, 2)
    with pytest.raises(UnsupportedModel, match="expected sizes that divide each other"):
        adaptive_avg_pool2d_backward(dy, x)
    with pytest.raises(UnsupportedModel, match="avg_pool2d: got ceil_mode=True"):
        avg_pool2d_backward(dy, x, [2, 2], [2, 2], [0, 0], True, True, None)
    with pytest.raises(UnsupportedModel, match="max_pool2d: got ceil_mode=True"):
        max_pool2d_backward(dy, x, [2, 2], [2, 2], [0, 0], [1, 1], True, dy)
