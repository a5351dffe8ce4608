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
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from fanin.datacenter.parallel.settings import ParallelSettings
from fanin.protos.errors import InvalidInput

Hook = Literal["none", "fp16", "bf16", "powersgd"]
MIN_DENSE_STEPS = 2
"""torch's PowerSGD rebuilds its buckets in the first step and loses its error memory then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationSettings:
    """The communication between replicas, the table ``[communication]`` of a config.

    Attributes:
        hook: Compression of the gradients.
        rank: Rank of PowerSGD's factors.
        local_period: Steps between two averages of the replicas; 0 to average the gradients in every step.
        dense_steps: Exact steps before PowerSGD or local steps begin.
    """

    hook: Hook = "none"
    rank: int = 4
    local_period: int = 0
    dense_steps: int = 10

    def __post_init__(self) -> None:
        if self.rank < 1 or self.local_period < 0 or self.dense_steps < MIN_DENSE_STEPS:
            raise InvalidInput(
                f"communication: got rank {self.rank}, local_period {self.local_period} and dense_steps "
                f"{self.dense_steps}, expected at least 1, 0 and {MIN_DENSE_STEPS}"
            )
        if self.local_period and self.hook != "none":
            raise InvalidInput(
                f"communication: got hook {self.hook!r} and local_period {self.local_period}, expected one of them: in "
                "local steps no gradient travels"
            )

    @property
    def plain(self) -> bool:
        """Whether every step sends the gradients uncompressed."""
        return self.hook == "none" and not self.local_period


def check_communication(settings: CommunicationSettings, parallel: ParallelSettings, every: Sequence[int]) -> None:
    """Raise InvalidInput unless the mesh supports the settings.

    With local steps, evaluations and checkpoints must fall on steps at which the replicas agree.

    Args:
        settings: The communication settings.
        parallel: The job's mesh.
        every: Steps between (evaluations, checkpoints).
    """
    if settings.plain:
        return
    if parallel.sharded or parallel.pipelined or parallel.mesh.tp > 1 or parallel.mesh.dp_replicate == 1:
        raise InvalidInput(
            f"communication: got hook {settings.hook!r} and local_period {settings.local_period} for mesh "
            f"{parallel.mesh} (replicate {parallel.replicate!r}), expected a mesh of dp_replicate only, "
            "with replicate 'ddp'"
        )
    period = settings.local_period
    if period and (every[0] == 0 or any(steps % period for steps in every)):
        raise InvalidInput(
            f"communication: got local_period {period}, an evaluation every {every[0]} and a checkpoint every "
            f"{every[1]} steps, expected multiples of the period: between averages copies differ"
        )


def check_checkpointable(settings: CommunicationSettings, folder: Path | None) -> None:
    """Raise InvalidInput if the job writes checkpoints to ``folder`` and the replicas have separate state.

    A checkpoint cannot store each replica's unsent gradients (PowerSGD) or own parameters (local steps).
    """
    if folder is not None and (settings.local_period or settings.hook == "powersgd"):
        raise InvalidInput(
            f"communication: got hook {settings.hook!r} and local_period {settings.local_period} beside checkpoints in "
            f"{folder}, expected neither powersgd nor local steps: a checkpoint cannot hold what each copy has of its "
            "own; leave one of them out"
        )


def check_traffic(settings: CommunicationSettings, *, counted: bool) -> None:
    """Raise InvalidInput if bytes are to be ``counted`` and steps send different amounts, as only one is counted."""
    if counted and (settings.local_period or settings.hook == "powersgd"):
        raise InvalidInput(
            f"watch: got traffic, hook {settings.hook!r} and local_period {settings.local_period}, expected neither "
            "powersgd nor local steps: one step is counted, and of these not all send the same; leave traffic out"
        )


def check_skips(settings: CommunicationSettings, max_skips: int) -> None:
    """Raise InvalidInput if steps may be skipped and PowerSGD would add their gradients to later steps."""
    if max_skips and settings.hook == "powersgd":
        raise InvalidInput(
            f"training: got max_skips {max_skips} and hook 'powersgd', expected one of them: the hook adds what it did "
            "not send of a gradient to the next one, also if it is not finite; set max_skips 0, or take another hook"
        )


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
    sent = bucket.buffer().to(torch.bfloat16).div_(group.size())
    future: torch.futures.Future[Tensor] = dist.all_reduce(sent, group=group, async_op=True).get_future()
    return future.then(lambda reduced: bucket.buffer().copy_(reduced.value()[0]))


def average_copies(parameters: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replace the parameters of every rank by their mean over the group."""
    for value in parameters:
        dist.all_reduce(value.data, group=group)
        value.data.div_(group.size())
