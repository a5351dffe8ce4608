"""The learning rate of each step: how it grows with the batch, how it rises at first and how it falls.

Pure functions of the step's number, so that a job that goes on elsewhere goes on with the same rates. ``linear`` is
Goyal et al. 2017 (arXiv 1706.02677, section 2.1); ``sqrt`` keeps the variance of a step's change (Krizhevsky 2014,
arXiv 1404.5997, section 5); ``legw`` adds that the warm-up grows with the batch, too, which in steps means that it
stays as it is (You et al. 2019, arXiv 1901.08256, section 4). ``adascale`` (Johnson et al. 2020, arXiv 2007.05105,
section 3 and appendix B.3) asks the gradients in each step by how much: ``Noise`` is what it has seen.
"""

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.protos.errors import InvalidInput

ADASCALE: Final = "adascale"
WINDOW: Final = 1000
"""Over so many parts, about, AdaScale's means go back; the paper's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSettings:
    """From the learning rate of a batch of ``base_batch`` samples to that of each step.

    ``scale``: how it grows with the batch size. ``warm_up``: steps, of ``base_batch`` samples where a rule scales, in
    which it rises from nothing. ``decay``: how it then falls, to ``floor`` of its peak at the last of ``decay_steps``,
    0 for the job's last. A checkpoint keeps this number, so a job that may be prolonged sets it from the start.
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
                f"rate: got scale {self.scale!r} and base_batch {self.base_batch}, expected for each rule the samples "
                "of the batch that the learning rate was found with, and 0 for none"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rates of a job: ``peak`` after ``warm_steps``, ``num_steps`` in all (0: without an end).

    With AdaScale steps are those of ``base_batch``, and each rate is still to be multiplied by the step's gain.
    """

    peak: float
    warm_steps: int
    num_steps: int
    settings: RateSettings

    @property
    def decay_steps(self) -> int:
        """Steps at whose end the decay ends, warm-up included; 0 for a constant rate."""
        return 0 if self.settings.decay == "constant" else self.num_steps

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
    root = math.sqrt(times)
    factor = {"none": 1.0, "linear": times, "sqrt": root, "legw": root, ADASCALE: 1.0}[settings.scale]
    fewer = 1.0 if settings.scale in ("none", "legw", ADASCALE) else times
    return Rates(
        peak=learning_rate * factor,
        warm_steps=math.ceil(settings.warm_up / fewer),
        num_steps=num_steps,
        settings=settings,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What AdaScale has seen so far: running means of the ``variance`` of the gradient of ``base_batch`` samples and of
    the squared norm of its expectation (``signal``), over ``count`` steps; and the ``steps`` of ``base_batch`` that
    all steps until now were worth.
    """

    variance: float = 0.0
    signal: float = 0.0
    count: int = 0
    steps: float = 0.0

    def seen(self, parts_square: float, mean_square: float, num_parts: int) -> "Noise":
        """After one more step: ``parts_square`` is the mean of the squared norms of the parts' gradients,
        ``mean_square`` the squared norm of their mean."""
        variance = max(0.0, (parts_square - mean_square) * num_parts / (num_parts - 1))
        # Unbiased, and so below 0 at times: its mean is to stay so.
        signal = mean_square - variance / num_parts
        # The mean of all until there are enough, and from then on one that forgets.
        share = max(1.0 / (self.count + 1), min(1.0, num_parts / WINDOW))
        return replace(
            self,
            variance=self.variance + share * (variance - self.variance),
            signal=self.signal + share * (signal - self.signal),
            count=self.count + 1,
        )

    def gain(self, num_parts: int) -> float:
        """How many steps of ``base_batch`` one of so many parts is worth: 1 without noise, all parts without signal."""
        signal = max(0.0, self.signal)
        without = self.variance + signal
        return without / (self.variance / num_parts + signal) if without > 0.0 else 1.0


def check_rate(settings: RateSettings, training: TrainingSettings, parallel: ParallelSettings, *, plain: bool) -> None:
    """Raise InvalidInput if AdaScale is asked for where the gradients of parts of ``base_batch`` samples never are by
    themselves. ``plain``: whether copies send their gradients as they are."""
    if settings.scale != ADASCALE:
        return
    if parallel.sharded or parallel.pipelined or parallel.mesh.tp > 1 or parallel.microbatches > 1 or not plain:
        raise InvalidInput(
            f"rate: got scale 'adascale' for mesh {parallel.mesh} (replicate {parallel.replicate!r}), "
            f"{parallel.microbatches} microbatches and {'no ' if plain else 'a '}communication hook, expected one "
            "process or dp_replicate alone, kept alike by ddp without a hook: elsewhere no part's gradient is by itself"
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
