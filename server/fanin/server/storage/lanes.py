"""Lanes: where blocking work is done, so that the event loop does not wait for it."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class Lane(Protocol):
    """An executor of blocking work: threads in production, the event loop itself in a simulation."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]:
        """Return an awaitable of the result of ``work``. Exceptions of ``work`` are raised when it is awaited."""
        ...


class ThreadLane:
    """A lane with its own threads. A lane of one thread does its work in order."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def __call__(self, work: Callable[[], T]) -> T:
        """Run ``work`` on a thread and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Wait for the work under way and accept no more."""
        self._threads.shutdown()


async def inline(work: Callable[[], T]) -> T:
    """Run ``work`` at once, on the event loop. This is for simulations: a thread would not follow the virtual clock."""
    return work()


async def run_to_end(work: Awaitable[T]) -> T:
    """Await work that a cancelled caller must not interrupt, for example a row and the event that belongs to it.

    A cancelled caller waits until the work has ended, however often it is cancelled. Then CancelledError is raised.

    Returns:
        The result of ``work``.
    """
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        # The caller is gone, so an exception of the work has no receiver. Reading it keeps asyncio from logging it.
        task.exception()
        raise asyncio.CancelledError
    return task.result()
