"""Elementwise operators and constructors whose own kernels are slow or have no form in a graph."""

from collections.abc import Sequence

import torch
from torch import Tensor


def threshold_backward(dy: Tensor, x: Tensor, threshold: float) -> Tensor:
    """Compute ``aten.threshold_backward`` (the gradient of ReLU) as a product: a selection is slower."""
    return dy * (x > threshold).to(dy.dtype)


def copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Compute ``aten.copy``: ``source`` in the shape and dtype of ``target``."""
    return source.to(target.dtype).expand_as(target).clone()


def empty_permuted(
    size: Sequence[int],
    physical_layout: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Tensor:
    """Replace ``aten.empty_permuted`` by zeros: only its shape is read, by ``full_like``."""
    return torch.zeros(size, dtype=dtype, layout=layout, device=device, pin_memory=pin_memory)


def new_empty_strided(
    x: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Tensor:
    """Replace ``aten.new_empty_strided`` by zeros: the gradient of a write to a view fills it."""
    return torch.zeros(size, dtype=dtype or x.dtype)
