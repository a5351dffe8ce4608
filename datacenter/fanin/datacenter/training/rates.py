"""Learning rates: scaling with the batch size, warm-up, decay, and AdaScale's gain.

A rate is a pure function of the step's number, so a job that resumes elsewhere continues with the same rates. For a
batch of k times ``base_batch`` samples the scaling rules are:

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
from typing import Final, Literal

from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.protos.errors import InvalidInput

ADASCALE: Final = "adascale"
WINDOW: Final = 1000
"""Length of AdaScale's running means, in parts of ``base_batch`` samples; the paper's value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSettings:
    """The learning rate schedule, the table ``[rate]`` of a config.

    The config's learning rate is that of a batch of ``base_batch`` samples.

    Attributes:
        scale: Rule that scales the rate with the batch size.
        base_batch: Samples in the batch for which the learning rate was tuned; 0 without a scaling rule.
        warm_up: Steps in which the rate rises linearly from zero. With a scaling rule these are steps of
            ``base_batch`` samples.
        decay: Shape of the decay after the warm-up.
        floor: Rate at the end of the decay, as a share of the peak.
        decay_steps: Step at which the decay ends; 0 for the job's last step. A checkpoint stores this number, so set
            it from the start if the job may be extended later.
    """

    scale: Literal["none", "linear", "sqrt", "legw", "adascale"] = "none"
    base_batch: int = 0
    warm_up: int = 0
    decay: Literal["constant", "cosine"] = "constant"
    floor: float = 0.0
    decay_steps: int = 0

    def __post_init__(self) -> None:
        if self.warm_up < 0:
            raise InvalidInput(f"rate: got warm_up {self.warm_up}, expected 0 or more steps")
        if self.decay_steps < 0 or (self.decay_steps and self.decay == "constant"):
            raise InvalidInput(
                f"rate: got decay_steps {self.decay_steps} and decay {self.decay!r}, expected 0 or more steps, and 0 "
                "for a constant rate"
            )
        if not 0.0 <= self.floor <= 1.0:
            raise InvalidInput(f"rate: got floor {self.floor}, expected 0.0 to 1.0, a share of the peak")
        if (self.scale == "none") != (self.base_batch == 0) or self.base_batch < 0:
            raise InvalidInput(
                f"rate: got scale {self.scale!r} and base_batch {self.base_batch}, expected base_batch (the "
                "batch size for which learning_rate was tuned) with every scale but 'none', and 0 with 'none'"
            )


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


def check_rate(settings: RateSettings, training: TrainingSettings, parallel: ParallelSettings, *, plain: bool) -> None:
    """Raise InvalidInput if AdaScale is set and the job does not compute separate gradients of ``base_batch`` samples.

    Args:
        settings: The schedule.
        training: The job's batch and optimizer.
        parallel: The job's mesh.
        plain: Whether the gradients are sent without a communication hook.
    """
    if settings.scale != ADASCALE:
        return
    if parallel.sharded or parallel.pipelined or parallel.mesh.tp > 1 or parallel.microbatches > 1 or not plain:
        raise InvalidInput(
            f"rate: got scale 'adascale' for mesh {parallel.mesh} (replicate {parallel.replicate!r}), "
            f"{parallel.microbatches} microbatches and {'no ' if plain else 'a '}communication hook, expected one "
            "process, or a mesh of dp_replicate only with replicate 'ddp' and no hook: other meshes have no separate "
            "gradient for each part"
        )
    if training.optimizer != "sgd" or parallel.precision == "fp16":
        raise InvalidInput(
            f"rate: got scale 'adascale', optimizer {training.optimizer!r} and precision {parallel.precision!r}, "
            "expected sgd, and full or bf16: the gain is that of plain gradients"
        )
    num_parts = parallel.mesh.dp_replicate * training.accumulate
    if num_parts == 1 or training.batch_size != num_parts * settings.base_batch:
        raise InvalidInput(
            f"rate: got scale 'adascale', base_batch {settings.base_batch} and batch_size {training.batch_size}, "
            f"expected a batch of 2 or more times base_batch, a part for each of {parallel.mesh.dp_replicate} copies x "
            f"{training.accumulate} turns; change accumulate, the mesh or the batch"
        )
