"""The coordinator's table of call times: each time is valid once, and the memory is bounded."""

import random

from fanin.protos.errors import Untimely
from fanin.server.access.replays import NUM_TIMES, CallTimes


def is_served(times: CallTimes, device_id: str, time_us: int) -> bool:
    """Return whether a call with this time is served."""
    try:
        times.use(device_id, time_us)
    except Untimely:
        return False
    return True


def test_each_time_of_a_device_is_valid_once() -> None:
    times = CallTimes(0)
    for time_us in (5, 9, 7, 8, 6):
        assert is_served(times, "a", time_us)
        assert not is_served(times, "a", time_us)
    assert is_served(times, "b", 5)


def test_no_call_is_served_twice_in_any_order() -> None:
    rng = random.Random(1)
    for _ in range(200):
        times, served_times = CallTimes(0), []
        for _ in range(100):
            time_us = rng.randint(1, 30)
            served_times += [time_us] * is_served(times, "a", time_us)
        assert len(served_times) == len(set(served_times))


def test_concurrent_calls_may_overtake_each_other() -> None:
    times = CallTimes(0)
    for first in range(1, 101, NUM_TIMES):
        assert all(is_served(times, "a", time_us) for time_us in reversed(range(first, first + NUM_TIMES)))


def test_calls_that_were_signed_before_the_start_are_refused() -> None:
    times = CallTimes(100)
    assert [is_served(times, "a", time_us) for time_us in (99, 100, 101)] == [False, False, True]


def test_a_refused_call_changes_nothing() -> None:
    times = CallTimes(100)
    assert not is_served(times, "a", 100)
    assert len(times) == 0


def test_a_device_that_left_a_full_table_cannot_be_replayed() -> None:
    times = CallTimes(0, max_devices=2)
    for device_id, time_us in (("a", 10), ("b", 11), ("a", 12), ("c", 13)):
        times.use(device_id, time_us)
    # "b" was removed, because its last call was the oldest.
    assert len(times) == 2
    assert not is_served(times, "b", 11)
    assert not is_served(times, "new", 11)
    assert is_served(times, "new", 12)


def test_a_flood_of_devices_takes_no_more_memory() -> None:
    times = CallTimes(0, max_devices=100)
    for number in range(1, 1001):
        for step in range(2 * NUM_TIMES):
            times.use(f"device-{number}", 10 * number + step)
        assert len(times) <= 100
    # The first device was removed long ago. None of its calls is valid again.
    assert not any(is_served(times, "device-1", 10 + step) for step in range(2 * NUM_TIMES))
