"""The disk of a coordinator: the bytes that it uses, their growth, and the days until the disk is full.

Once an hour the sizes of all parts are measured. The measurements of the last 30 days are in ``usage.json``, so the
growth is that of the folder itself, with all that retention removed. The forecast is a line through the last 7 days.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from fanin.protos.errors import FaninError
from fanin.protos.messages import DiskReport
from fanin.server.care.space import DiskSpace, FolderSpace
from fanin.server.storage.disk import write_file
from fanin.server.storage.retention import DAY_S
from fanin.server.storage.stores import Stores

LOG: Final = logging.getLogger("fanin.server.care.forecast")
FILE: Final = "usage.json"
PERIOD_S: Final = 3600.0
KEEP_S: Final = 30 * DAY_S
WINDOW_S: Final = 7 * DAY_S
LEAST_SPAN_S: Final = 2 * PERIOD_S
"""A shorter time says nothing about days."""
WARN_DAYS: Final = 14.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """One measurement.

    Attributes:
        at_s: Wall time.
        parts: Bytes of the parts of the folder (``space.PARTS``).
        free_bytes: Free bytes of the disk.
        num_rounds: Published Rounds of all Runs.
    """

    at_s: float
    parts: Mapping[str, int]
    free_bytes: int
    num_rounds: int

    @property
    def used_bytes(self) -> int:
        """The bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is expected of the disk.

    Attributes:
        now: The last measurement.
        bytes_per_day: Growth of the last days, negative if the folder shrank; None before two hours have passed.
        bytes_per_round: The same for each published Round; None also without a Round.
        days_left: Days until the disk is full at this growth; None if that is not to be expected.
    """

    now: DiskUse
    bytes_per_day: float | None = None
    bytes_per_round: float | None = None
    days_left: float | None = None

    @property
    def is_short(self) -> bool:
        """Whether the disk will be full soon."""
        return self.days_left is not None and self.days_left < WARN_DAYS


def forecast(history: tuple[DiskUse, ...]) -> Forecast:
    """Return the forecast after one or more measurements, oldest first."""
    now = history[-1]
    recent = [use for use in history if use.at_s >= now.at_s - WINDOW_S]
    span_s = now.at_s - recent[0].at_s
    if span_s < LEAST_SPAN_S:
        return Forecast(now=now)
    bytes_per_day = _slope(recent) * DAY_S
    num_rounds = now.num_rounds - recent[0].num_rounds
    return Forecast(
        now=now,
        bytes_per_day=bytes_per_day,
        bytes_per_round=bytes_per_day * span_s / DAY_S / num_rounds if num_rounds > 0 else None,
        days_left=now.free_bytes / bytes_per_day if bytes_per_day > 0 else None,
    )


async def published_rounds(stores: Stores) -> int:
    """Return the number of published Rounds of all Runs."""
    return sum([await stores.rounds.num_published(run_id) for run_id in await stores.runs.run_ids()])


class DiskWatch:
    """Measures the disk of a coordinator once an hour, and warns once a day before it is full.

    Args:
        folder: The folder of the coordinator.
        num_rounds: Returns the number of published Rounds of all Runs.
        wall: Wall time, in seconds.
    """

    def __init__(self, folder: Path, num_rounds: Callable[[], Awaitable[int]], wall: Callable[[], float]) -> None:
        self._folder, self._num_rounds, self._wall = folder, num_rounds, wall
        self._space = FolderSpace(folder)
        self._history = _read(folder / FILE)
        self._warned_at_s = -DAY_S

    def space(self) -> DiskSpace:
        """Return the space now. Call it on a thread: it blocks."""
        return self._space.read()

    def report(self) -> DiskReport | None:
        """Return the last measurement and the forecast, None before the first one."""
        if (expected := self.forecast) is None:
            return None
        return DiskReport(
            free_bytes=expected.now.free_bytes,
            used_bytes=expected.now.used_bytes,
            bytes_per_day=expected.bytes_per_day,
            days_left=expected.days_left,
        )

    @property
    def forecast(self) -> Forecast | None:
        """The forecast of the last measurement, None before the first one."""
        return forecast(self._history) if self._history else None

    async def measure(self) -> None:
        """Measure, store the measurement, and warn if the disk will be full soon."""
        num_rounds, now_s = await self._num_rounds(), self._wall()
        space = await asyncio.to_thread(self.space)
        use = DiskUse(at_s=now_s, parts=space.used_bytes, free_bytes=space.free_bytes, num_rounds=num_rounds)
        # A clock that was set back must not leave measurements of the future.
        before = [each for each in self._history if now_s - KEEP_S < each.at_s < now_s]
        self._history = (*before, use)
        rows = [[each.at_s, dict(each.parts), each.free_bytes, each.num_rounds] for each in self._history]
        await asyncio.to_thread(write_file, self._folder / FILE, json.dumps(rows).encode())
        self._warn(forecast(self._history), now_s)

    async def watch(self) -> None:
        """Measure every hour, until cancelled."""
        while True:
            try:
                await self.measure()
            except (FaninError, OSError) as exc:
                LOG.warning("the use of the disk was not measured: %s", exc)
            await asyncio.sleep(PERIOD_S)

    def _warn(self, expected: Forecast, now_s: float) -> None:
        if not expected.is_short or now_s < self._warned_at_s + DAY_S:
            return
        self._warned_at_s = now_s
        LOG.warning(
            "the disk of %s is full in %.1f days: %.0f MB are free, and it grows by %.0f MB a day; free space, or let "
            "retention keep less (fanin prune RUN shows what would go)",
            *(self._folder, expected.days_left, expected.now.free_bytes / 1e6, (expected.bytes_per_day or 0.0) / 1e6),
        )


def _slope(history: list[DiskUse]) -> float:
    """Return the growth in bytes a second: the least-squares line through the measurements."""
    num, origin_s = len(history), history[0].at_s
    mean_s = sum(use.at_s - origin_s for use in history) / num
    mean = sum(use.used_bytes for use in history) / num
    variance = sum((use.at_s - origin_s - mean_s) ** 2 for use in history)
    products = sum((use.at_s - origin_s - mean_s) * (use.used_bytes - mean) for use in history)
    return products / variance


def _read(path: Path) -> tuple[DiskUse, ...]:
    """Return the stored measurements, none if the file is missing or damaged: they are measured anew."""
    try:
        rows = json.loads(path.read_text("utf-8"))
        history = tuple(
            DiskUse(
                at_s=float(at_s),
                parts={str(name): int(size) for name, size in parts.items()},
                free_bytes=int(free_bytes),
                num_rounds=int(num_rounds),
            )
            for at_s, parts, free_bytes, num_rounds in rows
        )
    except (OSError, ValueError, TypeError, AttributeError):
        return ()
    return history if all(one.at_s < two.at_s for one, two in pairwise(history)) else ()
