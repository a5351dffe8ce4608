"""Keeps weights shared that the model uses under two names.

Within a part they are tied again after tensor parallelism, which silently separates them. In a pipeline the first and
the last stage each keep a copy, and the gradients of both copies are added before each step. Equal values with equal
gradients and equal optimizer states stay equal.

Reference:
    Narayanan et al. 2021, arXiv 2104.04473, use an all-reduce of two ranks for the same purpose.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fanin.datacenter.parallel.layout import Layout
from fanin.datacenter.parallel.pipelines.schedules import Pipeline
from fanin.datacenter.ranks.mesh import PIPELINE, MeshShape
from fanin.protos.errors import UnsupportedModel


def shared_names(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the names of each parameter that has more than one name in a module."""
    names_by_id: dict[int, list[str]] = {}
    for name, value in module.named_parameters(remove_duplicate=False):
        names_by_id.setdefault(id(value), []).append(name)
    return tuple(tuple(names) for names in names_by_id.values() if len(names) > 1)


def other_names(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the further names of each shared parameter by its first name, as ``named_parameters`` gives it."""
    return {first: tuple(others) for first, *others in shared_names(module)}


def unshared(layers: Sequence[nn.Module], part: nn.Module) -> list[nn.Module]:
    """Return the layers that share no parameter with a module outside of them.

    FSDP2 keeps a shared parameter shared only within one group. A layer that shares a parameter must therefore belong
    to the group of the complete part.
    """
    owners: dict[int, set[int]] = {}
    for module in part.modules():
        for value in module.parameters(recurse=False):
            owners.setdefault(id(value), set()).add(id(module))

    def shares_nothing(layer: nn.Module) -> bool:
        within = {id(module) for module in layer.modules()}
        return all(owners[id(value)] <= within for value in layer.parameters())

    return [layer for layer in layers if shares_nothing(layer)]


def check_shared(module: nn.Module, layout: Layout, mesh: MeshShape, stage_of: Mapping[str, int]) -> None:
    """Check that a mesh keeps every shared parameter shared.

    ``tp`` separates parameters that modules share, and ``pp`` those that stages share. The pair ``layout.tied`` is
    exempt, because it is tied again.

    Raises:
        UnsupportedModel: the mesh would split one parameter into two.
    """
    for names in shared_names(module):
        if layout.tied is not None and set(names) == set(layout.tied):
            continue
        modules = {id(module.get_submodule(name.rpartition(".")[0])) for name in names}
        split = mesh.tp > 1 and len(modules) > 1
        if split or len({stage_of[name] for name in names}) > 1:
            raise UnsupportedModel(
                f"mesh {mesh}: got one parameter under the names {', '.join(names)}, expected tp 1, and pp 1 or all of "
                "them in one stage: each rank of tp and each stage would train its own copy; use dp_replicate "
                "and dp_shard, which keep it shared",
                code="FN-1294",
            )


def check_still_shared(part: nn.Module, shared: Sequence[Sequence[str]]) -> None:
    """Raise UnsupportedModel if a part that is spread has two parameters where the model has one."""
    values = dict(part.named_parameters(remove_duplicate=False))
    for names in shared:
        if len({id(values[name]) for name in names if name in values}) > 1:
            raise UnsupportedModel(
                f"{type(part).__name__}: got two parameters for {', '.join(names)}, which are one in the model; "
                "expected one; train it on another mesh, or give each module its own parameter",
                code="FN-1294",
            )


def retie(part: nn.Module, tied: tuple[str, str]) -> None:
    """Replace the copy by the original if a part has both."""
    copied, original = tied
    values = dict(part.named_parameters(remove_duplicate=False))
    if copied in values and original in values:
        owner, _, key = copied.rpartition(".")
        part.get_submodule(owner).register_parameter(key, values[original])


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """One rank's ends of a tied weight in a pipeline: the original, the copy, both or neither.

    Attributes:
        original: the parameter in the first stage, if it is on this rank.
        copied: the parameter in the last stage, if it is on this rank.
        original_name: name of the parameter in the first stage.
        group: the group of pipeline stages.
        peer: global rank that has the other end.
    """

    original: nn.Parameter | None
    copied: nn.Parameter | None
    original_name: str
    group: dist.ProcessGroup
    peer: int

    def add_gradients(self) -> None:
        """Replace the gradients of both ends by their sum. Each gradient must have the placements of its parameter."""
        ends = [value for value in (self.original, self.copied) if value is not None and value.grad is not None]
        if not ends:
            return
        own = [_local_gradient(value) for value in ends]
        if len(own) == 2:
            total = own[0] + own[1]
        else:
            received = torch.empty_like(own[0])
            send = dist.P2POp(dist.isend, own[0].contiguous(), self.peer, self.group)
            receive = dist.P2POp(dist.irecv, received, self.peer, self.group)
            # Both ranks list the send first, because gloo matches messages by order. A sum of two has no order.
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            total = own[0] + received
        for value in own:
            value.copy_(total)


def build_tie(parts: Mapping[int, nn.Module], tied: tuple[str, str], pipeline: Pipeline, mesh: DeviceMesh) -> Tie:
    """Return this rank's ends of a tied weight.

    Args:
        parts: the modules of this rank by the index of their stage.
        tied: (name of the copy, name of the original).
        pipeline: the stages of each rank.
        mesh: the ranks.
    """
    first, last = pipeline.rank_of(0), pipeline.rank_of(pipeline.num_stages - 1)
    group = mesh.get_group(PIPELINE)
    peer = last if mesh.get_local_rank(PIPELINE) == first else first
    return Tie(
        original=_parameter(parts.get(0), tied[1]),
        copied=_parameter(parts.get(pipeline.num_stages - 1), tied[0]),
        original_name=tied[1],
        group=group,
        peer=dist.get_global_rank(group, peer),
    )


def _parameter(part: nn.Module | None, name: str) -> nn.Parameter | None:
    return None if part is None else dict(part.named_parameters(remove_duplicate=False)).get(name)


def _local_gradient(value: nn.Parameter) -> Tensor:
    assert value.grad is not None
    return value.grad.to_local() if isinstance(value.grad, DTensor) else value.grad
