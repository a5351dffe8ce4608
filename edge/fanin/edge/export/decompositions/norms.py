"""GroupNorm as runtimes compute it: in few passes over the image.

GroupNorm (Wu and He 2018, arXiv 1803.08494) is a LayerNorm over each group, then an affine map for each channel,
and runtimes have one operator for either. With means over a group, its gradient is::

    dx = rstd * (w dy - mean(w dy) - xhat * mean(w dy xhat)),        xhat = (x - mean) * rstd

``xhat`` is linear in ``x`` in each group, so it need not be made: the places are summed first, what is left is small,
and ``dx`` is one affine map of ``x`` and a product with ``dy``. Small shapes do not end in 1, where runtimes
broadcast value by value.
"""

import torch
from torch import Tensor

aten = torch.ops.aten


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *rest: *tuple[int, int, int, int, float],
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten.native_group_norm``, whose arguments these are: the normed image, means and inverse deviations."""
    samples, channels, places, groups, eps = rest
    normed, mean, rstd = aten.native_layer_norm.default(
        x.reshape(samples * groups, -1), [channels // groups * places], None, None, eps
    )
    made = normed.reshape(samples, channels, places)
    if weight is not None:
        made = affine(made, weight, torch.zeros_like(weight) if bias is None else bias)
    return made.reshape(x.shape), mean.reshape(samples, groups), rstd.reshape(samples, groups)


def group_norm_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *rest: *tuple[Tensor | None, int, int, int, int, list[bool]],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``aten.native_group_norm_backward``, whose arguments these are: gradients towards x, weight and bias."""
    weight, samples, channels, places, groups, (wants_x, wants_weight, wants_bias) = rest
    by_group = (samples, groups, channels // groups)
    rows = dy.reshape(samples * channels, places)
    total = rows.sum(-1).reshape(by_group)
    along = (rows * x.reshape(rows.shape)).sum(-1).reshape(by_group)
    along = (along - mean.unsqueeze(2) * total) * rstd.unsqueeze(2)  # the sums of dy * xhat
    dx = None
    if wants_x:
        scale = (x.new_ones(channels) if weight is None else weight).reshape(1, *by_group[1:])
        share = rstd / (channels // groups * places)
        slope = -(along * scale).sum(-1) * share * rstd
        offset = -(total * scale).sum(-1) * share - slope * mean
        common = affine(x.reshape(1, samples * groups, -1), slope.reshape(-1), offset.reshape(-1))
        own = (rstd.unsqueeze(2) * scale).reshape(-1, 1) * rows
        dx = (own + common.reshape(rows.shape)).reshape(x.shape)
    return (
        dx,
        along.sum(0).reshape(channels) if wants_weight else None,
        total.sum(0).reshape(channels) if wants_bias else None,
    )


def affine(x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """``x`` (N, C, places) times ``scale`` (C,) plus ``offset`` (C,), as a BatchNorm with nothing to norm: one pass."""
    zeros, ones = torch.zeros_like(scale), torch.ones_like(scale)
    made: Tensor = aten._native_batch_norm_legit_no_training.default(x, scale, offset, zeros, ones, 0.0, 0.0)[0]
    return made
