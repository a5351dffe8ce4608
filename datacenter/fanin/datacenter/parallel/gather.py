"""Gathers full parameters and gradients from the shards of all ranks, and loads full parameters into the shards.

Names, shapes and dtypes are those of the model in one process.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fanin.datacenter.parallel.build import RankModel
from fanin.datacenter.parallel.transforms.slices import slices
from fanin.edge.tensors import count_differences
from fanin.protos.texts import counted


def full_parameters(model: RankModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and full value of each parameter on the CPU of every rank.

    A collective: all ranks must iterate together. Only one full parameter is in memory at a time, unless the caller
    keeps more.

    Raises:
        ValueError: the shape or dtype of a parameter has changed since the model was built.
    """
    return _full_tensors(model, lambda value: value.detach())


def full_gradients(model: RankModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and full gradient of each parameter; zeros for a parameter that has none.

    A collective, as ``full_parameters``. The gradients must have the placements of their parameters
    (``gradients.settle``).
    """
    return _full_tensors(model, lambda value: torch.zeros_like(value) if value.grad is None else value.grad)


@torch.no_grad()
def _full_tensors(model: RankModel, tensor_of: Callable[[nn.Parameter], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the full ``tensor_of`` each parameter, which has its shape and dtype."""
    group = model.axes.pipeline
    parameters = {stage: dict(part.named_parameters()) for stage, part in model.parts.items()}
    for name, entry in model.table.items():
        own = parameters.get(entry.stage, {}).get(name)
        if own is None:
            value = torch.empty(entry.shape, dtype=entry.dtype, device=model.device)
        else:
            shard = tensor_of(own)
            value = shard.full_tensor() if isinstance(shard, DTensor) else shard
            if (value.shape, value.dtype) != (entry.shape, entry.dtype):
                raise ValueError(
                    f"{name}: got {value.dtype} {list(value.shape)}, expected {entry.dtype} {list(entry.shape)} as "
                    "when the model was built; do not replace the parameters of the parts"
                )
        if group is not None:
            owner = dist.get_global_rank(group, model.parallel.pipeline().rank_of(entry.stage))
            value = value.to(model.device).contiguous()
            dist.broadcast(value, owner, group=group)
        yield name, value.cpu().clone()


def full_buffers(model: RankModel) -> dict[str, Tensor]:
    """Return the floating-point buffers of all stages by name, on the CPU of every rank. A collective.

    Each is that of one rank of its stage: copies of the model may have other running statistics.
    """
    own = {
        # torch replicates the buffers of a module that tp splits.
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()
        for part in model.parts.values()
        for name, value in part.named_buffers()
        if value.is_floating_point()
    }
    group, stages = model.axes.pipeline, [own]
    if group is not None:
        stages = [{} for _ in range(group.size())]
        dist.all_gather_object(stages, own, group=group)
    return {name: value for stage in stages for name, value in stage.items()}


@torch.no_grad()
def load_full(model: RankModel, values: Mapping[str, Tensor]) -> None:
    """Load full values into the shards of this rank.

    Raises:
        ValueError: names or shapes differ from those of the model. Nothing is changed.
    """
    missing, unknown = set(model.table) - set(values), set(values) - set(model.table)
    wrong = [name for name in set(model.table) & set(values) if model.table[name].shape != values[name].shape]
    if missing or unknown or wrong:
        raise ValueError(
            f"got {counted(len(values), 'parameter')}: {count_differences(unknown, wrong, missing)}, such as "
            f"{min([*missing, *unknown, *wrong])}"
        )
    copied, original = (None, "") if model.tie is None else (model.tie.copied, model.tie.original_name)
    for part in model.parts.values():
        for name, value in part.named_parameters():
            _copy_shard(value, values[original if value is copied else name])


def _copy_shard(value: Tensor, full_value: Tensor) -> None:
    if isinstance(value, DTensor):
        # Not distribute_tensor: see ``slices`` for the bounds that it takes.
        value.to_local().copy_(full_value[slices(value)])
    else:
        value.copy_(full_value)
