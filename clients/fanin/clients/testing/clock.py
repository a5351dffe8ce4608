"""Virtual time for asyncio."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from threading import Event
from typing import TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when there is no work, and does not advance otherwise.

    No task may wait for a thread or a socket: a virtual clock cannot measure that time.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_JumpingSelector(self.jump))

    def time(self) -> float:
        """Return the virtual seconds since the loop was created."""
        return self._now_s

    def jump(self, seconds: float) -> None:
        """Advance the clock."""
        self._now_s += seconds


class _JumpingSelector(selectors.SelectSelector):
    """A selector that advances virtual time instead of waiting."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Advance the clock by ``timeout``, then return the ready events.

        While tasks are ready, nothing is read: the only socket wakes a loop that waits, and this one does not.
        """
        if timeout is None:
            raise RuntimeError("virtual time: every task waits, and no timer is set that could wake one")
        if timeout <= 0.0:
            return []
        self._jump(timeout)
        return super().select(0)


def run_virtual(main: Coroutine[object, object, T]) -> T:
    """Run a coroutine to its end in virtual time.

    Ctrl-C cancels the coroutine. Within a running event loop, such as a notebook's, the coroutine runs in a separate
    thread. The call still waits for it.
    """
    if _is_in_loop():
        return _run_in_thread(main)
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


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
        outcome = thread.submit(run)
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
