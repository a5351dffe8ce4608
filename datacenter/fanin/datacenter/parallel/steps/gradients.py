"""Completes the gradients of a step for the optimizer: check, settle, tie, measure, clip, in this order."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fanin.protos.errors import UnsupportedModel

NORM_EPSILON: Final = 1e-6
"""Added to the norm before the division, as in torch's ``clip_grads_with_norm_``."""


def check_copies(runners: Iterable[nn.Module]) -> None:
    """Check that each trained parameter of a copied model has a gradient.

    DistributedDataParallel sums gradients in buckets. A bucket with a parameter that the loss did not use is never
    summed, and the next step fails. For a model that may skip layers it looks for such parameters itself.

    Raises:
        UnsupportedModel: Some have none.
    """
    for runner in runners:
        if isinstance(runner, DistributedDataParallel) and not runner.find_unused_parameters:
            values = runner.module.named_parameters()
            unused = [name for name, value in values if value.requires_grad and value.grad is None]
            if unused:
                raise UnsupportedModel(
                    f"dp_replicate: got no gradient for {', '.join(unused[:5])}, expected one for each parameter in "
                    "each step on each rank; freeze or remove parameters that the loss does not use, or train with "
                    "dp_shard",
                    code="FN-1295",
                )


def settle(values: Sequence[nn.Parameter]) -> None:
    """Redistribute each gradient to the placements of its parameter.

    After tensor parallelism some gradients are partial sums, and some are full although the parameter is split. An
    optimizer would redistribute them at every use, and code that works on local tensors would read wrong values.
    """
    for value in values:
        grad = value.grad
        if isinstance(grad, DTensor) and isinstance(value, DTensor) and grad.placements != value.placements:
            value.grad = grad.redistribute(placements=value.placements)


def total_norm(values: Sequence[nn.Parameter], pipeline: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    """Return the 2-norm of the gradients of all ranks together, a scalar of float32 or float64.

    Args:
        values: this rank's parameters. They include only one end of a tied weight.
        pipeline: the group of pipeline stages; None without a pipeline.
        device: the device of this rank.
    """
    grads = [value.grad for value in values if value.grad is not None]
    norm = _norm(grads) if grads else torch.zeros((), device=device)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if pipeline is None:
        return norm
    # In float64 on all stages: a stage with only frozen parameters has no gradient dtype, and 8 bytes cost nothing.
    square = norm.to(device).double().square()
    dist.all_reduce(square, group=pipeline)
    return square.sqrt()


def clip(values: Sequence[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scale all gradients down so that their norm is at most ``limit``.

    Each rank scales its local shards. A scalar needs no sharding strategy. torch would compute one for every gradient
    and every combination of placements. On a mesh of three axes that takes longer than the step itself.
    """
    grads = [_local(value.grad) for value in values if value.grad is not None]
    factor = (limit / (norm + NORM_EPSILON)).clamp(max=1.0)
    for device in {grad.device for grad in grads}:
        torch._foreach_mul_([grad for grad in grads if grad.device == device], factor.to(device))


def scale(values: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply all gradients by ``factor``, in place."""
    for value in values:
        if value.grad is not None:
            _local(value.grad).mul_(factor)


def _norm(grads: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients of this rank, on the device of the first.

    torch's ``get_total_norm`` rounds the norm of each bfloat16 gradient to 8 bits, and the norm of a float16 gradient
    overflows at 65504.
    """
    groups = defaultdict[tuple[torch.device, torch.dtype], list[Tensor]](list)
    for grad in grads:
        groups[grad.device, grad.dtype].append(grad)
    norms = [
        norm.to(grads[0].device)
        for (_, dtype), group in groups.items()
        for norm in torch._foreach_norm(group, 2.0, torch.promote_types(dtype, torch.float32))
    ]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _local(grad: Tensor) -> Tensor:
    """Return this rank's shard of a gradient. Both share memory."""
    return grad.to_local() if isinstance(grad, DTensor) else grad
