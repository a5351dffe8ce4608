"""Who is asked, and when the others may come back. Pure: randomness is passed in."""

import random
from collections.abc import Sequence
from typing import Final

from fanin.protos.messages import Capabilities
from fanin.protos.plans import Plan

RETRY_PER_S: Final = 500.0
"""Check-ins a second that retry windows are spread for: half of what a coordinator is budgeted to answer."""
MIN_WINDOW_S: Final = 1.0
MAX_WINDOW_S: Final = 900.0


def choose(waiting: Sequence[str], num_places: int, rng: random.Random) -> tuple[str, ...]:
    """At most ``num_places`` of the waiting devices, uniformly without replacement."""
    return tuple(waiting) if len(waiting) <= num_places else tuple(rng.sample(waiting, num_places))


def unsuitable(capabilities: Capabilities, plan: Plan, graph_formats: Sequence[str], download_bytes: int) -> str:
    """Why a device cannot take part in a Run; empty if it can."""
    if plan.codec.name not in capabilities.codecs:
        return f"codec: got {list(capabilities.codecs)}, expected {plan.codec.name}"
    if not set(graph_formats) & set(capabilities.graph_formats):
        return f"graph format: got {list(capabilities.graph_formats)}, expected one of {list(graph_formats)}"
    limit = capabilities.max_download_bytes
    if limit and download_bytes > limit:
        return f"download: a limit of {limit} bytes, expected at least {download_bytes}"
    return ""


def retry_window(num_devices: int) -> tuple[float, float]:
    """When a device that was turned away may come back, in seconds from now: spread so that a population of
    ``num_devices`` that all take a random moment within it stays under ``RETRY_PER_S``."""
    longest = min(max(num_devices / RETRY_PER_S, MIN_WINDOW_S), MAX_WINDOW_S)
    return longest / 10, longest
