"""Which devices get the free places of a Round, and when the others come back. Pure: randomness is passed in."""

import random
from collections.abc import Sequence
from typing import Final

RETRY_PER_S: Final = 500.0
"""Check-ins per second that retry windows aim at: half of a coordinator's budget."""
MIN_WINDOW_S: Final = 1.0
MAX_WINDOW_S: Final = 900.0


def choose(waiting: Sequence[str], num_places: int, rng: random.Random) -> tuple[str, ...]:
    """Return at most ``num_places`` of the waiting devices, drawn uniformly without replacement."""
    return tuple(waiting) if len(waiting) <= num_places else tuple(rng.sample(waiting, num_places))


def retry_window(num_devices: int) -> tuple[float, float]:
    """Return the window in which a rejected device retries.

    If ``num_devices`` devices retry at random moments within it, they stay below ``RETRY_PER_S``.

    Returns:
        The earliest and the latest moment, in seconds from now.
    """
    longest = min(max(num_devices / RETRY_PER_S, MIN_WINDOW_S), MAX_WINDOW_S)
    return longest / 10, longest
