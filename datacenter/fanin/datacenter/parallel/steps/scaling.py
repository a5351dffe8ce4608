"""The factor of a loss in half precision, so that small gradients do not vanish (Micikevicius et al. 2018, arXiv
1710.03740, section 3.2).

Whether gradients overflowed is read off their norm over all ranks, so all ranks decide alike.
"""

from collections.abc import Mapping
from typing import Final

INITIAL: Final = 2.0**16
PATIENCE: Final = 2000
"""Steps without an overflow after which the factor grows, as in torch's own scaler."""
LOWEST: Final = 1.0
"""Below it a finite loss would be scaled down; what overflows here, overflows without a scale."""
FACTOR: Final = "loss_scale"
CALM: Final = "loss_scale_calm"


class LossScale:
    """A power of two that is halved at each overflow and doubled after long without one."""

    def __init__(self, factor: float = INITIAL, patience: int = PATIENCE) -> None:
        self.factor = factor
        self._patience = patience
        self._calm = 0

    @property
    def state(self) -> dict[str, float]:
        """The factor, and the steps since it changed, by names of their own."""
        return {FACTOR: self.factor, CALM: self._calm}

    def load(self, values: Mapping[str, float]) -> None:
        """Go on where another was; as it is where ``values`` knows of none."""
        self.factor, self._calm = values.get(FACTOR, self.factor), int(values.get(CALM, self._calm))

    def succeeded(self) -> None:
        """Take note of a step whose gradients are finite."""
        self._calm += 1
        if self._calm >= self._patience:
            self.factor, self._calm = self.factor * 2, 0

    def overflowed(self) -> bool:
        """Lower the factor after a step whose gradients are not finite. False if it is at its lowest already."""
        lowered, self._calm = self.factor > LOWEST, 0
        self.factor = max(LOWEST, self.factor / 2)
        return lowered
