"""Reduced communication between replicas of a model: compressed gradients, and local steps.

It applies to meshes of dp_replicate alone, with DistributedDataParallel (DDP); FSDP2 has no such hooks. There are three
methods:

- ``fp16`` and ``bf16`` halve the bytes of the gradients.
- ``powersgd`` sends low-rank factors of the gradients, and adds their error to the next step's gradients.
- ``local_period`` H lets each replica take H steps alone, and then averages the replicas (post-local SGD).

The first ``dense_steps`` of PowerSGD and of local steps are exact, because gradients change most at the start.

Reference:
    PowerSGD: Vogels et al. 2019, arXiv 1905.13727.
    Post-local SGD: Lin et al. 2018, arXiv 1808.07217.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from fanin.datacenter.config.communication import CommunicationSettings


def apply_communication(runner: object, settings: CommunicationSettings) -> None:
    """Register the hooks on ``runner``, the DDP module that a step calls."""
    if settings.plain:
        return
    assert isinstance(runner, DistributedDataParallel), "check_communication allows only DDP"
    if settings.local_period:
        # A process group for each single rank. Creating a group is a collective, so every rank creates all of them.
        group = runner.process_group
        ranks = dist.get_process_group_ranks(group)
        alone, _ = dist.new_subgroups_by_enumeration([[rank] for rank in ranks])  # type: ignore[no-untyped-call]
        state = local_sgd.PostLocalSGDState(  # type: ignore[no-untyped-call]
            process_group=group,
            subgroup=alone,
            start_localSGD_iter=settings.dense_steps,
            post_local_gradient_allreduce=False,
        )
        runner.register_comm_hook(state, local_sgd.post_localSGD_hook)
    elif settings.hook == "powersgd":
        factors = power_sgd.PowerSGDState(
            process_group=runner.process_group,
            matrix_approximation_rank=settings.rank,
            start_powerSGD_iter=settings.dense_steps,
        )
        runner.register_comm_hook(factors, power_sgd.powerSGD_hook)
    elif settings.hook == "fp16":
        runner.register_comm_hook(runner.process_group, fp16_compress_hook)
    else:
        runner.register_comm_hook(runner.process_group, bf16_hook)


def bf16_hook(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Return the mean of a bucket over the ranks, summed in bfloat16. Unlike torch's own hook it supports gloo."""
    compressed = bucket.buffer().to(torch.bfloat16).div_(group.size())
    future: torch.futures.Future[Tensor] = dist.all_reduce(compressed, group=group, async_op=True).get_future()
    return future.then(lambda reduced: bucket.buffer().copy_(reduced.value()[0]))


def average_statistics(buffers: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replace the buffers of every rank by their mean over the group. A constant keeps its bits.

    The mean is that of the differences from the first rank: a sum of constants may round, or overflow.
    """
    for value in buffers:
        first = value.clone()
        dist.broadcast(first, group=group, group_src=0)
        difference = torch.where(value == first, 0.0, value - first) / group.size()
        dist.all_reduce(difference, group=group)
        value.copy_(torch.where(difference == 0.0, first, first + difference))


def average_copies(parameters: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replace the parameters of every rank by their mean over the group."""
    for value in parameters:
        dist.all_reduce(value.data, group=group)
        value.data.div_(group.size())
