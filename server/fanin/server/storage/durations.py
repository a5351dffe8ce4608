"""Durations of an operation that is repeated: how many were within each bound, and their sum.

Nothing here depends on a library of metrics. A thread may note durations while another one reads them: a reader
may miss the newest duration, and reads it the next time.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Final

SHORT_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bounds for calls and for transactions: from half a millisecond to 10 s."""
LONG_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 21600.0)
"""Bounds for Rounds and their parts: from 10 ms to 6 hours."""


class Durations:
    """The durations of one operation.

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
