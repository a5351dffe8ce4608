"""The worker of a Run: it carries out the Run's effects in order, one at a time.

A failed effect is repeated as long as a repetition may help (``troubles``). Meanwhile the Run waits and loses nothing.
After that the worker gives up the effect, and the driver decides on the next step. In both cases the worker continues
with the next effect: a Run without a worker would hang without a message. Only a worker whose driver was superseded
ends.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Protocol

from fanin.edge.scopes import about_run
from fanin.protos.errors import FaninError, Superseded
from fanin.server.protocols import events as e
from fanin.server.rounds.effects import RoundWork
from fanin.server.rounds.troubles import pause_s, trouble_of

LOG = logging.getLogger("fanin.server.rounds.worker")
EFFECTS = logging.getLogger("fanin.server")
QueuedEffect = tuple[RoundWork | None, e.Effect]
"""An effect, and the work of the Round that it belongs to."""
EffectHandler = Callable[[QueuedEffect], Awaitable[None]]
FailureHandler = Callable[[QueuedEffect, str], Awaitable[None]]
SupersededHandler = Callable[[Superseded], None]


class Observer(Protocol):
    """A listener that receives each effect and cannot change it."""

    def starting(self, run_id: str, effect: e.Effect) -> None:
        """Called before an effect is carried out."""
        ...

    def finished(self, run_id: str, effect: e.Effect) -> None:
        """Called after an effect, when its changes are as durable as the settings demand."""
        ...


class LogObserver:
    """An Observer that writes each effect to the log ``fanin.server``, at debug level."""

    def starting(self, run_id: str, effect: e.Effect) -> None:
        """Log an effect that is about to be carried out."""
        about_run(EFFECTS, run_id).debug("%s", effect)

    def finished(self, run_id: str, effect: e.Effect) -> None:
        """Log an effect that was carried out."""
        about_run(EFFECTS, run_id).debug("done %s", type(effect).__name__)


class Worker:
    """The queue of a Run's effects.

    Attributes:
        trouble: Reason for repeating the current effect; empty if the effect is not repeated.
    """

    def __init__(self, run_id: str, observer: Observer) -> None:
        self.trouble = ""
        self._run_id = run_id
        self._observer = observer
        self._queue: asyncio.Queue[QueuedEffect] = asyncio.Queue()
        self._hurried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def put(self, work: RoundWork | None, effect: e.Effect) -> None:
        """Add an effect to the queue."""
        self._queue.put_nowait((work, effect))

    def drop_all(self) -> None:
        """Remove all effects that have not started."""
        while not self._queue.empty():
            self._queue.get_nowait()

    def hurry(self) -> None:
        """End the pause before the next try, because the cause of the failure may be gone."""
        self._hurried.set()

    def start(self, carry_out: EffectHandler, give_up: FailureHandler, leave: SupersededHandler) -> None:
        """Start to carry out effects.

        Args:
            carry_out: Carries out one effect.
            give_up: Called with an effect that cannot be carried out, and the reason.
            leave: Called when another driver has taken the Run. The worker carries out no further effect.
        """
        self._task = asyncio.create_task(self._carry_out_all(carry_out, give_up, leave), name=f"run {self._run_id}")

    async def stop(self) -> None:
        """Stop at once, even in the middle of an effect."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _carry_out_all(self, carry_out: EffectHandler, give_up: FailureHandler, leave: SupersededHandler) -> None:
        try:
            while True:
                await self._carry_out(await self._queue.get(), carry_out, give_up)
                self.trouble = ""
        except Superseded as exc:
            leave(exc)

    async def _carry_out(self, queued: QueuedEffect, carry_out: EffectHandler, give_up: FailureHandler) -> None:
        work, effect = queued
        log = about_run(LOG, self._run_id, 0 if work is None else work.record.round)
        began_s = asyncio.get_running_loop().time()
        for num_tries in count(1):
            self._hurried.clear()
            self._observer.starting(self._run_id, effect)
            try:
                await carry_out(queued)
                self._observer.finished(self._run_id, effect)
                return
            except Superseded:
                raise
            except Exception as exc:  # Any error: a Run without a worker would hang.
                trouble = trouble_of(effect, exc)
                tried_s = asyncio.get_running_loop().time() - began_s
                is_last = tried_s >= trouble.give_up_after_s
                text = f"{trouble.effect} failed{' and is given up' * is_last}"
                log.error("%s: %s", text, exc, exc_info=_needs_trace(exc))
            if is_last and await self._is_given_up(queued, trouble.given_up(tried_s), give_up):
                return
            self.trouble = trouble.reason
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s(num_tries)):
                    await self._hurried.wait()

    async def _is_given_up(self, queued: QueuedEffect, reason: str, give_up: FailureHandler) -> bool:
        try:
            await give_up(queued, reason)
        except Superseded:
            raise
        except Exception as exc:  # The record cannot be written now, so the effect is repeated.
            log = about_run(LOG, self._run_id)
            log.error("giving up failed: %s", exc, exc_info=_needs_trace(exc))
            return False
        return True


def _needs_trace(error: Exception) -> bool:
    """Return whether the log needs a traceback. The text of a FaninError is enough."""
    return not isinstance(error, FaninError)
