"""Measures gradient noise: the difference between the gradients of the parts of a batch.

The parts are the accumulation steps of each copy of the model. The gradient of a part is its contribution to the total
gradient, times the number of parts. The measurement is the squared norm of each part's gradient and of their mean.

A part's gradient is available only before it is summed. That is between two accumulation steps of a process, and in the
buckets of DistributedDataParallel before they are sent. AdaScale uses the result (fanin.datacenter.training.rates).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

RateOf = Callable[[float, float], float]
"""The learning rate of a step from (mean of the parts' squared norms, squared norm of their mean)."""


class PartNorms:
    """The gradient norms of one step at a time.

    With DistributedDataParallel it registers the communication hook, of which there can be only one.
    """

    def __init__(self, runner: nn.Module, num_accumulation_steps: int, rate_of: RateOf) -> None:
        self._values = [value for value in runner.parameters() if value.requires_grad]
        self._num_accumulation_steps = num_accumulation_steps
        self._rate_of = rate_of
        self._before: dict[nn.Parameter, Tensor] = {}
        self._squares = torch.zeros((), dtype=torch.float64, device=self._values[0].device)
        self._group: dist.ProcessGroup | None = None
        if isinstance(runner, DistributedDataParallel):
            self._group = runner.process_group
            runner.register_comm_hook(None, self._all_reduce)

    def begin(self) -> None:
        """Start a step: drop the norms of the previous one."""
        self._before.clear()
        self._squares.zero_()

    def add_accumulation_step(self, *, last: bool) -> None:
        """Add the gradient that an accumulation step contributed, while gradients are still this rank's own."""
        if last and self._group is not None:
            # These gradients are already summed over the copies. The communication hook has measured them before.
            return
        for value in self._values:
            if value.grad is not None:
                self._add(value, value.grad)
                if not last:
                    self._before[value] = value.grad.clone()

    def rate(self) -> float:
        """Return the learning rate of the step after its last accumulation step. A collective."""
        total = torch.zeros_like(self._squares)
        for value in self._values:
            if value.grad is not None:
                total += _square(value.grad)
        sums, num_copies = torch.stack([self._squares, total]), 1
        if self._group is not None:
            # Every rank has the total, but different processors may differ in the last bit. The average makes all ranks
            # use the same rate.
            num_copies = self._group.size()
            dist.all_reduce(sums, group=self._group)
        parts, totals = (sums / num_copies).tolist()
        # The loss of each accumulation step is already multiplied by the number of copies, because
        # DistributedDataParallel averages.
        return self._rate_of(parts * self._num_accumulation_steps, totals)

    def _all_reduce(self, state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        for value, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            assert isinstance(value, nn.Parameter)
            self._add(value, gradient)
        assert self._group is not None
        return allreduce_hook(self._group, bucket)

    def _add(self, value: nn.Parameter, gradient: Tensor) -> None:
        before = self._before.get(value)
        self._squares += _square(gradient if before is None else gradient - before)


def _square(value: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(value.detach(), dtype=torch.float64)
    return norm.square()
