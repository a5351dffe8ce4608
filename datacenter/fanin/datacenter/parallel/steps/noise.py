"""How much the gradients of a batch's parts differ: the squared norms of each part's gradient, and of their mean.

Parts are the turns of each copy of the model, and a part's gradient is what it adds to the whole, times the number of
parts. It is there by itself only before it meets others: between two turns of a process, and in the buckets of
DistributedDataParallel before they are sent. This is what AdaScale needs to know (fanin.datacenter.training.rates).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

RateOf = Callable[[float, float], float]
"""The rate of a step, given the mean of the parts' squared norms, and the squared norm of their mean."""


class PartNorms:
    """The norms of one step after the other; takes the place of a communication hook, of which there can be one."""

    def __init__(self, runner: nn.Module, num_turns: int, rate_of: RateOf) -> None:
        self._values = [value for value in runner.parameters() if value.requires_grad]
        self._num_turns = num_turns
        self._rate_of = rate_of
        self._before: dict[nn.Parameter, Tensor] = {}
        self._squares = torch.zeros((), dtype=torch.float64, device=self._values[0].device)
        self._group: dist.ProcessGroup | None = None
        if isinstance(runner, DistributedDataParallel):
            self._group = runner.process_group
            runner.register_comm_hook(None, self._meet)

    def begin(self) -> None:
        """Forget the step before."""
        self._before.clear()
        self._squares.zero_()

    def turn_ended(self, *, last: bool) -> None:
        """Take note of a turn: of what it added to the gradients, which are still this rank's own."""
        if last and self._group is not None:
            # They have met the other copies' by now; the buckets told of them before.
            return
        for value in self._values:
            if value.grad is not None:
                self._add(value, value.grad)
                if not last:
                    self._before[value] = value.grad.clone()

    def rate(self) -> float:
        """The rate of the step, all turns of which have ended. A collective."""
        whole = torch.zeros_like(self._squares)
        for value in self._values:
            if value.grad is not None:
                whole += _square(value.grad)
        sums, num_copies = torch.stack([self._squares, whole]), 1
        if self._group is not None:
            # The whole is every rank's, but on unlike processors not to the last bit, and all are to go on alike.
            num_copies = self._group.size()
            dist.all_reduce(sums, group=self._group)
        parts, wholes = (sums / num_copies).tolist()
        # A turn's gradient is multiplied by the number of copies already, as DistributedDataParallel wants it.
        return self._rate_of(parts * self._num_turns, wholes)

    def _meet(self, state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
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
