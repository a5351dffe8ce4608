"""The retry times of devices without a place. A pure function."""

from typing import Final

RETRY_PER_S: Final = 500.0
"""Check-ins per second that retry windows aim at: half of a coordinator's budget."""
MIN_WINDOW_S: Final = 1.0
MAX_WINDOW_S: Final = 900.0


def retry_window(num_devices: int) -> tuple[float, float]:
    """Return the window in which a rejected device retries.

    If ``num_devices`` devices retry at random moments within it, they stay below ``RETRY_PER_S``.

    Returns:
        The earliest and the latest moment, in seconds from now.
    """
    longest = min(max(num_devices / RETRY_PER_S, MIN_WINDOW_S), MAX_WINDOW_S)
    return longest / 10, longest
