"""``run_virtual``: hours pass at once, also inside the event loop of a notebook, and Ctrl-C cancels."""

import asyncio
import os
import signal
import threading
import time

import pytest

from fanin.simulation import run_virtual


async def sleeper() -> float:
    await asyncio.sleep(3600.0)
    return asyncio.get_running_loop().time()


async def within_a_loop() -> tuple[float, bool]:
    """Run virtual time inside of this loop, as a cell of a notebook does."""

    async def main() -> tuple[float, bool]:
        return await sleeper(), threading.current_thread() is threading.main_thread()

    return run_virtual(main())


def test_an_hour_passes_at_once() -> None:
    start_s = time.monotonic()
    assert run_virtual(sleeper()) == 3600.0
    assert time.monotonic() - start_s < 60.0


def test_another_thread_wakes_a_task_while_tasks_are_ready() -> None:
    async def spin() -> None:
        for _ in range(1_000_000):
            await asyncio.sleep(0.0)

    async def main() -> tuple[bool, float]:
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        task = loop.create_task(spin())
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=(event.set,))
        thread.start()
        await event.wait()
        thread.join()
        return task.cancel(), loop.time()

    assert run_virtual(main()) == (True, 0.0)


def test_virtual_time_runs_within_the_loop_of_a_notebook() -> None:
    assert asyncio.run(within_a_loop()) == (3600.0, False)


async def count_until_ctrl_c() -> str:
    """Count virtual seconds until Ctrl-C. Return a result after the cancellation."""
    try:
        for second in range(10**9):
            if second == 1000:
                os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(1.0)
    except asyncio.CancelledError:
        return "kept"
    return "never interrupted"


def test_ctrl_c_cancels_and_returns_the_result_of_the_coroutine() -> None:
    assert run_virtual(count_until_ctrl_c()) == "kept"


def test_ctrl_c_within_a_loop_cancels_too() -> None:
    async def cell() -> str:
        # As in a notebook, Ctrl-C raises KeyboardInterrupt in the main thread.
        return run_virtual(count_until_ctrl_c())

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        loop = asyncio.new_event_loop()
        assert loop.run_until_complete(cell()) == "kept"
        loop.close()
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_a_coroutine_that_keeps_nothing() -> None:
    async def endless() -> None:
        for second in range(10**9):
            if second == 10:
                os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(1.0)

    with pytest.raises(KeyboardInterrupt):
        run_virtual(endless())
