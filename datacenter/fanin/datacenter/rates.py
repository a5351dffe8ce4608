"""The learning rate of each step: how it grows with the batch, how it rises at first and how it falls.

Pure functions of the step's number, so that a job that goes on elsewhere goes on with the same rates. ``linear`` is
Goyal et al. 2017 (arXiv 1706.02677, section 2.1); ``sqrt`` keeps the variance of a step's change (Krizhevsky 2014,
arXiv 1404.5997, section 5); ``legw`` adds that the warm-up grows with the batch, too, which in steps means that it
stays as it is (You et al. 2019, arXiv 1901.08256, section 4).
"""

import math
from dataclasses import dataclass
from typing import Literal

from fanin.protos.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSettings:
    """From the learning rate of a batch of ``base_batch`` samples to that of each step.

    ``scale``: how it grows with the batch size. ``warm_up``: steps, of ``base_batch`` samples where a rule scales, in
    which it rises from nothing. ``decay``: how it then falls, to ``floor`` of its peak at the last step.
    """

    scale: Literal["none", "linear", "sqrt", "legw"] = "none"
    base_batch: int = 0
    warm_up: int = 0
    decay: Literal["constant", "cosine"] = "constant"
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.warm_up < 0:
            raise InvalidInput(f"rate: got warm_up {self.warm_up}, expected 0 or more steps")
        if not 0.0 <= self.floor <= 1.0:
            raise InvalidInput(f"rate: got floor {self.floor}, expected 0.0 to 1.0, a share of the peak")
        if (self.scale == "none") != (self.base_batch == 0) or self.base_batch < 0:
            raise InvalidInput(
                f"rate: got scale {self.scale!r} and base_batch {self.base_batch}, expected for each rule the samples "
                "of the batch that the learning rate was found with, and 0 for none"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rates of a job: ``peak`` after ``warm_steps``, ``num_steps`` in all (0: without an end)."""

    peak: float
    warm_steps: int
    num_steps: int
    settings: RateSettings

    def at(self, step: int) -> float:
        """The rate of a step, the first of which is 0."""
        if step < self.warm_steps:
            return self.peak * (step + 1) / self.warm_steps
        if self.settings.decay == "constant":
            return self.peak
        through = (step - self.warm_steps) / max(1, self.num_steps - 1 - self.warm_steps)
        share = 0.5 * (1.0 + math.cos(math.pi * min(1.0, through)))
        return self.peak * (self.settings.floor + (1.0 - self.settings.floor) * share)


def rates_of(settings: RateSettings, learning_rate: float, batch_size: int, num_steps: int) -> Rates:
    """The rates of a job with batches of ``batch_size`` samples."""
    times = batch_size / settings.base_batch if settings.base_batch else 1.0
    factor = {"none": 1.0, "linear": times, "sqrt": math.sqrt(times), "legw": math.sqrt(times)}[settings.scale]
    fewer = 1.0 if settings.scale in ("none", "legw") else times
    return Rates(
        peak=learning_rate * factor,
        warm_steps=math.ceil(settings.warm_up / fewer),
        num_steps=num_steps,
        settings=settings,
    )
