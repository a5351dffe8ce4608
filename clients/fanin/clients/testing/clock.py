"""Virtual time for asyncio."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while there is work and jumps to the next timer when there is none.

    Nothing in it may wait for a thread or a socket: such waiting has no place on a virtual clock.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_JumpingSelector(self.jump))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now_s

    def jump(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds


class _JumpingSelector(selectors.SelectSelector):
    """A selector that never waits: it lets virtual time pass instead."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready now."""
        if timeout is None:
            raise RuntimeError("virtual time: every task waits for something that no timer will bring")
        self._jump(max(timeout, 0.0))
        return super().select(0)


def run_virtual(main: Coroutine[object, object, T]) -> T:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
