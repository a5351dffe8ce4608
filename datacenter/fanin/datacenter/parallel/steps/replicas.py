"""Compares the parameters that ``tp`` does not split: its ranks must have equal ones.

They start equal and get equal gradients, so nothing keeps them equal later. A forward that differs between the ranks,
by a clock or by random numbers of a generator that nobody watches, changes the model without an error.
"""

from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from fanin.datacenter.parallel.build import RankModel
from fanin.datacenter.ranks.mesh import TENSOR
from fanin.protos.errors import UnsupportedModel

TOLERANCE: Final = 1e-3
"""Norm of a difference relative to the norm of the parameter. Equal kernels give equal bits. Other processors do not,
and neither do kernels of a GPU that add in any order."""


@torch.no_grad()
def check_replicas(model: RankModel) -> None:
    """Raise UnsupportedModel on all ranks if an unsplit parameter differs between ranks of tp. A collective."""
    if model.mesh is None or model.parallel.mesh.tp == 1:
        return
    group = model.mesh.get_group(TENSOR)
    worst, worst_name = 0.0, ""
    for part in model.parts.values():
        for name, value in part.named_parameters():
            if not isinstance(value, DTensor) or not _is_replicated(value):
                continue
            own = value.to_local().to(model.device)
            first = own.clone()
            dist.broadcast(first, group=group, group_src=0)
            error, norm = (float(torch.linalg.vector_norm(each, dtype=torch.float64)) for each in (own - first, first))
            ratio = error / norm if norm else error
            if ratio > worst:
                worst, worst_name = ratio, name
    ratios: list[tuple[float, str]] = [(0.0, "")] * dist.get_world_size()
    dist.all_gather_object(ratios, (worst, worst_name))
    worst, worst_name = max(ratios)
    if worst > TOLERANCE:
        raise UnsupportedModel(
            f"model: got other values of {worst_name} on the ranks of tp (they differ by {worst:.2g} of its norm), "
            "expected equal ones, because tp does not split it: the forward or the loss differs between the ranks; "
            "draw random numbers by torch alone, and use no clock and no rank number"
        )


def _is_replicated(value: DTensor) -> bool:
    names = value.device_mesh.mesh_dim_names or ()
    return TENSOR in names and isinstance(value.placements[names.index(TENSOR)], Replicate)
