"""Carries out the effects of one Run, in order and one at a time.

An effect that fails is tried again while that may help (``troubles``); meanwhile the Run waits and nothing is lost.
After that it is given up, which is the driver's to handle. Either way the worker goes on with the next effect: a Run
whose worker ended would hang without a message.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from itertools import count

from fanin.protos.errors import FaninError
from fanin.server.observe.observer import Observer
from fanin.server.rounds import events as e
from fanin.server.rounds.effects import RoundWork
from fanin.server.rounds.troubles import RETRY_S, trouble_of

LOG = logging.getLogger("fanin.server.runs.driver")
Order = tuple[RoundWork | None, e.Effect]
"""An effect with the work of the Round that asked for it."""
Do = Callable[[Order], Awaitable[None]]
GiveUp = Callable[[Order, str], Awaitable[None]]


class Worker:
    """The queue of a Run's effects. ``trouble`` says why the present one is tried again; empty: it is not."""

    def __init__(self, run_id: str, observer: Observer) -> None:
        self.trouble = ""
        self._run_id = run_id
        self._observer = observer
        self._orders: asyncio.Queue[Order] = asyncio.Queue()
        self._hurried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def put(self, work: RoundWork | None, effect: e.Effect) -> None:
        """Add an effect."""
        self._orders.put_nowait((work, effect))

    def drop_all(self) -> None:
        """Forget all effects that have not begun."""
        while not self._orders.empty():
            self._orders.get_nowait()

    def hurry(self) -> None:
        """End the pause before the next try: what it waits for may have changed."""
        self._hurried.set()

    def start(self, do: Do, give_up: GiveUp) -> None:
        """Carry out effects by ``do``; one that cannot be is handed to ``give_up`` with the reason."""
        self._task = asyncio.create_task(self._carry_out_all(do, give_up), name=f"run {self._run_id}")

    async def stop(self) -> None:
        """Stop at once, also in the middle of an effect."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _carry_out_all(self, do: Do, give_up: GiveUp) -> None:
        while True:
            await self._carry_out(await self._orders.get(), do, give_up)
            self.trouble = ""

    async def _carry_out(self, order: Order, do: Do, give_up: GiveUp) -> None:
        _, effect = order
        began_s = asyncio.get_running_loop().time()
        for num_tries in count(1):
            self._hurried.clear()
            self._observer.starting(self._run_id, effect)
            try:
                await do(order)
                self._observer.finished(self._run_id, effect)
                return
            except Exception as exc:  # Whatever it is: see above.
                trouble = trouble_of(effect, exc)
                LOG.error("run %s: %s failed: %s", self._run_id, trouble.effect, exc, exc_info=_needs_trace(exc))
            tried_s = asyncio.get_running_loop().time() - began_s
            if tried_s >= trouble.patience_s and await self._is_given_up(order, trouble.given_up(tried_s), give_up):
                return
            self.trouble = trouble.reason
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S[min(num_tries, len(RETRY_S)) - 1]):
                    await self._hurried.wait()

    async def _is_given_up(self, order: Order, reason: str, give_up: GiveUp) -> bool:
        try:
            await give_up(order, reason)
        except Exception as exc:  # The record cannot be written now, so the effect is tried once more.
            LOG.error("run %s: giving up failed: %s", self._run_id, exc, exc_info=_needs_trace(exc))
            return False
        return True


def _needs_trace(error: Exception) -> bool:
    """Of our errors the text says what to do; of others only the trace tells anything."""
    return not isinstance(error, FaninError)
