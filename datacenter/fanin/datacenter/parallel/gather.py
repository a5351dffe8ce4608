"""A model's whole parameters out of what is spread over the ranks, and back, by the names they have in one process."""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from fanin.datacenter.parallel.build import Built
from fanin.datacenter.parallel.mesh import PIPELINE


@torch.no_grad()
def whole_parameters(built: Built) -> Iterator[tuple[str, Tensor]]:
    """Name and whole value of each parameter, one after the other, on the CPU of every rank.

    A collective of all ranks. Each holds one whole parameter at a time, if its caller does. Raises ValueError if a
    part has another value under a name than the model's table says.
    """
    group = built.mesh.get_group(PIPELINE) if built.mesh is not None and built.parallel.pipelined else None
    found = {stage: dict(part.named_parameters()) for stage, part in built.parts.items()}
    for name, entry in built.table.items():
        mine = found.get(entry.stage, {}).get(name)
        if mine is None:
            value = torch.empty(entry.shape, dtype=entry.dtype, device=built.device)
        else:
            value = mine.full_tensor() if isinstance(mine, DTensor) else mine.detach()
            if (value.shape, value.dtype) != (entry.shape, entry.dtype):
                raise ValueError(
                    f"{name}: got {value.dtype} {list(value.shape)}, expected {entry.dtype} {list(entry.shape)} as "
                    "when the model was built; leave the parameters of the parts as they are"
                )
        if group is not None:
            owner = dist.get_global_rank(group, built.parallel.pipeline().rank_of(entry.stage))
            value = value.to(built.device).contiguous()
            dist.broadcast(value, owner, group=group)
        yield name, value.cpu().clone()


@torch.no_grad()
def load_whole(built: Built, values: Mapping[str, Tensor]) -> None:
    """Give each rank its share of whole values. Raises ValueError, and changes nothing, if they are not the model's."""
    missing, unknown = set(built.table) - set(values), set(values) - set(built.table)
    wrong = [name for name in set(built.table) & set(values) if built.table[name].shape != values[name].shape]
    if missing or unknown or wrong:
        raise ValueError(
            f"got {len(values)} parameters of which {len(unknown)} are not the model's and {len(wrong)} have another "
            f"shape, and {len(missing)} are missing, such as {min([*missing, *unknown, *wrong])}"
        )
    copied, original = (None, "") if built.tie is None else (built.tie.copied, built.tie.original_name)
    for part in built.parts.values():
        for name, value in part.named_parameters():
            _take(value, values[original if value is copied else name])


def _take(value: Tensor, whole: Tensor) -> None:
    whole = whole.to(value.dtype)
    if isinstance(value, DTensor):
        spread = distribute_tensor(whole.to(value.device), value.device_mesh, value.placements, src_data_rank=None)
        value.to_local().copy_(spread.to_local())
    else:
        value.copy_(whole)
