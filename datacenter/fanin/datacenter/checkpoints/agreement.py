"""Agreement among ranks: one outcome for all, from the facts of each rank.

A checkpoint is saved and loaded by all ranks together. A rank that raised an error alone would leave the others waiting
in a collective. Therefore the ranks share every decision and every error through a RankGroup, in the same order.
"""

import warnings
from typing import TypeVar

import torch
import torch.distributed as dist

from fanin.protos.errors import FaninError, error_named, kind_name

T = TypeVar("T")


class RankGroup:
    """The ranks of a job, with a separate process group. A single process without torch.distributed is a group of 1.

    The separate process group keeps these messages apart from those of the training, which runs at the same time.
    """

    def __init__(self) -> None:
        self.process_group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        if self.process_group is None:
            # A single process is intended here. DCP would warn about it, also in a background thread.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")

    @property
    def rank(self) -> int:
        """This rank's number."""
        return 0 if self.process_group is None else dist.get_rank()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return 1 if self.process_group is None else dist.get_world_size()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is True on any rank. A collective."""
        if self.process_group is None:
            return flag
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.process_group)
        return bool(flags)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order. A collective."""
        values = [value] * self.size
        if self.process_group is not None:
            dist.all_gather_object(values, value, group=self.process_group)
        return values

    def raise_first(self, error: FaninError | None) -> None:
        """Raise the first rank's error on all ranks; return if no rank has one. A collective."""
        for row in self.gather(None if error is None else (kind_name(error), str(error), error.code)):
            if row is not None:
                shared = error_named(*row)
                assert shared is not None, "one of our own"
                raise shared from (None if error is None else error.__cause__)
