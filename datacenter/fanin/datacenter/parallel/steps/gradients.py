"""What is done to gradients between the backward pass and the optimizer, in this order: settle, tie, measure, clip."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def settle(values: Sequence[nn.Parameter]) -> None:
    """Give each gradient the placements of its parameter.

    Tensor parallelism leaves some as sums still to be made, and some whole where the parameter is split: an optimizer
    would mend that at every use of them, and what works on local tensors would take the wrong ones.
    """
    for value in values:
        grad = value.grad
        if isinstance(grad, DTensor) and isinstance(value, DTensor) and grad.placements != value.placements:
            value.grad = grad.redistribute(placements=value.placements)


def total_norm(values: Sequence[nn.Parameter], pipeline: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    """The 2-norm of all gradients of all ranks together; ``values`` has of tied weights one."""
    found = [value.grad for value in values if value.grad is not None]
    norm = get_total_norm(found) if found else torch.zeros((), device=device)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if pipeline is None:
        return norm
    # In float64: stages of nothing but frozen parameters have no dtype to bring, and 8 bytes are nothing.
    square = norm.to(device).double().square()
    dist.all_reduce(square, group=pipeline)
    return square.sqrt()


def clip(values: Sequence[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scale all gradients down so that their norm is at most ``limit``."""
    clip_grads_with_norm_(values, limit, norm)


def scale(values: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply all gradients."""
    for value in values:
        if value.grad is not None:
            value.grad.mul_(factor)
