"""Our backward forms against torch's own kernels, in float64."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fanin.edge.export.decompositions.convolution import ConvForm, convolution, convolution_backward
from fanin.edge.export.decompositions.norms import group_norm, group_norm_backward
from fanin.edge.export.decompositions.pooling import (
    adaptive_max_pool2d,
    adaptive_max_pool2d_backward,
    max_pool2d_backward,
)
from fanin.edge.export.decompositions.resampling import table
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

    size, kernel, stride, padding, dilation = each(1, 13), each(1, 3), each(1, 3), each(0, 2), each(1, 2)
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
@given(case=convolutions())
def test_a_convolution_in_another_form_is_the_same(case: tuple[object, ...]) -> None:
    x, weight, *form = case
    bias = torch.randn(weight.shape[1] * form[-1] if form[3] else len(weight), dtype=torch.float64)
    found = convolution(x, weight, bias, *form)
    if found is not NotImplemented:
        torch.testing.assert_close(found, aten.convolution(x, weight, bias, *form), **CLOSE)


@pytest.mark.parametrize(
    ("channels", "size", "banded"), [(64, (25, 5), True), (8, (48, 48), False), (1, (5, 5), False)]
)
def test_narrow_depthwise_convolutions_are_taken_as_bands(channels: int, size: tuple[int, int], banded: bool) -> None:
    form = ConvForm(stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=channels)
    assert (form.bands((2, channels, *size), (channels, 1, 3, 3)) is not None) == banded


@settings(deadline=None)
@given(
    groups=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(2, 9)),
    scaled=st.sampled_from(["both", "weight", "none"]),
)
def test_group_norm_and_its_gradients(groups: int, sizes: tuple[int, int, int], scaled: str) -> None:
    samples, each, places = sizes
    channels = groups * each
    x = torch.randn(samples, channels, places, 1, dtype=torch.float64) + 3.0
    weight = torch.randn(channels, dtype=torch.float64) if scaled != "none" else None
    bias = torch.randn(channels, dtype=torch.float64) if scaled == "both" else None
    form = (samples, channels, places, groups)
    expected = aten.native_group_norm(x, weight, bias, *form, 1e-5)
    for got, wanted in zip(group_norm(x, weight, bias, *form, 1e-5), expected, strict=True):
        torch.testing.assert_close(got, wanted, **CLOSE)
    dy, wants = torch.randn_like(x), [True, weight is not None, bias is not None]
    arguments = (dy, x, *expected[1:], weight, *form, wants)
    found, wanted = group_norm_backward(*arguments), aten.native_group_norm_backward(*arguments)
    for got, exact, wants_it in zip(found, wanted, wants, strict=True):
        assert (got is not None) == wants_it
        if wants_it:
            torch.testing.assert_close(got, exact, rtol=1e-8, atol=1e-8)


@settings(deadline=None)
@given(
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.one_of(st.just(()), st.tuples(st.integers(1, 3), st.integers(1, 3))),
    pad=st.integers(0, 1),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    levels=st.integers(1, 50),
    ceil_mode=st.booleans(),
)
def test_gradient_of_a_max_pool_goes_to_the_first_maximum(
    kernel: tuple[int, int], stride: tuple[int, ...], pad: int, dilation: tuple[int, int], levels: int, ceil_mode: bool
) -> None:
    # Few levels make many ties.
    x = torch.randint(0, levels, (2, 3, 7, 6)).to(torch.float64)
    form = (list(kernel), list(stride), [min(pad, taps // 2) for taps in kernel], list(dilation), ceil_mode)
    y, indices = aten.max_pool2d_with_indices(x, *form)
    dy = torch.randn_like(y)
    expected = aten.max_pool2d_with_indices_backward(dy, x, *form, indices)
    torch.testing.assert_close(max_pool2d_backward(dy, x, *form, indices), expected, **CLOSE)


def test_gradient_of_an_adaptive_max_pool() -> None:
    x = torch.randint(0, 3, (2, 3, 8, 6)).to(torch.float64)
    y, indices = aten.adaptive_max_pool2d(x, [4, 3])
    torch.testing.assert_close(adaptive_max_pool2d(x, [4, 3])[0], y, **CLOSE)
    dy = torch.randn_like(y)
    expected = aten.adaptive_max_pool2d_backward(dy, x, indices)
    torch.testing.assert_close(adaptive_max_pool2d_backward(dy, x, indices), expected, **CLOSE)


def test_max_pools_whose_windows_differ_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"got \(5, 5\) to \(2, 2\) .* expected sizes that divide each other"):
        adaptive_max_pool2d(torch.randn(1, 1, 5, 5), [2, 2])


@settings(deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 15)), min_size=1, max_size=2),
    exact=st.booleans(),
    scale=st.sampled_from([None, 0.3, 1.0, 1.7, 2.0, 3.0]),
)
def test_gradient_of_nearest_upsampling(sizes: list[tuple[int, int]], exact: bool, scale: float | None) -> None:
    name = f"{'_' if exact else ''}upsample_nearest{'_exact' if exact else ''}{len(sizes)}d_backward"
    operator = getattr(aten, name).default
    have = [size for size, _ in sizes]
    made = [num if scale is None else max(1, int(size * scale)) for size, num in sizes]
    dy = torch.randn(2, 3, *made, dtype=torch.float64)
    arguments = (dy, made, [2, 3, *have], *(scale for _ in sizes))
    torch.testing.assert_close(table()[operator](*arguments), operator(*arguments), **CLOSE)


@settings(deadline=None)
@given(sides=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=2))
def test_gradient_of_padding_with_the_edge(sides: list[tuple[int, int, int]]) -> None:
    operator = getattr(aten, f"replication_pad{len(sides)}d_backward").default
    x = torch.randn(2, 3, *(size for size, _, _ in sides), dtype=torch.float64)
    padding = [side for _, *both in reversed(sides) for side in both]
    dy = torch.randn(2, 3, *(size + first + last for size, first, last in sides), dtype=torch.float64)
    torch.testing.assert_close(table()[operator](dy, x, padding), operator(dy, x, padding), **CLOSE)
