"""fanin's portable decompositions, compared with torch's kernels in float64."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.convolutions import Convolution, convolutions

from fanin.edge.export.graph.decompositions import elementwise, selection
from fanin.edge.export.graph.decompositions.convolution import portable
from fanin.edge.export.graph.decompositions.pooling import average
from fanin.edge.export.graph.decompositions.pooling.max_backward import portable_max_pool2d_backward
from fanin.protos.errors import UnsupportedModel

aten = torch.ops.aten
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))
STRIDES = st.one_of(st.just(()), PAIRS)
SIZES = st.tuples(st.integers(3, 8), st.integers(3, 8))


@given(case=convolutions())
def test_gradients_of_a_convolution(case: Convolution) -> None:
    x, weight, *form = case
    y = aten.convolution(x, weight, None, *form)
    dy = torch.randn_like(y)
    arguments = (dy, x, weight, [y.shape[1]], *form, [True, True, True])
    expected = aten.convolution_backward(*arguments)
    for actual, reference in zip(portable.convolution_backward(*arguments), expected, strict=True):
        torch.testing.assert_close(actual, reference, **CLOSE)


@given(case=convolutions(), has_bias=st.booleans())
def test_a_transposed_convolution_becomes_a_plain_one_and_a_plain_one_is_unchanged(
    case: Convolution, has_bias: bool
) -> None:
    x, weight, *form = case
    expected = aten.convolution(x, weight, None, *form)
    bias = torch.randn(expected.shape[1], dtype=torch.float64) if has_bias else None
    result = portable.convolution(x, weight, bias, *form)
    if form[3]:
        assert isinstance(result, torch.Tensor)
        torch.testing.assert_close(result, aten.convolution(x, weight, bias, *form), **CLOSE)
    else:
        assert result is NotImplemented


@given(
    kernel=PAIRS,
    stride=STRIDES,
    options=st.tuples(st.integers(0, 1), st.booleans(), st.booleans(), st.sampled_from([None, 2])),
    size=SIZES,
)
def test_gradient_of_an_average_pool(
    kernel: tuple[int, int],
    stride: tuple[int, ...],
    options: tuple[int, bool, bool, int | None],
    size: tuple[int, int],
) -> None:
    pad, ceil_mode, counts_padding, divisor = options
    padding = [min(pad, taps // 2) for taps in kernel]
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    form = (list(kernel), list(stride), padding, ceil_mode, counts_padding, divisor)
    dy = torch.randn_like(aten.avg_pool2d(x, *form))
    torch.testing.assert_close(
        average.avg_pool2d_backward(dy, x, *form), aten.avg_pool2d_backward(dy, x, *form), **CLOSE
    )


@given(size=SIZES, output_size=st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_an_adaptive_average_pool_and_its_gradient(size: tuple[int, int], output_size: tuple[int, int]) -> None:
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    y = aten._adaptive_avg_pool2d(x, output_size)
    torch.testing.assert_close(average.adaptive_avg_pool2d(x, output_size), y, **CLOSE)
    dy = torch.randn_like(y)
    torch.testing.assert_close(
        average.adaptive_avg_pool2d_backward(dy, x), aten._adaptive_avg_pool2d_backward(dy, x), **CLOSE
    )


@given(
    kernel=PAIRS,
    stride=STRIDES,
    pad=st.integers(0, 1),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    ceil_mode=st.booleans(),
    levels=st.integers(1, 50),
)
def test_gradient_of_a_max_pool_goes_to_the_first_maximum(
    kernel: tuple[int, int],
    stride: tuple[int, ...],
    pad: int,
    dilation: tuple[int, int],
    ceil_mode: bool,
    levels: int,
) -> None:
    # Few distinct values give many ties.
    x = torch.randint(0, levels, (2, 3, 7, 6)).to(torch.float64)
    form = (list(kernel), list(stride), [min(pad, taps // 2) for taps in kernel], list(dilation), ceil_mode)
    y, indices = aten.max_pool2d_with_indices(x, *form)
    dy = torch.randn_like(y)
    expected = aten.max_pool2d_with_indices_backward(dy, x, *form, indices)
    torch.testing.assert_close(portable_max_pool2d_backward(dy, x, *form, indices), expected, **CLOSE)


def test_gradient_of_a_relu() -> None:
    x = torch.tensor([-1.0, 0.0, 2.0, 7.0], dtype=torch.float64)
    dy = torch.randn_like(x)
    expected = aten.threshold_backward(dy, x, 0)
    torch.testing.assert_close(elementwise.threshold_backward(dy, x, 0), expected, **CLOSE)


@given(num=st.integers(1, 6), padding=st.integers(-1, 5), integer=st.sampled_from([torch.int32, torch.int64]))
def test_gradient_of_an_embedding(num: int, padding: int, integer: torch.dtype) -> None:
    assume(padding < num)
    indices = torch.randint(0, num, (3, 4), dtype=integer)
    dy = torch.randn(3, 4, 5, dtype=torch.float64)
    expected = aten.embedding_dense_backward(dy, indices, num, padding, False)
    torch.testing.assert_close(selection.embedding_backward(dy, indices, num, padding, False), expected, **CLOSE)


def test_an_embedding_that_scales_by_frequency_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="FN-0783"):
        selection.embedding_backward(torch.ones(2, 3), torch.zeros(2, dtype=torch.int64), 4, -1, True)


@given(dim=st.integers(-3, 2), first=st.integers(-9, 9), last=st.integers(-9, 9), step=st.integers(1, 3))
def test_gradients_of_a_slice_and_of_a_selected_row(dim: int, first: int, last: int, step: int) -> None:
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    y = aten.slice(x, dim, first, last, step)
    if y.numel():
        dy = torch.randn_like(y)
        expected = aten.slice_backward(dy, x.shape, dim, first, last, step)
        torch.testing.assert_close(selection.slice_backward(dy, x.shape, dim, first, last, step), expected, **CLOSE)
    index = first % x.shape[dim] - (x.shape[dim] if last < 0 else 0)
    dy = torch.randn_like(aten.select(x, dim, index))
    expected = aten.select_backward(dy, x.shape, dim, index)
    torch.testing.assert_close(selection.select_backward(dy, x.shape, dim, index), expected, **CLOSE)


@given(
    shape=st.sampled_from([(4,), (3, 4), (3, 4, 2, 2)]),
    has_weight=st.booleans(),
    reduction=st.integers(0, 2),
    ignore_index=st.integers(0, 4),
)
def test_a_loss_of_the_right_class_and_its_gradient(
    shape: tuple[int, ...], has_weight: bool, reduction: int, ignore_index: int
) -> None:
    scores = torch.randn(shape, dtype=torch.float64)
    # At least one label is not the ignored class.
    labels = torch.arange(scores.numel() // 4).reshape(*shape[:1], *shape[2:]) % 4 if shape[1:] else torch.tensor(2)
    assume(shape[1:] or ignore_index != 2)
    weight = torch.rand(4, dtype=torch.float64) if has_weight else None
    forward, backward = (
        (aten.nll_loss2d_forward, aten.nll_loss2d_backward)
        if len(shape) == 4
        else (aten.nll_loss_forward, aten.nll_loss_backward)
    )
    loss, total = forward(scores, labels, weight, reduction, ignore_index)
    actual_loss, actual_total = selection.nll_loss(scores, labels, weight, reduction, ignore_index)
    torch.testing.assert_close(actual_loss, loss, **CLOSE)
    dy = torch.randn_like(loss)
    arguments = (scores, labels, weight, reduction, ignore_index)
    torch.testing.assert_close(
        selection.nll_loss_backward(dy, *arguments, actual_total), backward(dy, *arguments, total), **CLOSE
    )
