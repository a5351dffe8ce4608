"""What devices do that no coordinator may count on: be slow, break off, lie, leave, come back. Each drawn from a seed.

A lie is a call that the coordinator has to refuse, or must not count twice. A device whose values are wrong and within
their range is none: nothing tells it from one with other data.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

from fanin.protos.messages import EXAMPLES, MAX_CODEC_SHIFT, Piece, Statistics, UpdateHeader


class Lie(Enum):
    """What an Update claims that is not so."""

    DIGEST = "other bytes than were announced"
    RANGE = "values beyond the range of the codec"
    COUNT = "a negative number of examples"
    ROUND = "another round"
    FOREIGN = "another device's assignment"
    REPLAY = "an update that was sent before"


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How one device behaves; shares are from 0 to 1, pairs the ends of what is drawn evenly, times in seconds.

    Training takes ``work_s``, and in a share ``slow`` of all cases ``slow_times`` as long. Each piece of an upload
    takes up to ``piece_s``. A share ``cut`` of all calls breaks: before it begins, in the middle, or when all is done
    and only the answer is missing. A share ``lie`` of all uploads is one of ``lies`` instead.

    The device stays for ``stay_s`` on average, then is gone at whatever moment that is, with all but its cache. It
    comes back after ``away_s``, or, a share ``lost`` of all times, never.
    """

    work_s: tuple[float, float] = (1.0, 100.0)
    slow: float = 0.0
    slow_times: float = 20.0
    piece_s: float = 0.0
    cut: float = 0.0
    lie: float = 0.0
    lies: tuple[Lie, ...] = tuple(Lie)
    stay_s: float = math.inf
    away_s: tuple[float, float] = (10.0, 300.0)
    lost: float = 0.0

    def __post_init__(self) -> None:
        for name in ("slow", "cut", "lie", "lost"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"habits: got {name} {getattr(self, name)}, expected a share from 0 to 1")
        for name in ("work_s", "away_s"):
            first, last = getattr(self, name)
            if not 0.0 <= first <= last < math.inf:
                raise ValueError(f"habits: got {name} {first} to {last}, expected seconds from the fewest to the most")
        if not (self.stay_s > 0.0 and self.piece_s >= 0.0 and self.slow_times >= 1.0):
            raise ValueError(
                f"habits: got stay_s {self.stay_s}, piece_s {self.piece_s}, slow_times {self.slow_times}, "
                "expected more than 0, at least 0 and at least 1"
            )
        if self.lie and not self.lies:
            raise ValueError("habits: got a share of lies and no lie to tell")

    def work(self, rng: random.Random) -> float:
        """How long one training takes."""
        times = self.slow_times if rng.random() < self.slow else 1.0
        return rng.uniform(*self.work_s) * times

    def stay(self, rng: random.Random) -> float | None:
        """How long the device stays; None: for good."""
        return None if math.isinf(self.stay_s) else rng.expovariate(1.0 / self.stay_s)

    def away(self, rng: random.Random) -> float | None:
        """How long it is gone; None: for good."""
        return None if rng.random() < self.lost else rng.uniform(*self.away_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """An Update as it is sent: the header, and what becomes of each piece on the way."""

    header: UpdateHeader
    piece: Callable[[Piece], Piece] = lambda piece: piece


def tell(lie: Lie, header: UpdateHeader, earlier: UpdateHeader | None, foreign_id: str) -> Said:
    """An Update with a lie. Where there is no ``earlier`` one or no ``foreign_id`` yet, it claims another Round."""
    match lie:
        case Lie.DIGEST:
            return Said(header=header, piece=_other_bytes)
        case Lie.RANGE:
            return Said(header=replace(header, shifts=(MAX_CODEC_SHIFT + 1,) * len(header.shifts)))
        case Lie.COUNT:
            counts = {**header.statistics.counts, EXAMPLES: -1}
            return Said(header=replace(header, statistics=Statistics(counts=MappingProxyType(counts))))
        case Lie.FOREIGN if foreign_id:
            return Said(header=replace(header, assignment_id=foreign_id))
        case Lie.REPLAY if earlier is not None:
            return Said(header=earlier)
        case _:
            return Said(header=replace(header, round=header.round + 1))


def _other_bytes(piece: Piece) -> Piece:
    return replace(piece, data=bytes(byte ^ 1 for byte in piece.data))
