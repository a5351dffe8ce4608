"""Work that the first rank does for all: the other ranks wait for its result, or raise its error."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import torch.distributed as dist

from fanin.protos.errors import FaninError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome(Generic[T]):
    value: T


def on_first_rank(compute: Callable[[Callable[[], None]], T]) -> T:
    """Compute on the first rank, and return the result on all ranks. If the first rank fails, all raise its error.

    A collective. A process without torch.distributed computes for itself.

    Args:
        compute: returns the result. It receives a function to call from time to time. No rank waits for longer than the
            time between two calls, because the timeout of a group is that of a step.

    Raises:
        FaninError: the error of the first rank.
    """
    if not dist.is_initialized():
        return compute(lambda: None)

    def broadcast(message: _Outcome[T] | FaninError | None) -> _Outcome[T] | FaninError | None:
        messages = [message]
        dist.broadcast_object_list(messages, 0)
        return messages[0]

    outcome: _Outcome[T] | FaninError | None = None
    if dist.get_rank() == 0:
        try:
            outcome = _Outcome(value=compute(lambda: cast(None, broadcast(None))))
        except FaninError as exc:
            outcome = exc
        broadcast(outcome)
    while outcome is None:
        outcome = broadcast(None)
    if isinstance(outcome, FaninError):
        raise outcome
    return outcome.value
