"""Lanes: where blocking work is done, so that the event loop does not wait for it; and how long it takes."""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from typing import Final, Protocol, TypeVar

T = TypeVar("T")
SHORT_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bounds for calls and for transactions: from half a millisecond to 10 s."""
LONG_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 21600.0)
"""Bounds for Rounds and their parts: from 10 ms to 6 hours."""


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


class Durations:
    """The durations of an operation that is repeated: how many were within each bound, and their sum.

    Nothing here depends on a library of metrics. A thread may note durations while another one reads them: a reader
    may miss the newest duration, and reads it the next time.

    Attributes:
        bounds_s: The upper bounds, ascending, in seconds.
        sum_s: The sum of all durations, in seconds.
    """

    def __init__(self, bounds_s: tuple[float, ...] = SHORT_S) -> None:
        self.bounds_s = bounds_s
        self.sum_s = 0.0
        self._counts = [0] * (len(bounds_s) + 1)

    def note(self, seconds: float) -> None:
        """Add one duration."""
        self._counts[bisect_left(self.bounds_s, seconds)] += 1
        self.sum_s += seconds

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the duration of this context, also if it ends with an error."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.note(time.perf_counter() - began_s)

    def cumulative(self) -> tuple[int, ...]:
        """Return the number of durations within each bound, and the number of all of them."""
        return tuple(accumulate(self._counts))
