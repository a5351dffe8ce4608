"""Adaptive max pools and additions by index, compared with torch's kernels in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from fanin.edge.export.graph.decompositions import selection
from fanin.edge.export.graph.decompositions.pooling import adaptive, forward
from fanin.edge.export.graph.decompositions.pooling.max_backward import (
    max_pool2d_backward,
    portable_max_pool2d_backward,
)
from fanin.edge.export.graph.decompositions.selection import index_put, index_put_into

aten = torch.ops.aten
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@given(
    input_size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    output_size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    max_backward=st.sampled_from([max_pool2d_backward, portable_max_pool2d_backward]),
)
def test_an_adaptive_max_pool_and_its_gradient(
    input_size: tuple[int, int], output_size: tuple[int, int], max_backward: Callable[..., Tensor]
) -> None:
    x = torch.randint(0, 3, (2, 3, *input_size)).to(torch.float64)
    y, indices = aten.adaptive_max_pool2d(x, output_size)
    forms = adaptive.table(max_backward)
    torch.testing.assert_close(forms[aten.adaptive_max_pool2d.default](x, output_size)[0], y, rtol=0, atol=0)
    dy = torch.randn_like(y)
    expected = aten.adaptive_max_pool2d_backward(dy, x, indices)
    result = forms[aten.adaptive_max_pool2d_backward.default](dy, x, indices)
    torch.testing.assert_close(result, expected, **CLOSE)


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    dim=st.integers(0, 2),
    positions=st.lists(st.integers(-100, 99), min_size=1, max_size=6),
)
def test_values_are_written_at_the_positions_of_an_index(shape: list[int], dim: int, positions: list[int]) -> None:
    dim %= len(shape)
    x = torch.randn(shape, dtype=torch.float64)
    index = torch.tensor([position % (2 * shape[dim]) - shape[dim] for position in positions])
    values = torch.randn([*shape[:dim], len(index), *shape[dim + 1 :]], dtype=torch.float64)
    indices = [*(None for _ in range(dim)), index]
    for accumulate in (False, True):
        expected = aten.index_put(x, indices, values, accumulate)
        torch.testing.assert_close(index_put(x, indices, values, accumulate), expected, **CLOSE)


@pytest.mark.parametrize("accumulate", [False, True])
def test_values_are_written_at_pairs_of_positions(accumulate: bool) -> None:
    x, rows, columns = torch.randn(2, 3, 4, 5), torch.tensor([[0], [-1]]), torch.tensor([1, 3, -4])
    for shape in ((), (2, 2, 3, 5), (3, 1)):
        values = torch.randn(shape)
        expected = aten.index_put(x, [None, rows, columns], values, accumulate)
        torch.testing.assert_close(index_put(x, [None, rows, columns], values, accumulate), expected)
    assert index_put(x, [rows[:1], None, columns], torch.zeros(()), accumulate) is NotImplemented


@given(
    mask=st.lists(st.booleans(), min_size=6, max_size=6),
    dims=st.sampled_from([(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (0, 3)]),
    values=st.sampled_from([(), (1,), (4,), (3, 1)]),
    accumulate=st.booleans(),
)
def test_values_are_assigned_where_a_mask_is_true(
    mask: list[bool], dims: tuple[int, int], values: tuple[int, ...], accumulate: bool
) -> None:
    (first, num), shape = dims, (2, 3, 4)
    index = torch.tensor((mask * 4)[: math.prod(shape[first : first + num])]).reshape(shape[first : first + num])
    x, value = torch.randn(shape, dtype=torch.float64), torch.randn(values, dtype=torch.float64)
    indices = [*(None for _ in range(first)), index]
    result = index_put(x, indices, value, accumulate)
    if value.numel() > 1 and value.dim() > 3 - first - num:
        # An assignment of one value for each True position of the mask has no form.
        assert result is NotImplemented
        return
    expected = x.clone()
    aten.index_put_(expected, indices, value, accumulate)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    target = x.clone()
    assert index_put_into(target, indices, value, accumulate) is target
    assert torch.equal(target, expected)


@given(
    input_size=st.tuples(st.integers(5, 9), st.integers(5, 9)),
    kernel=st.lists(st.integers(1, 3), min_size=1, max_size=2),
    stride=st.sampled_from([[], [1], [2], [1, 2]]),
    padding=st.sampled_from([[0], [1], [1, 0]]),
    dilation=st.sampled_from([[1], [2], [1, 2]]),
)
def test_pools_with_gaps_and_means_without_padding(
    input_size: tuple[int, int], kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> None:
    assume(all(2 * pad <= taps for pad in padding for taps in kernel))
    x = torch.randn(2, 3, *input_size, dtype=torch.float64)
    result = forward.max_pool2d(x, kernel, stride, padding, dilation, False)
    if dilation == [1]:
        assert result is NotImplemented
    else:
        expected = aten.max_pool2d(x, kernel, stride, padding, dilation)
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    mean = forward.avg_pool2d(x, kernel, stride, padding, False, False, None)
    if any(padding):
        torch.testing.assert_close(mean, aten.avg_pool2d(x, kernel, stride, padding, False, False), **CLOSE)
    else:
        assert mean is NotImplemented


def test_gradients_of_selections_and_losses_equal_torch() -> None:
    dy, indices = torch.randn(3, 2, dtype=torch.float64), torch.tensor([0, 1, 0])
    for padding in (-1, 0):
        expected = aten.embedding_dense_backward(dy, indices, 4, padding, False)
        torch.testing.assert_close(selection.embedding_backward(dy, indices, 4, padding, False), expected, **CLOSE)
    row, rows = torch.randn(4), torch.randn(3, 4)
    result = selection.select_backward(row, [3, 4], 0, -1)
    assert torch.equal(result, aten.select_backward(row, [3, 4], 0, -1))
    result = selection.slice_backward(rows, [3, 4], 0, -9, 99, 1)
    assert torch.equal(result, aten.slice_backward(rows, [3, 4], 0, -9, 99, 1))
    logs, labels = torch.randn(3, 4, dtype=torch.float64).log_softmax(1), torch.tensor([0, 2, 1])
    weights = torch.rand(4, dtype=torch.float64)
    for weight in (None, weights):
        for reduction in range(3):
            result = selection.nll_loss(logs, labels, weight, reduction, 2)
            expected = aten.nll_loss_forward(logs, labels, weight, reduction, 2)
            torch.testing.assert_close(result[0], expected[0], **CLOSE)
