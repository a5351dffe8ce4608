"""The least noise multiplier whose releases stay within a budget."""

from collections.abc import Callable
from typing import Final

from fanin.protos.errors import InvalidInput

STEPS_PER_UNIT: Final = 1000
"""Noise multipliers are multiples of 1/1000: a person can type them, and epsilon changes by less than 0.2 % in a
step."""
LEAST_NOISE_MULTIPLIER: Final = 0.1
"""Less noise hides nothing: the epsilon of one release is above 90. PLD would need gigabytes for it."""
MAX_NOISE_MULTIPLIER: Final = 100_000


def least_noise_multiplier(epsilon_of: Callable[[float], float], budget: float) -> float:
    """Return the least noise multiplier, a multiple of 1/1000 from 0.1 on, whose epsilon is at most the budget.

    Args:
        epsilon_of: Epsilon of a noise multiplier; it falls with more noise.
        budget: The largest epsilon.

    Raises:
        InvalidInput: Even the largest noise multiplier exceeds the budget.
    """

    def fits(steps: int) -> bool:
        return epsilon_of(steps / STEPS_PER_UNIT) <= budget

    high = STEPS_PER_UNIT
    while not fits(high):
        high *= 4
        if high > MAX_NOISE_MULTIPLIER * STEPS_PER_UNIT:
            raise InvalidInput(
                f"epsilon: got {budget:g}, which noise multiplier {MAX_NOISE_MULTIPLIER} still exceeds; expected a "
                "larger epsilon or delta, or fewer Rounds",
                code="FN-1653",
            )
    low = round(LEAST_NOISE_MULTIPLIER * STEPS_PER_UNIT) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high / STEPS_PER_UNIT
