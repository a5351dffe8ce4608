"""Compares the copies of parameters: ranks of ``tp`` and of ``dp_replicate`` must have equal ones.

They start equal and get equal gradients, so nothing keeps them equal later. A forward that differs between the ranks of
tp, by a clock or by random numbers of a generator that nobody watches, changes the model without an error. So does a
faulty processor of a copy. A checkpoint stores one copy, so a resumed job would then train another model.
"""

import math
from collections.abc import Iterator
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate

from fanin.datacenter.parallel.build import RankModel
from fanin.datacenter.ranks.mesh import REPLICATE, TENSOR
from fanin.protos.errors import UnsupportedModel

TOLERANCE: Final = 1e-3
"""Norm of a difference, relative to ``_scale`` of the parameter. Equal kernels give equal bits. Fused kernels of a GPU
that add in any order, and other processors, differ by 1e-7 in a step: the sum of a million such random differences is
1e-4. Ranks with different functions differ by about the learning rate in one step."""


@torch.no_grad()
def check_replicas(model: RankModel) -> None:
    """Raise UnsupportedModel on all ranks if the copies of a parameter differ. A collective."""
    sizes = {TENSOR: model.parallel.mesh.tp, REPLICATE: model.parallel.mesh.dp_replicate}
    axes = [axis for axis, size in sizes.items() if size > 1]
    if model.mesh is None or not axes:
        return
    worst = (0.0, "", "")
    for axis in axes:
        group = model.mesh.get_group(axis)
        copies = [(name, value) for part in model.parts.values() for name, value in _copies(part, axis)]
        typical = _typical_value([value for _, value in copies])
        for name, value in copies:
            own = value.to(model.device)
            first = own.clone()
            dist.broadcast(first, group=group, group_src=0)
            scale = max(_norm(first), typical * first.numel() ** 0.5)
            worst = max(worst, (_norm(own - first) / scale if scale else 0.0, name, axis))
    rows = [worst] * dist.get_world_size()
    dist.all_gather_object(rows, worst)
    ratio, name, axis = max(rows)
    if ratio > TOLERANCE:
        reason = (
            "because tp does not split it: the forward or the loss differs between the ranks; draw random numbers by "
            "torch alone, and use no clock and no rank number"
            if axis == TENSOR
            else "because all copies add the same gradients: let the forward change no parameter, check the processors "
            "of the machines, and resume from the last checkpoint"
        )
        raise UnsupportedModel(
            f"model: got other values of {name} on the ranks of {axis} (they differ by {ratio:.2g} of its norm, and "
            f"rounding explains {TOLERANCE:g}), expected equal ones, {reason}",
            code="FN-1296",
        )


def _copies(part: nn.Module, axis: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and this rank's values of each parameter that the ranks of an axis copy."""
    for name, value in part.named_parameters():
        local, placements = value.detach(), dict[str, Placement]()
        if isinstance(value, DTensor):
            local = value.to_local()
            placements = dict(zip(value.device_mesh.mesh_dim_names or (), value.placements, strict=True))
        # DistributedDataParallel copies parameters that are on no mesh with its axis.
        default = Replicate() if axis == REPLICATE else None
        if isinstance(placements.get(axis, default), Replicate):
            yield name, local


def _typical_value(values: list[Tensor]) -> float:
    """Return the root of the mean square of all values.

    A bias that starts at zero has a norm of rounding alone, with which no difference can be compared.
    """
    square = sum(_norm(value) ** 2 for value in values)
    mean = square / max(1, sum(value.numel() for value in values))
    return math.sqrt(mean)


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value, dtype=torch.float64))
