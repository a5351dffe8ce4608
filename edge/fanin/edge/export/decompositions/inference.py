"""What ``infer`` is given another form of: it is traced without autograd, as the operators that modules call.

Few of those have no form in a graph format. A transposed convolution is one with zeros between the places of its input,
and an adaptive max pool one of windows, as in the train step.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from fanin.edge.export.decompositions import padding, portable
from fanin.edge.export.decompositions.adaptive import adaptive_max_pool2d
from fanin.edge.export.decompositions.forward_pools import avg_pool2d, max_pool2d

aten = torch.ops.aten


def forward_decompositions(graph_format: str) -> dict[OpOverload, Callable[..., object]]:
    """The decomposition table for what is only run forward in a graph format."""
    pools: dict[OpOverload, Callable[..., object]] = {
        aten.adaptive_max_pool1d.default: adaptive_max_pool1d,
        aten.adaptive_max_pool2d.default: adaptive_max_pool2d,
    }
    if graph_format != "tflite":
        return pools
    return pools | {
        **padding.forward_table(),
        aten.conv_transpose1d.default: transposed,
        aten.conv_transpose2d.input: transposed,
        aten.max_pool2d.default: max_pool2d,
        aten.avg_pool2d.default: avg_pool2d,
    }


def adaptive_max_pool1d(x: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """``aten.adaptive_max_pool1d``, whose arguments these are: a signal is an image of one row."""
    highest, indices = adaptive_max_pool2d(x.unsqueeze(-2), [1, *size])
    return highest.squeeze(-2), indices.squeeze(-2)


def transposed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *rest: *tuple[Sequence[int] | int, ...],
    **given: Sequence[int] | int,
) -> object:
    """``aten.conv_transpose2d`` and its like, whose arguments these are: an image at a time is a batch of one."""
    order = ("stride", "padding", "output_padding", "groups", "dilation")
    told = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1} | given
    told |= dict(zip(order, rest, strict=False))
    num = weight.dim() - 2
    stride, around, extra, dilation = (
        _each(told[name], num) for name in ("stride", "padding", "output_padding", "dilation")
    )
    groups = told["groups"]
    assert isinstance(groups, int), "as the operator's schema has it"
    return portable.convolution(x, weight, bias, stride, around, dilation, True, extra, groups)


def _each(value: Sequence[int] | int, num: int) -> list[int]:
    """One number for each spatial dimension."""
    values = [value] if isinstance(value, int) else list(value)
    return values * num if len(values) == 1 else values
