"""Fault model of a simulated device: slow training, broken calls, false Updates, absence. Each is drawn from a seed.

A false Update (a lie) is one that the coordinator must reject, or must not count twice. Wrong values within their range
are no lie, because nothing distinguishes them from the values of other data. They are an attack (``attacks``).
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

from fanin.protos.messages import EXAMPLES, MAX_COUNT, Piece, Statistics, UpdateHeader
from fanin.protos.numbers import is_number
from fanin.protos.plans import MAX_CODEC_SHIFT
from fanin.simulation.devices.attacks import Attack
from fanin.simulation.devices.availability import Availability, Battery, Rate, Stay, seconds_of


class Lie(Enum):
    """The false claim of an Update."""

    DIGEST = "other bytes than were announced"
    RANGE = "values beyond the range of the codec"
    COUNT = "a negative number of examples"
    ROUND = "another round"
    FOREIGN = "another device's assignment"
    REPLAY = "an update that was sent before"


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """The fault model of one device.

    Pairs are the bounds of a uniform distribution. Shares are probabilities from 0 to 1.

    Attributes:
        work_s: Seconds that one training takes, apart from its epochs.
        epoch_examples: Examples of each epoch of a training.
        examples_per_s: Examples on which the device trains in a second.
        slow: Share of trainings that take ``slow_times`` as long.
        slow_times: Factor of a slow training.
        piece_s: Most seconds that one piece of an upload takes.
        cut: Share of calls that break: before the call, during it, or after it without a reply.
        lie: Share of uploads that are false.
        lies: Kinds of false Updates.
        stay_s: Mean seconds until the device leaves. It leaves at any moment and loses everything but its cache.
        away_s: Seconds until it returns.
        lost: Share of departures from which it never returns.
        quit: Share of trainings that it gives up.
        bytes_down_per_s: Bandwidth of its downloads.
        bytes_up_per_s: Bandwidth of its uploads.
        availability: Its pattern of presence, instead of ``stay_s``, ``away_s`` and ``lost``.
        battery: Its battery; None for mains.
        attack: What it sends instead of its honest change; None for an honest device.
        claim: The number of examples that it reports; 0: its own.
    """

    work_s: tuple[float, float] = (1.0, 100.0)
    epoch_examples: int = 0
    examples_per_s: float | Rate = math.inf
    slow: float = 0.0
    slow_times: float = 20.0
    piece_s: float = 0.0
    cut: float = 0.0
    lie: float = 0.0
    lies: tuple[Lie, ...] = tuple(Lie)
    stay_s: float = math.inf
    away_s: tuple[float, float] = (10.0, 300.0)
    lost: float = 0.0
    quit: float = 0.0
    bytes_down_per_s: float | Rate = math.inf
    bytes_up_per_s: float | Rate = math.inf
    availability: Availability | None = None
    battery: Battery | None = None
    attack: Attack | None = None
    claim: int = 0

    def __post_init__(self) -> None:
        for name in ("slow", "cut", "lie", "lost", "quit"):
            share = getattr(self, name)
            if not (is_number(share) and 0.0 <= share <= 1.0):
                raise ValueError(f"habits: got {name} {share!r}, expected a share from 0 to 1")
        for name in ("work_s", "away_s"):
            first, last = getattr(self, name)
            if not 0.0 <= first <= last < math.inf:
                raise ValueError(f"habits: got {name} {first} to {last}, expected seconds from the fewest to the most")
        if not (self.stay_s > 0.0 and self.piece_s >= 0.0 and self.slow_times >= 1.0):
            raise ValueError(
                f"habits: got stay_s {self.stay_s}, piece_s {self.piece_s}, slow_times {self.slow_times}, "
                "expected more than 0, at least 0 and at least 1"
            )
        if self.epoch_examples < 0:
            raise ValueError(f"habits: got epoch_examples {self.epoch_examples}, expected 0 or more")
        if not 0 <= self.claim <= MAX_COUNT:
            raise ValueError(f"habits: got claim {self.claim}, expected examples from 0 to {MAX_COUNT}")
        for name in ("examples_per_s", "bytes_down_per_s", "bytes_up_per_s"):
            rate = getattr(self, name)
            if not (isinstance(rate, Rate) or rate > 0.0):
                raise ValueError(f"habits: got {name} {rate}, expected a positive number")
        if self.lie and not self.lies:
            raise ValueError("habits: got a share of lies and no lie to tell")

    def work(self, rng: random.Random, epochs: int, now_s: float = 0.0) -> float:
        """Draw the seconds that a training takes if it begins at ``now_s``."""
        times = self.slow_times if rng.random() < self.slow else 1.0
        fixed_s = rng.uniform(*self.work_s) * times
        return fixed_s + seconds_of(epochs * self.epoch_examples * times, self.examples_per_s, now_s + fixed_s)

    def stays(self, rng: random.Random) -> Iterator[Stay]:
        """Yield when the device leaves and returns. See Availability."""
        if self.availability is not None:
            yield from self.availability.stays(rng)
            return
        while True:
            stay_s = None if math.isinf(self.stay_s) else rng.expovariate(1.0 / self.stay_s)
            yield stay_s, None if rng.random() < self.lost else rng.uniform(*self.away_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class FalseUpdate:
    """A false Update: its header, and a function that replaces each piece."""

    header: UpdateHeader
    piece: Callable[[Piece], Piece] = lambda piece: piece


def falsify(lie: Lie, header: UpdateHeader, earlier: UpdateHeader | None, foreign_id: str) -> FalseUpdate:
    """Return a false Update. Without an ``earlier`` Update or a ``foreign_id``, it claims another Round."""
    match lie:
        case Lie.DIGEST:
            return FalseUpdate(header=header, piece=_other_bytes)
        case Lie.RANGE:
            return FalseUpdate(header=replace(header, shifts=(MAX_CODEC_SHIFT + 1,) * len(header.shifts)))
        case Lie.COUNT:
            counts = {**header.statistics.counts, EXAMPLES: -1}
            return FalseUpdate(header=replace(header, statistics=Statistics(counts=MappingProxyType(counts))))
        case Lie.FOREIGN if foreign_id:
            return FalseUpdate(header=replace(header, assignment_id=foreign_id))
        case Lie.REPLAY if earlier is not None:
            return FalseUpdate(header=earlier)
        case _:
            return FalseUpdate(header=replace(header, round=header.round + 1))


def _other_bytes(piece: Piece) -> Piece:
    return replace(piece, data=bytes(byte ^ 1 for byte in piece.data))
