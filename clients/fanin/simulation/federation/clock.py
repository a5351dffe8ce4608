"""Virtual time for asyncio."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from contextvars import copy_context
from threading import Event
from typing import Final, TypeVar

T = TypeVar("T")
STALLED: Final = "virtual time: every task waits, and no timer is set that could wake one"


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when there is no work, and does not advance otherwise.

    No task may wait for a thread or a socket: a virtual clock cannot measure that time.

    A loop has stalled if every task waits and no timer is set. ``on_stall`` is called once then. It may cancel a task.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self.has_stalled = False
        self.on_stall: Callable[[], object] | None = None
        super().__init__(_JumpingSelector(self.jump, self._stall))

    def time(self) -> float:
        """Return the virtual seconds since the loop was created."""
        return self._now_s

    def jump(self, seconds: float) -> None:
        """Advance the clock."""
        self._now_s += seconds

    def _stall(self) -> None:
        if self.has_stalled or self.on_stall is None:
            raise RuntimeError(STALLED)
        self.has_stalled = True
        self.on_stall()


class _JumpingSelector(selectors.SelectSelector):
    """A selector that advances virtual time instead of waiting."""

    def __init__(self, jump: Callable[[float], None], stall: Callable[[], None]) -> None:
        super().__init__()
        self._jump, self._stall = jump, stall

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Advance the clock by ``timeout``, then return the ready events.

        While tasks are ready, nothing is read: the only socket wakes a loop that waits, and this one does not.
        """
        if timeout is None:
            self._stall()
            return []
        if timeout <= 0.0:
            return []
        self._jump(timeout)
        return super().select(0)


def run_virtual(main: Coroutine[object, object, T]) -> T:
    """Run a coroutine to its end in virtual time.

    Ctrl-C cancels the coroutine, and so does a stall of its ``VirtualTimeLoop``. Within a running event loop, such as
    a notebook's, the coroutine runs in a separate thread. The call still waits for it.

    Raises:
        RuntimeError: The loop has stalled, and the coroutine did not return after the cancellation.
    """
    if _is_in_loop():
        return _run_in_thread(main)

    async def cancelled_by_a_stall() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None, "a coroutine runs in a task"
        assert isinstance(loop, VirtualTimeLoop), "the runner made it"
        loop.on_stall = task.cancel
        try:
            return await main
        except asyncio.CancelledError:
            if loop.has_stalled:
                raise RuntimeError(STALLED) from None
            raise

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(cancelled_by_a_stall())


def _is_in_loop() -> bool:
    """Return whether this thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run_in_thread(main: Coroutine[object, object, T]) -> T:
    began: Future[Callable[[], object]] = Future()

    async def cancellable() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None, "a coroutine runs in a task"
        began.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        return await main

    # A signal that comes before the call of ``submit`` has returned would find no coroutine to cancel.
    submitted = Event()

    def run() -> T:
        submitted.wait()
        return run_virtual(cancellable())

    with ThreadPoolExecutor(1, "virtual-time") as thread, ExitStack() as stack:
        stack.callback(submitted.set)
        # The thread has the context of the caller, as a task has.
        outcome = thread.submit(copy_context().run, run)
        try:
            submitted.set()
            return outcome.result()
        except SystemExit:
            # SIGTERM, for example: the coroutine ends before the process does.
            began.result()()
            wait([outcome])
            raise
        except KeyboardInterrupt:
            began.result()()
            try:
                return outcome.result()
            except (asyncio.CancelledError, CancelledError):
                raise KeyboardInterrupt from None
