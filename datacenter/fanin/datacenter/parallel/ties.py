"""Weights that are one in the model and two in the parts of it.

Within a part they are tied again after tensor parallelism, which takes them apart without a word. Between the first
and the last stage of a pipeline each keeps a copy, and before each step the copies' gradients are added up: two equal
values with equal gradients and equal optimizer states stay equal (Narayanan et al. 2021, arXiv 2104.04473, use an
all-reduce of two ranks for it).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fanin.datacenter.parallel.layout import Layout
from fanin.datacenter.parallel.mesh import PIPELINE, MeshShape
from fanin.datacenter.parallel.pipelines.schedules import Pipeline
from fanin.protos.errors import UnsupportedModel


def shared_names(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of each parameter that a module has under more than one."""
    found: dict[int, list[str]] = {}
    for name, value in module.named_parameters(remove_duplicate=False):
        found.setdefault(id(value), []).append(name)
    return tuple(tuple(names) for names in found.values() if len(names) > 1)


def unshared(layers: Sequence[nn.Module], part: nn.Module) -> list[nn.Module]:
    """The layers whose parameters no module outside of them has.

    FSDP2 keeps a parameter one only within one group: a layer that shares one must be of its part's own group.
    """
    owners: dict[int, set[int]] = {}
    for module in part.modules():
        for value in module.parameters(recurse=False):
            owners.setdefault(id(value), set()).add(id(module))

    def alone(layer: nn.Module) -> bool:
        within = {id(module) for module in layer.modules()}
        return all(owners[id(value)] <= within for value in layer.parameters())

    return [layer for layer in layers if alone(layer)]


def check_shared(module: nn.Module, layout: Layout, mesh: MeshShape, stage_of: Mapping[str, int]) -> None:
    """Raise UnsupportedModel if a mesh would make two parameters of one: ``tp`` between modules, ``pp`` between stages.

    The pair that the layout names as ``tied`` is tied again.
    """
    for names in shared_names(module):
        if layout.tied is not None and set(names) == set(layout.tied):
            continue
        modules = {id(module.get_submodule(name.rpartition(".")[0])) for name in names}
        split = mesh.tp > 1 and len(modules) > 1
        if split or len({stage_of[name] for name in names}) > 1:
            raise UnsupportedModel(
                f"mesh {mesh}: got one parameter under the names {', '.join(names)}, expected tp 1, and pp 1 or all of "
                "them in one stage: each rank of tp and each stage would train a copy of its own; take dp_replicate "
                "and dp_shard, which keep it one"
            )


def check_still_shared(part: nn.Module, shared: Sequence[Sequence[str]]) -> None:
    """Raise UnsupportedModel if a part that is on its ranks has two parameters where the model had one."""
    values = dict(part.named_parameters(remove_duplicate=False))
    for names in shared:
        if len({id(values[name]) for name in names if name in values}) > 1:
            raise UnsupportedModel(
                f"{type(part).__name__}: got two parameters for {', '.join(names)}, which are one in the model; "
                "expected one; train it on another mesh, or give each module a parameter of its own"
            )


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
