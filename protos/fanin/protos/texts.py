"""Parts of sentences for people: errors, progress lines and results share them."""

import math
from collections.abc import Collection
from itertools import islice
from typing import Final

MAX_LISTED: Final = 5
DIGITS: Final = 999.5
"""The number from which three digits are not enough."""
MINUTES_FROM_S: Final = 100
HOURS_FROM_S: Final = 100 * 60
DAYS_FROM_S: Final = 100 * 3600
"""Durations from which a larger unit is used."""


def counted(num: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun: ``1 round``, ``2 rounds``.

    Args:
        num: The number.
        singular: The noun for one thing.
        plural: The noun for any other number; default: ``singular`` with an s.
    """
    return f"{num} {singular if num == 1 else plural or f'{singular}s'}"


def listed(names: Collection[str]) -> str:
    """Return names as text, of which the first five are written: ``a, b``, or ``a, b, c, d, e and 3 more``."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{', '.join(islice(names, MAX_LISTED))}{more}"


def sized(num_bytes: float) -> str:
    """Return a number of bytes in at most seven characters, in powers of 1,000: ``640 kB``, ``1.23 MB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < DIGITS:
            return f"{num_bytes:.3g} {unit}" if unit != "B" else f"{num_bytes:.0f} B"
        num_bytes /= 1000
    return f"{num_bytes:.0f} PB"


def lasted(seconds: float) -> str:
    """Return a duration in at most seven characters: ``0.24 s``, ``12.3 s``, ``2.5 min``, ``1.5 h``."""
    if seconds < MINUTES_FROM_S:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    if seconds < HOURS_FROM_S:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < DAYS_FROM_S else f"{seconds / 86400:.1f} d"


CHARGE_DUE: Final = "charge due"
"""What is shown beside an epsilon that is a lower bound, because the ledger of its population may lack releases."""


def epsilon_text(epsilon: float, digits: int = 4) -> str:
    """Return an epsilon with so many digits after the point, rounded up: it is an upper bound."""
    return f"{math.ceil(epsilon * 10**digits) / 10**digits:.{digits}f}"
