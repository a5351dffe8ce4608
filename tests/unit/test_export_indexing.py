"""Adaptive max pools and additions by index, against torch's own kernels, in float64."""

from collections.abc import Callable

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from fanin.edge.export.decompositions.pooling import adaptive, forward
from fanin.edge.export.decompositions.pooling.max_backward import max_pool2d_backward, portable_max_pool2d_backward
from fanin.edge.export.decompositions.selection import index_put

aten = torch.ops.aten
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@given(
    have=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    num=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    max_backward=st.sampled_from([max_pool2d_backward, portable_max_pool2d_backward]),
)
def test_an_adaptive_max_pool_and_its_gradient(
    have: tuple[int, int], num: tuple[int, int], max_backward: Callable[..., Tensor]
) -> None:
    x = torch.randint(0, 3, (2, 3, *have)).to(torch.float64)
    y, indices = aten.adaptive_max_pool2d(x, num)
    forms = adaptive.table(max_backward)
    torch.testing.assert_close(forms[aten.adaptive_max_pool2d.default](x, num)[0], y, rtol=0, atol=0)
    dy = torch.randn_like(y)
    expected = aten.adaptive_max_pool2d_backward(dy, x, indices)
    found = forms[aten.adaptive_max_pool2d_backward.default](dy, x, indices)
    torch.testing.assert_close(found, expected, **CLOSE)


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    dim=st.integers(0, 2),
    places=st.lists(st.integers(-100, 99), min_size=1, max_size=6),
)
def test_what_is_added_to_the_places_of_an_index(shape: list[int], dim: int, places: list[int]) -> None:
    dim %= len(shape)
    x = torch.randn(shape, dtype=torch.float64)
    index = torch.tensor([place % (2 * shape[dim]) - shape[dim] for place in places])
    values = torch.randn([*shape[:dim], len(index), *shape[dim + 1 :]], dtype=torch.float64)
    indices = [*(None for _ in range(dim)), index]
    expected = aten.index_put(x, indices, values, True)
    torch.testing.assert_close(index_put(x, indices, values, True), expected, **CLOSE)
    assert index_put(x, indices, values, False) is NotImplemented


@given(
    have=st.tuples(st.integers(5, 9), st.integers(5, 9)),
    kernel=st.lists(st.integers(1, 3), min_size=1, max_size=2),
    stride=st.sampled_from([[], [1], [2], [1, 2]]),
    padding=st.sampled_from([[0], [1], [1, 0]]),
    dilation=st.sampled_from([[1], [2], [1, 2]]),
)
def test_pools_with_gaps_and_means_without_padding(
    have: tuple[int, int], kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> None:
    assume(all(2 * pad <= taps for pad in padding for taps in kernel))
    x = torch.randn(2, 3, *have, dtype=torch.float64)
    found = forward.max_pool2d(x, kernel, stride, padding, dilation, False)
    if dilation == [1]:
        assert found is NotImplemented
    else:
        expected = aten.max_pool2d(x, kernel, stride, padding, dilation)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    mean = forward.avg_pool2d(x, kernel, stride, padding, False, False, None)
    if any(padding):
        torch.testing.assert_close(mean, aten.avg_pool2d(x, kernel, stride, padding, False, False), **CLOSE)
    else:
        assert mean is NotImplemented
