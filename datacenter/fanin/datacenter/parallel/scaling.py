"""The factor of a loss in half precision, so that small gradients do not vanish (Micikevicius et al. 2018, arXiv
1710.03740, section 3.2).

Whether gradients overflowed is read off their norm over all ranks, so all ranks decide alike.
"""

from collections.abc import Mapping
from typing import Final

INITIAL: Final = 2.0**16
PATIENCE: Final = 2000
"""Steps without an overflow after which the factor grows, as in torch's own scaler."""
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

    def seen(self, *, finite: bool) -> bool:
        """Take note of a step's gradients; whether they may be used."""
        self._calm = self._calm + 1 if finite else 0
        if not finite:
            self.factor = max(1.0, self.factor / 2)
        elif self._calm >= self._patience:
            self.factor, self._calm = self.factor * 2, 0
        return finite
