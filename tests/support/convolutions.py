"""Convolutions for laws: every kind, stride, padding and dilation, of one or two dimensions."""

import torch
from hypothesis import assume
from hypothesis import strategies as st

Convolution = tuple[object, ...]
"""x, weight and the constants that follow the bias in ``aten.convolution``."""


@st.composite
def convolutions(draw: st.DrawFn) -> Convolution:
    """Draw a convolution whose output has at least one position."""
    dims = draw(st.integers(1, 2))
    groups = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["plain", "depthwise", "transposed"]))
    # The form of a plain convolution depends on whether it has few or many channels.
    ins, outs = (1, 1) if kind == "depthwise" else (draw(st.integers(1, 5)), draw(st.integers(1, 3)))

    def each(low: int, high: int) -> list[int]:
        return [draw(st.integers(low, high)) for _ in range(dims)]

    size, kernel, stride, padding, dilation = each(1, 13), each(1, 3), each(1, 3), each(0, 2), each(1, 2)
    extra = [draw(st.integers(0, step - 1)) for step in stride] if kind == "transposed" else [0] * dims
    for extent, taps, pad, step, dil in zip(size, kernel, padding, stride, dilation, strict=True):
        assume(extent + 2 * pad >= dil * (taps - 1) + 1)
        assume(kind != "transposed" or (extent - 1) * step - 2 * pad + dil * (taps - 1) + 1 > 0)
    torch.manual_seed(draw(st.integers(0, 1000)))
    x = torch.randn(draw(st.integers(1, 3)), groups * ins, *size, dtype=torch.float64)
    rows = (groups * ins, outs) if kind == "transposed" else (groups * outs, ins)
    weight = torch.randn(*rows, *kernel, dtype=torch.float64)
    return x, weight, stride, padding, dilation, kind == "transposed", extra, groups
