"""The availability of a simulated device: patterns of presence, its battery, and speeds that change over time.

All of it is drawn from a seed or recorded. A pattern yields stays: ``(stay_s, away_s)``, the seconds until the device
leaves and the seconds until it returns. The first ``stay_s`` may be 0.0: the device begins away. With None as
``stay_s`` the device never leaves, with None as ``away_s`` it never returns.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol

from fanin.protos.errors import SubjectError
from fanin.protos.numbers import are_numbers

Stay = tuple[float | None, float | None]
DAY_S: Final = 86400.0
HOUR_S: Final = 3600.0


class Availability(Protocol):
    """A pattern of presence."""

    def stays(self, rng: random.Random) -> Iterator[Stay]:
        """Yield the stays of one device, from the virtual time 0. All random numbers come from ``rng``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DailyWindow:
    """A device is present once a day, for example while it charges at night.

    Attributes:
        from_hour: Hour of the day at which it arrives, 0 to below 24. The virtual clock begins at midnight.
        hours: Length of the window, above 0 and at most 24.
        spread_hours: Largest shift of a device's arrival, earlier or later. The shift is uniform and drawn once.
    """

    from_hour: float
    hours: float
    spread_hours: float = 0.0

    def __post_init__(self) -> None:
        hours = (self.from_hour, self.hours, self.spread_hours)
        if not (
            are_numbers(*hours)
            and 0.0 <= self.from_hour < 24.0
            and 0.0 < self.hours <= 24.0
            and 0.0 <= self.spread_hours <= 12.0
        ):
            raise SubjectError(
                "daily window",
                "got from_hour {!r}, hours {!r}, spread_hours {!r}, "
                "expected 0 to below 24, above 0 to 24, and 0 to 12".format(*hours),
            )

    def stays(self, rng: random.Random) -> Iterator[Stay]:
        """See Availability."""
        if self.hours == 24.0:
            yield None, None
            return
        shift_s = rng.uniform(-self.spread_hours, self.spread_hours) * HOUR_S
        begin_s, length_s = (self.from_hour * HOUR_S + shift_s) % DAY_S, self.hours * HOUR_S
        if begin_s + length_s > DAY_S:
            # The window of the day before is still open at midnight.
            remaining_s = begin_s + length_s - DAY_S
            yield remaining_s, begin_s - remaining_s
        else:
            yield 0.0, begin_s
        while True:
            yield length_s, DAY_S - length_s


@dataclass(frozen=True, slots=True, kw_only=True)
class OnOff:
    """A device arrives and leaves without memory: a Markov chain of two states in continuous time.

    Attributes:
        on_s: Mean seconds that it stays.
        off_s: Mean seconds that it is away.
    """

    on_s: float
    off_s: float

    def __post_init__(self) -> None:
        if not (are_numbers(self.on_s, self.off_s) and 0.0 < self.on_s < math.inf and 0.0 < self.off_s < math.inf):
            raise SubjectError("on and off", f"got on_s {self.on_s!r}, off_s {self.off_s!r}, expected positive seconds")

    def stays(self, rng: random.Random) -> Iterator[Stay]:
        """See Availability. The first state is drawn from the stationary distribution."""
        if rng.random() >= self.on_s / (self.on_s + self.off_s):
            yield 0.0, rng.expovariate(1.0 / self.off_s)
        while True:
            yield rng.expovariate(1.0 / self.on_s), rng.expovariate(1.0 / self.off_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The recorded presence of one device.

    Attributes:
        changes: Times in seconds, ascending, and whether the device is present from then on. It is away before the
            first one, and keeps its last state.
    """

    changes: tuple[tuple[float, bool], ...]

    def __post_init__(self) -> None:
        times = [time_s for time_s, _ in self.changes]
        if not times or times[0] < 0.0 or any(first >= second for first, second in pairwise(times)):
            raise ValueError(f"trace: got the times {times[:8]}, expected at least one, from 0 on, each above the last")

    def stays(self, rng: random.Random) -> Iterator[Stay]:
        """See Availability."""
        flips: list[tuple[float, bool]] = []
        for time_s, is_there in self.changes:
            if is_there != (flips[-1][1] if flips else False):
                flips.append((time_s, is_there))
        now_s, stay_s = 0.0, 0.0
        for time_s, is_there in flips:
            if is_there:
                yield stay_s, time_s - now_s
            else:
                stay_s = time_s - now_s
            now_s = time_s
        is_last_there = bool(flips) and flips[-1][1]
        yield (None, None) if is_last_there else (stay_s, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A speed or a bandwidth that changes over time.

    Attributes:
        changes: Times in seconds, ascending, and the rate from then on. The first rate also holds before its time.
    """

    changes: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        times = [time_s for time_s, _ in self.changes]
        if not times or any(first >= second for first, second in pairwise(times)):
            raise ValueError(f"rate: got the times {times[:8]}, expected at least one, each above the last")
        if not all(0.0 < rate < math.inf for _, rate in self.changes):
            raise ValueError(f"rate: got {self.changes[:8]}, expected finite positive rates")

    def seconds(self, amount: float, now_s: float) -> float:
        """Return the seconds that an amount of work takes if it begins at ``now_s``."""
        index = max(0, bisect_right(self.changes, now_s, key=lambda change: change[0]) - 1)
        begin_s, remaining = now_s, amount
        for (_, rate), (until_s, _) in pairwise(self.changes[index:]):
            if (until_s - begin_s) * rate >= remaining:
                return begin_s - now_s + remaining / rate
            remaining -= (until_s - begin_s) * rate
            begin_s = until_s
        return begin_s - now_s + remaining / self.changes[-1][1]


def seconds_of(amount: float, rate: float | Rate, now_s: float) -> float:
    """Return the seconds that an amount of work takes if it begins at ``now_s``. An infinite rate takes none."""
    return rate.seconds(amount, now_s) if isinstance(rate, Rate) else amount / rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Battery:
    """A battery that training drains. An empty one makes the device leave until it is full again.

    Attributes:
        work_s: Seconds of training that a full battery allows.
        charge_s: Seconds from empty to full. The battery charges whenever the device does not train.
    """

    work_s: float
    charge_s: float

    def __post_init__(self) -> None:
        seconds = (self.work_s, self.charge_s)
        if not (are_numbers(*seconds) and all(0.0 < each < math.inf for each in seconds)):
            raise SubjectError(
                "battery",
                f"got work_s {self.work_s!r}, charge_s {self.charge_s!r}, expected positive numbers of seconds",
            )


class Charge:
    """The charge of one battery, in seconds of training."""

    def __init__(self, battery: Battery) -> None:
        self._battery = battery
        self._remaining_s = battery.work_s
        self._at_s = 0.0

    def begin(self, now_s: float, work_s: float, leaves_s: float | None = None) -> float | None:
        """Begin a training. Returns the seconds until the battery is empty; None if it lasts.

        Args:
            now_s: The time.
            work_s: The seconds of the training.
            leaves_s: The time at which the device leaves, which cuts off the training; None if it stays.
        """
        work_s = work_s if leaves_s is None else min(work_s, leaves_s - now_s)
        gain = max(0.0, now_s - self._at_s) * self._battery.work_s / self._battery.charge_s
        remaining_s = min(self._battery.work_s, self._remaining_s + gain)
        self._remaining_s, self._at_s = max(0.0, remaining_s - work_s), now_s + min(work_s, remaining_s)
        return None if work_s <= remaining_s else remaining_s
