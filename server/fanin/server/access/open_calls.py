"""The calls under way, by caller: a ban, a revocation or the expiry of a token ends them at once.

A call is ended by cancelling its task. Within ``hold`` the cancellation becomes the error that its caller receives. So
every call of every service ends in the same way, whatever it waits for: work, a permit, the peer or the database.
"""

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fanin.protos.errors import FaninError
from fanin.protos.messages import Principal
from fanin.server.storage.access import refused_token


@dataclass(slots=True, eq=False)
class _OpenCall:
    task: asyncio.Task[object]
    error: FaninError | None = None

    def end(self, error: FaninError) -> None:
        """End the call with an error, unless another one ends it already."""
        if self.error is None:
            self.error = error
            self.task.cancel()


class OpenCalls:
    """The calls under way of all authenticated callers."""

    def __init__(self) -> None:
        self._calls: dict[Principal, set[_OpenCall]] = {}

    @contextmanager
    def hold(self, caller: object, left_s: float) -> Iterator[None]:
        """Let a call be ended within this context. A caller that is not authenticated is not held.

        Args:
            caller: The principal.
            left_s: Seconds until its token expires; infinity: never.

        Raises:
            FaninError: The error with which the call was ended.
        """
        task = asyncio.current_task()
        if not isinstance(caller, Principal) or task is None:
            yield
            return
        call = _OpenCall(task)
        self._calls.setdefault(caller, set()).add(call)
        timer = None
        if left_s < math.inf:
            timer = asyncio.get_running_loop().call_later(
                left_s, lambda: call.end(refused_token(f"control: the token {caller.id}"))
            )
        try:
            yield
        except asyncio.CancelledError:
            if call.error is None:
                raise
            task.uncancel()
            raise call.error from None
        finally:
            if timer is not None:
                timer.cancel()
            calls = self._calls[caller]
            calls.discard(call)
            if not calls:
                del self._calls[caller]

    def end(self, caller: Principal, error: Callable[[], FaninError]) -> int:
        """End the calls of a caller, except the one that runs now. Return their number."""
        current = asyncio.current_task()
        ended = [call for call in self._calls.get(caller, ()) if call.task is not current]
        for call in ended:
            call.end(error())
        return len(ended)
