"""Scales the loss in fp16 so that small gradients do not underflow.

An overflow is detected by the norm of the gradients over all ranks, so all ranks make the same decision.

Reference:
    Micikevicius et al. 2018, Mixed Precision Training, arXiv 1710.03740, section 3.2.
"""

from collections.abc import Mapping
from typing import Final

INITIAL: Final = 2.0**16
GROWTH_INTERVAL: Final = 2000
"""Steps without an overflow after which the factor doubles, as in torch's GradScaler."""
LOWEST: Final = 1.0
"""The smallest factor. Gradients that overflow here also overflow without a loss scale."""
FACTOR: Final = "loss_scale"
STABLE_STEPS: Final = "loss_scale_calm"


class LossScale:
    """A power of two that is halved at each overflow and doubled after ``growth_interval`` steps without one."""

    def __init__(self, factor: float = INITIAL, growth_interval: int = GROWTH_INTERVAL) -> None:
        self.factor = factor
        self._growth_interval = growth_interval
        self._stable_steps = 0

    @property
    def state(self) -> dict[str, float]:
        """The factor and the number of steps since it changed, by their names in a checkpoint."""
        return {FACTOR: self.factor, STABLE_STEPS: self._stable_steps}

    def load(self, values: Mapping[str, float]) -> None:
        """Restore a saved state. Values that are missing keep their current value."""
        self.factor, self._stable_steps = (
            values.get(FACTOR, self.factor),
            int(values.get(STABLE_STEPS, self._stable_steps)),
        )

    def succeeded(self) -> None:
        """Record a step with finite gradients."""
        self._stable_steps += 1
        if self._stable_steps >= self._growth_interval:
            self.factor, self._stable_steps = self.factor * 2, 0

    def overflowed(self) -> bool:
        """Lower the factor after a step whose gradients are not finite. Return False if it is already the lowest."""
        lowered, self._stable_steps = self.factor > LOWEST, 0
        self.factor = max(LOWEST, self.factor / 2)
        return lowered
