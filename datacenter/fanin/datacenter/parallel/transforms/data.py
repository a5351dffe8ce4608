"""Data parallelism: sums the gradients of all ranks that train on different parts of a batch.

FSDP2 handles sharded parameters, and also full copies in a pipeline or with split layers. DistributedDataParallel
handles full copies otherwise. It fails in a pipeline of torch 2.13: the backward pass of shape inference makes its
buckets count each gradient twice.

Gradients are *summed*, not averaged: the loss is already divided by the count of the global batch.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fanin.datacenter.parallel.settings import ParallelSettings
from fanin.datacenter.parallel.transforms.ties import unshared
from fanin.datacenter.ranks.mesh import REPLICATE, SHARD

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def apply_data_parallel(
    part: nn.Module, layers: list[nn.Module], mesh: DeviceMesh, settings: ParallelSettings, *, may_skip: bool
) -> nn.Module:
    """Apply data parallelism to a part of the model.

    Args:
        part: a stage, or the complete model. FSDP2 changes it in place.
        layers: its layers, which FSDP2 shards one at a time.
        mesh: the ranks.
        settings: how the model is spread.
        may_skip: whether a step may leave a layer out. DistributedDataParallel then looks for parameters without a
            gradient in each step; otherwise it would wait for them.

    Returns:
        The module that a training step calls: the part itself, or DistributedDataParallel around it.
    """
    if settings.sharded:
        _fully_shard(part, layers, mesh, settings)
        return part
    if settings.mesh.dp_replicate > 1 and any(value.requires_grad for value in part.parameters()):
        # All ranks start with equal parameters, so none are sent. Buffers are not synchronized.
        return DistributedDataParallel(
            part,
            process_group=mesh.get_group(REPLICATE),
            forward_sync_buffers=False,
            init_sync=False,
            find_unused_parameters=may_skip,
        )
    return part


def _fully_shard(part: nn.Module, layers: list[nn.Module], mesh: DeviceMesh, settings: ParallelSettings) -> None:
    # With one replica the mesh has one axis, because FSDP2 would also sum over an axis of one rank.
    ranks = mesh[REPLICATE, SHARD] if settings.mesh.dp_replicate > 1 else mesh[SHARD]
    half = HALF.get(settings.precision)
    precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if settings.offload else OffloadPolicy()
    # The root is last and has the parameters that do not belong to a single layer. A pipeline delays the gradient sums
    # of a root only.
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
            # FSDP2 has two ways to average: gloo does not support one, and the other divides twice. These two settings
            # together give a plain sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    assert isinstance(part, FSDPModule)


def reshard(part: nn.Module) -> None:
    """Free the gathered parameters that remain after a forward pass without a backward pass if ``reshards`` is False.

    They are copies in the dtype of the computation. Until they are freed they replace the module's own parameters:
    values that are read are rounded, and values that are written are lost.
    """
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
