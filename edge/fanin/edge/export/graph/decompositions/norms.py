"""GroupNorm as runtimes compute it, in few passes over the image, and the gradient of weight normalization.

GroupNorm (Wu and He 2018, arXiv 1803.08494) is a LayerNorm over each group, then an affine map for each channel.
Runtimes have one operator for each of the two. With means over a group, the gradient is::

    dx = rstd * (w dy - mean(w dy) - xhat * mean(w dy xhat)),        xhat = (x - mean) * rstd

``xhat`` is linear in ``x`` within a group, so it is never computed. The positions are summed first, which leaves small
tensors. Then ``dx`` is one affine map of ``x`` plus a product with ``dy``. No small shape ends in 1, because runtimes
broadcast such a shape value by value.

A normalized weight is ``w = g v / |v|``, with one norm for each index of one dimension (Salimans and Kingma 2016,
arXiv 1602.07868, equation 2). torch decomposes it in the forward direction alone. Equation 3 gives both gradients::

    dg = sum(dw v) / |v|,        dv = g / |v| (dw - dg v / |v|)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

aten = torch.ops.aten


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    samples: int,
    channels: int,
    positions: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``aten.native_group_norm``: the normalized image, the means and the inverse deviations."""
    normed, mean, rstd = aten.native_layer_norm.default(
        x.reshape(samples * groups, -1), [channels // groups * positions], None, None, eps
    )
    y = normed.reshape(samples, channels, positions)
    if weight is not None:
        y = affine(y, weight, torch.zeros_like(weight) if bias is None else bias)
    return y.reshape(x.shape), mean.reshape(samples, groups), rstd.reshape(samples, groups)


def group_norm_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    samples: int,
    channels: int,
    positions: int,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute ``aten.native_group_norm_backward``: the gradients of x, weight and bias."""
    needs_x, needs_weight, needs_bias = output_mask
    by_group = (samples, groups, channels // groups)
    rows = dy.reshape(samples * channels, positions)
    total = rows.sum(-1).reshape(by_group)
    along = (rows * x.reshape(rows.shape)).sum(-1).reshape(by_group)
    along = (along - mean.unsqueeze(2) * total) * rstd.unsqueeze(2)  # the sums of dy * xhat
    dx = None
    if needs_x:
        scale = (x.new_ones(channels) if weight is None else weight).reshape(1, *by_group[1:])
        share = rstd / (channels // groups * positions)
        slope = -(along * scale).sum(-1) * share * rstd
        offset = -(total * scale).sum(-1) * share - slope * mean
        common = affine(x.reshape(1, samples * groups, -1), slope.reshape(-1), offset.reshape(-1))
        own = (rstd.unsqueeze(2) * scale).reshape(-1, 1) * rows
        dx = (own + common.reshape(rows.shape)).reshape(x.shape)
    return (
        dx,
        along.sum(0).reshape(channels) if needs_weight else None,
        total.sum(0).reshape(channels) if needs_bias else None,
    )


def affine(x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Return ``x`` (N, C, positions) times ``scale`` (C,) plus ``offset`` (C,), in one pass: a BatchNorm without a
    norm.
    """
    zeros, ones = torch.zeros_like(scale), torch.ones_like(scale)
    y: Tensor = aten._native_batch_norm_legit_no_training.default(x, scale, offset, zeros, ones, 0.0, 0.0)[0]
    return y


def weight_norm_backward(
    grad_w: Tensor, saved_v: Tensor, saved_g: Tensor, saved_norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """Compute ``aten._weight_norm_interface_backward``: the gradients of v and g.

    Args:
        grad_w: Gradient of the weight, of any shape.
        saved_v: Direction, in the shape of the weight.
        saved_g: Lengths: the shape of the weight with 1 for each dimension but ``dim``.
        saved_norms: The norms of v, in the shape of g.
        dim: The dimension that has one norm for each index: the first or the last.
    """
    others = [each for each in range(saved_v.dim()) if each != dim % saved_v.dim()]
    product = grad_w * saved_v
    # torch takes a sum over no dimension as one over all.
    grad_g = (product.sum(others, keepdim=True) if others else product) / saved_norms
    return saved_g / saved_norms * (grad_w - grad_g / saved_norms * saved_v), grad_g
