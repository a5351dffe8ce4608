"""Parts of sentences for people: errors, progress lines and results share them."""

from collections.abc import Collection
from itertools import islice
from typing import Final

MAX_LISTED: Final = 5


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
