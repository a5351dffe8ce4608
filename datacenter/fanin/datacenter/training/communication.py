"""How whole copies of a model speak less: what their gradients travel as, and steps that a rank takes by itself.

For meshes of dp_replicate alone, which DistributedDataParallel keeps alike; FSDP2 has no such hooks. fp16 and bf16
halve what travels, PowerSGD (Vogels et al. 2019, arXiv 1905.13727) sends factors of rank r and keeps what they miss for
the next step, and with ``local_period`` H the copies are averaged every H steps (post-local SGD: Lin et al. 2018, arXiv
1808.07217). The first ``dense_steps`` are exact: that is when gradients change most.
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
"""torch's PowerSGD rebuilds its buckets in the first step, and keeps no memory across that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationSettings:
    """How copies speak.

    ``hook``: the form of gradients on their way. ``rank``: of PowerSGD's factors. ``local_period``: steps between two
    averages of the copies, 0 for gradients that meet in each step. ``dense_steps``: before PowerSGD or local steps.
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
        """Whether gradients travel as they are, in each step."""
        return self.hook == "none" and not self.local_period


def check_communication(settings: CommunicationSettings, parallel: ParallelSettings, every: Sequence[int]) -> None:
    """Raise InvalidInput unless the mesh has such copies, and the steps after which something is looked at are those
    after which they are alike."""
    if settings.plain:
        return
    if parallel.sharded or parallel.pipelined or parallel.mesh.tp > 1 or parallel.mesh.dp_replicate == 1:
        raise InvalidInput(
            f"communication: got hook {settings.hook!r} and local_period {settings.local_period} for mesh "
            f"{parallel.mesh} (replicate {parallel.replicate!r}), expected dp_replicate alone, kept alike by ddp"
        )
    period = settings.local_period
    if period and (every[0] == 0 or any(steps % period for steps in every)):
        raise InvalidInput(
            f"communication: got local_period {period}, an evaluation every {every[0]} and a checkpoint every "
            f"{every[1]} steps, expected multiples of the period: between averages copies differ"
        )


def check_kept(settings: CommunicationSettings, folder: Path | None) -> None:
    """Raise InvalidInput if there is a ``folder`` for checkpoints, and copies have what no checkpoint holds: what each
    has not yet sent, or its own parameters."""
    if folder is not None and (settings.local_period or settings.hook == "powersgd"):
        raise InvalidInput(
            f"communication: got hook {settings.hook!r} and local_period {settings.local_period} beside checkpoints in "
            f"{folder}, expected neither powersgd nor local steps: a checkpoint cannot hold what each copy has of its "
            "own; leave one of them out"
        )


def check_traffic(settings: CommunicationSettings, *, counted: bool) -> None:
    """Raise InvalidInput if what a step sends is to be ``counted``, which is done once, and steps differ in it."""
    if counted and (settings.local_period or settings.hook == "powersgd"):
        raise InvalidInput(
            f"watch: got traffic, hook {settings.hook!r} and local_period {settings.local_period}, expected neither "
            "powersgd nor local steps: one step is counted, and of these not all send the same; leave traffic out"
        )


def check_skips(settings: CommunicationSettings, max_skips: int) -> None:
    """Raise InvalidInput if steps may be skipped, and PowerSGD would keep their gradients for the steps after them."""
    if max_skips and settings.hook == "powersgd":
        raise InvalidInput(
            f"training: got max_skips {max_skips} and hook 'powersgd', expected one of them: the hook adds what it did "
            "not send of a gradient to the next one, also if it is not finite; set max_skips 0, or take another hook"
        )


def apply_communication(runner: object, settings: CommunicationSettings) -> None:
    """Have the copies of a model speak so; ``runner`` is what a step calls."""
    if settings.plain:
        return
    assert isinstance(runner, DistributedDataParallel), "checked before: these are copies kept alike by DDP"
    if settings.local_period:
        # A group of each rank by itself: every rank takes part in making all of them.
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
    """The mean of a bucket over the ranks, summed in bfloat16. torch's own wants NCCL; gloo sums bfloat16 as well."""
    sent = bucket.buffer().to(torch.bfloat16).div_(group.size())
    future: torch.futures.Future[Tensor] = dist.all_reduce(sent, group=group, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def average_copies(parameters: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Give every rank the mean of all ranks' parameters."""
    for value in parameters:
        dist.all_reduce(value.data, group=group)
        value.data.div_(group.size())
