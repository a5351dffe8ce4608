"""Lanes: where blocking work is done while the event loop goes on."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class Lane(Protocol):
    """A place for blocking work: a thread, or right here in a simulation."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]:
        """The outcome of ``work``; what it raises is raised."""
        ...


class ThreadLane:
    """Work on threads of its own. One thread makes a lane on which work is done one after the other."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def __call__(self, work: Callable[[], T]) -> T:
        """Await ``work`` on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Wait for work under way, take no more."""
        self._threads.shutdown()


async def inline(work: Callable[[], T]) -> T:
    """Work done at once, on the event loop: for simulations, where a thread would escape the virtual clock."""
    return work()
