"""Data parallelism: every rank's part of a batch adds its gradients to the others'.

FSDP2 for sharded parameters, and for whole copies within a pipeline or with split layers; DistributedDataParallel for
whole copies alone (in a pipeline of torch 2.13 its buckets fail: sizes are inferred by a backward pass of its own,
which counts each gradient twice). Gradients are *summed*: the loss was divided by the count of the whole batch.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fanin.datacenter.parallel.mesh import REPLICATE, SHARD
from fanin.datacenter.parallel.settings import ParallelSettings
from fanin.datacenter.parallel.ties import unshared

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def apply_data_parallel(
    part: nn.Module, layers: list[nn.Module], mesh: DeviceMesh, settings: ParallelSettings
) -> nn.Module:
    """What a step calls: the part itself, changed in place, or DistributedDataParallel around it."""
    if settings.sharded:
        _fully_shard(part, layers, mesh, settings)
        return part
    if settings.mesh.dp_replicate > 1 and any(value.requires_grad for value in part.parameters()):
        # All ranks begin alike, so nothing is sent at the start; buffers stay each rank's own.
        return DistributedDataParallel(
            part, process_group=mesh.get_group(REPLICATE), forward_sync_buffers=False, init_sync=False
        )
    return part


def _fully_shard(part: nn.Module, layers: list[nn.Module], mesh: DeviceMesh, settings: ParallelSettings) -> None:
    # With one replica the mesh has one axis: FSDP2 would sum over the other all the same.
    ranks = mesh[REPLICATE, SHARD] if settings.mesh.dp_replicate > 1 else mesh[SHARD]
    half = HALF.get(settings.precision)
    precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if settings.offload else OffloadPolicy()
    # The root last: it takes what no layer has alone, and a pipeline holds back the sums of a root alone.
    for module in (*unshared(layers, part), part):
        fully_shard(
            module,
            mesh=ranks,
            reshard_after_forward=settings.reshards,
            mp_policy=precision,
            offload_policy=offload,
        )
    for module in part.modules():
        if isinstance(module, FSDPModule):
            # Of FSDP2's means, one cannot be had with gloo and the other divides twice; both together are a sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    assert isinstance(part, FSDPModule)


def reshard(part: nn.Module) -> None:
    """Free the whole parameters that a forward pass without a backward pass leaves where ``reshards`` is False.

    They are copies in the dtype of the computation. Until they are freed a module has them in the place of its own
    parameters, and what is read is rounded, and what is written is lost.
    """
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
