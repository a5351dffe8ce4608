"""Weights that are one in the model and two in the parts of it.

Within a part they are tied again after tensor parallelism, which takes them apart without a word. Between the first
and the last stage of a pipeline each keeps a copy, and before each step the copies' gradients are added up: two equal
values with equal gradients and equal optimizer states stay equal (Narayanan et al. 2021, arXiv 2104.04473, use an
all-reduce of two ranks for it).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fanin.datacenter.mesh import PIPELINE
from fanin.datacenter.parallel.schedules import Pipeline


def retie(part: nn.Module, tied: tuple[str, str]) -> None:
    """Make the copy the original again, where a part has both."""
    copied, original = tied
    values = dict(part.named_parameters(remove_duplicate=False))
    if copied in values and original in values:
        owner, _, key = copied.rpartition(".")
        part.get_submodule(owner).register_parameter(key, values[original])


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """The two ends of a tied weight in a pipeline, as one rank sees them: either, both or none."""

    original: nn.Parameter | None
    copied: nn.Parameter | None
    original_name: str
    group: dist.ProcessGroup
    peer: int

    def add_gradients(self) -> None:
        """Give both ends the sum of both gradients. The ends must have their own placements."""
        ends = [value for value in (self.original, self.copied) if value is not None and value.grad is not None]
        if not ends:
            return
        mine = [_local(value) for value in ends]
        if len(mine) == 2:
            total = mine[0] + mine[1]
        else:
            theirs = torch.empty_like(mine[0])
            send = dist.P2POp(dist.isend, mine[0].contiguous(), self.peer, self.group)
            receive = dist.P2POp(dist.irecv, theirs, self.peer, self.group)
            # Both send first in the list or neither: gloo matches by order, and a sum of two knows no order.
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            total = mine[0] + theirs
        for value in mine:
            value.copy_(total)


def tie_of(parts: Mapping[int, nn.Module], tied: tuple[str, str], pipeline: Pipeline, mesh: DeviceMesh) -> Tie:
    """The ends that this rank's parts, by number of their stage, have."""
    first, last = pipeline.rank_of(0), pipeline.rank_of(pipeline.num_stages - 1)
    group = mesh.get_group(PIPELINE)
    peer = last if mesh.get_local_rank(PIPELINE) == first else first
    return Tie(
        original=_found(parts.get(0), tied[1]),
        copied=_found(parts.get(pipeline.num_stages - 1), tied[0]),
        original_name=tied[1],
        group=group,
        peer=dist.get_global_rank(group, peer),
    )


def _found(part: nn.Module | None, name: str) -> nn.Parameter | None:
    return None if part is None else dict(part.named_parameters(remove_duplicate=False)).get(name)


def _local(value: nn.Parameter) -> Tensor:
    assert value.grad is not None
    return value.grad.to_local() if isinstance(value.grad, DTensor) else value.grad
