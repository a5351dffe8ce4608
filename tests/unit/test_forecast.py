"""The forecast of the disk is a line through the last measurements, and survives a restart."""

import asyncio
import logging
from pathlib import Path

import pytest

from fanin.server.care.forecast import DiskUse, DiskWatch, forecast

DAY_S = 86400.0
HOUR_S = 3600.0


def use(at_s: float, used: int, free: int = 1000, num_rounds: int = 0) -> DiskUse:
    """Return a measurement."""
    return DiskUse(at_s=at_s, parts={"blobs": used}, free_bytes=free, num_rounds=num_rounds)


def test_a_steady_growth_gives_the_days_that_are_left() -> None:
    history = tuple(use(hour * HOUR_S, 24_000 + 100 * hour, 4800, 2 * hour) for hour in range(49))
    expected = forecast(history)
    assert expected.bytes_per_day == pytest.approx(2400.0)
    assert expected.bytes_per_round == pytest.approx(50.0)
    assert expected.days_left == pytest.approx(2.0)


@pytest.mark.parametrize("hours", [0, 1])
def test_a_short_time_says_nothing(hours: int) -> None:
    expected = forecast(tuple(use(hour * HOUR_S, hour) for hour in range(hours + 1)))
    assert (expected.bytes_per_day, expected.bytes_per_round, expected.days_left) == (None, None, None)


def test_a_folder_that_shrinks_is_never_full_and_old_measurements_do_not_count() -> None:
    history = (use(0.0, 0), *(use(20 * DAY_S + hour * HOUR_S, 9000 - hour) for hour in range(5)))
    expected = forecast(history)
    assert expected.bytes_per_day == pytest.approx(-24.0)
    assert expected.days_left is None


def test_the_measurements_survive_a_restart_and_a_warning_comes_once_a_day(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [0.0]

    async def num_rounds() -> int:
        return int(now_s[0] / HOUR_S)

    (tmp_path / "blobs").mkdir()
    with caplog.at_level(logging.WARNING, "fanin.server.care.forecast"):
        for hour in range(30):
            # Each hour is another life of the coordinator, and the file is sparse: 10 TB an hour fill every disk.
            watch = DiskWatch(tmp_path, num_rounds, lambda: now_s[0])
            now_s[0] = hour * HOUR_S
            with (tmp_path / "blobs" / "chunk").open("wb") as file:
                file.truncate(hour * 10**13 // 1000)
            asyncio.run(watch.measure())
        expected = DiskWatch(tmp_path, num_rounds, lambda: now_s[0]).forecast
    assert expected is not None and expected.bytes_per_day == pytest.approx(24 * 10**10, rel=1e-3)
    assert expected.days_left is not None and expected.days_left > 0
    assert "is full in" in caplog.text
    (tmp_path / "usage.json").write_text("damaged")
    assert DiskWatch(tmp_path, num_rounds, lambda: now_s[0]).forecast is None
