"""Learning rates: scaling with the batch size, warm-up, decay, and AdaScale's gain.

A rate is a pure function of the step's number, so a job that resumes on another machine continues with the same rates.
For a batch of k times ``base_batch`` samples the scaling rules are:

- ``linear``: multiply the rate by k, and divide the warm-up steps by k.
- ``sqrt``: multiply the rate by the square root of k, which keeps the variance of a step's change. Divide the warm-up
  steps by k.
- ``legw``: multiply the rate by the square root of k. The warm-up grows with the batch, so its number of steps stays
  the same.
- ``adascale``: multiply each step's rate by a gain that is estimated from its gradients. ``Noise`` holds the estimates.

Reference:
    linear: Goyal et al. 2017, arXiv 1706.02677, section 2.1.
    sqrt: Krizhevsky 2014, arXiv 1404.5997, section 5.
    legw: You et al. 2019, arXiv 1901.08256, section 4.
    adascale: Johnson et al. 2020, arXiv 2007.05105, section 3 and appendix B.3.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

from fanin.datacenter.config.rates import ADASCALE, RateSettings

WINDOW: Final = 1000
"""Length of AdaScale's running means, in parts of ``base_batch`` samples; the paper's value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The learning rates of one job.

    With AdaScale, steps are steps of ``base_batch`` samples, and the caller multiplies each rate by the step's gain.

    Attributes:
        peak: Rate after the warm-up.
        warm_steps: Steps of the warm-up.
        num_steps: Steps in total; 0 if there is no limit.
        settings: The schedule.
    """

    peak: float
    warm_steps: int
    num_steps: int
    settings: RateSettings

    @property
    def decay_steps(self) -> int:
        """Step at which the decay ends, counted from the start of the job; 0 for a constant rate."""
        return 0 if self.settings.decay == "constant" else self.num_steps

    def at(self, step: int) -> float:
        """Return the rate of a step, from 0."""
        if step < self.warm_steps:
            return self.peak * (step + 1) / self.warm_steps
        if self.settings.decay == "constant":
            return self.peak
        progress = (step - self.warm_steps) / max(1, self.num_steps - 1 - self.warm_steps)
        share = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
        return self.peak * (self.settings.floor + (1.0 - self.settings.floor) * share)


def rates_of(settings: RateSettings, learning_rate: float, batch_size: int, num_steps: int) -> Rates:
    """Return the rates of a job.

    Args:
        settings: The schedule.
        learning_rate: Rate of a batch of ``base_batch`` samples.
        batch_size: Samples in the job's global batch.
        num_steps: Steps of the job, or of its decay.
    """
    multiple = batch_size / settings.base_batch if settings.base_batch else 1.0
    root = math.sqrt(multiple)
    factor = {"none": 1.0, "linear": multiple, "sqrt": root, "legw": root, ADASCALE: 1.0}[settings.scale]
    warm_up_divisor = 1.0 if settings.scale in ("none", "legw", ADASCALE) else multiple
    return Rates(
        peak=learning_rate * factor,
        warm_steps=math.ceil(settings.warm_up / warm_up_divisor),
        num_steps=num_steps,
        settings=settings,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """AdaScale's estimates of the gradient's noise and signal.

    Attributes:
        variance: Running mean of the variance of the gradient of ``base_batch`` samples.
        signal: Running mean of the squared norm of the expected gradient.
        count: Steps in the running means.
        steps: All steps so far, in steps of ``base_batch`` samples.
    """

    variance: float = 0.0
    signal: float = 0.0
    count: int = 0
    steps: float = 0.0

    def updated(self, parts_square: float, mean_square: float, num_parts: int) -> "Noise":
        """Return the estimates after one more step.

        Args:
            parts_square: Mean of the squared norms of the parts' gradients.
            mean_square: Squared norm of the mean of the parts' gradients.
            num_parts: Parts of ``base_batch`` samples in the batch, at least 2.
        """
        variance = max(0.0, (parts_square - mean_square) * num_parts / (num_parts - 1))
        # This estimate is unbiased and sometimes negative. Clipping it here would bias its mean.
        signal = mean_square - variance / num_parts
        # A plain mean at first, and an exponential one after WINDOW parts.
        share = max(1.0 / (self.count + 1), min(1.0, num_parts / WINDOW))
        return replace(
            self,
            variance=self.variance + share * (variance - self.variance),
            signal=self.signal + share * (signal - self.signal),
            count=self.count + 1,
        )

    def gain(self, num_parts: int) -> float:
        """Return how many steps of ``base_batch`` samples one step of ``num_parts`` parts is worth.

        Returns:
            1.0 if the gradients have no noise, up to ``num_parts`` if they have no signal.
        """
        signal = max(0.0, self.signal)
        total = self.variance + signal
        return total / (self.variance / num_parts + signal) if total > 0.0 else 1.0
