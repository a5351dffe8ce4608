"""The factor of a loss in half precision, so that small gradients do not vanish (Micikevicius et al. 2018, arXiv
1710.03740, section 3.2).

Whether gradients overflowed is read off their norm over all ranks, so all ranks decide alike.
"""

from typing import Final

INITIAL: Final = 2.0**16
PATIENCE: Final = 2000
"""Steps without an overflow after which the factor grows, as in torch's own scaler."""


class LossScale:
    """A power of two that is halved at each overflow and doubled after long without one."""

    def __init__(self, factor: float = INITIAL, patience: int = PATIENCE) -> None:
        self.factor = factor
        self._patience = patience
        self._calm = 0

    def seen(self, *, finite: bool) -> bool:
        """Take note of a step's gradients; whether they may be used."""
        self._calm = self._calm + 1 if finite else 0
        if not finite:
            self.factor = max(1.0, self.factor / 2)
        elif self._calm >= self._patience:
            self.factor, self._calm = self.factor * 2, 0
        return finite
