"""Settings of the learning rate, the table ``[rate]`` of a config, and their checks.

``training.rates`` computes the rates from these settings.
"""

from dataclasses import dataclass
from typing import Final, Literal

from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.protos.errors import InvalidInput

ADASCALE: Final = "adascale"


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSettings:
    """The learning rate schedule, the table ``[rate]`` of a config.

    The config's learning rate is for a batch of ``base_batch`` samples.

    Attributes:
        scale: Rule that scales the rate with the batch size.
        base_batch: Samples in the batch for which the learning rate was tuned; 0 without a scaling rule.
        warm_up: Steps in which the rate rises linearly from zero. With a scaling rule, a step has ``base_batch``
            samples here.
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
            raise InvalidInput(f"rate: got warm_up {self.warm_up}, expected 0 or more steps", code="FN-1250")
        if self.decay_steps < 0 or (self.decay_steps and self.decay == "constant"):
            raise InvalidInput(
                f"rate: got decay_steps {self.decay_steps} and decay {self.decay!r}, expected 0 or more steps, and 0 "
                "for a constant rate",
                code="FN-1250",
            )
        if not 0.0 <= self.floor <= 1.0:
            raise InvalidInput(
                f"rate: got floor {self.floor}, expected 0.0 to 1.0, a share of the peak", code="FN-1250"
            )
        if self.floor and self.decay == "constant":
            raise InvalidInput(
                f"rate: got floor {self.floor} and decay 'constant', expected decay 'cosine' with a floor: a constant "
                "rate does not fall; set decay = 'cosine', or leave floor out",
                code="FN-1250",
            )
        if (self.scale == "none") != (self.base_batch == 0) or self.base_batch < 0:
            raise InvalidInput(
                f"rate: got scale {self.scale!r} and base_batch {self.base_batch}, expected base_batch (the "
                "batch size for which learning_rate was tuned) with every scale but 'none', and 0 with 'none'",
                code="FN-1251",
            )


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
            "gradient for each part",
            code="FN-1252",
        )
    if training.optimizer != "sgd" or parallel.precision == "fp16":
        raise InvalidInput(
            f"rate: got scale 'adascale', optimizer {training.optimizer!r} and precision {parallel.precision!r}, "
            "expected sgd, and full, double or bf16: the gain is defined for plain gradients",
            code="FN-1252",
        )
    num_parts = parallel.mesh.dp_replicate * training.accumulate
    if num_parts == 1 or training.batch_size != num_parts * settings.base_batch:
        raise InvalidInput(
            f"rate: got scale 'adascale', base_batch {settings.base_batch} and batch_size {training.batch_size}, "
            f"expected 2 or more parts of base_batch: one for each of {parallel.mesh.dp_replicate} copies x "
            f"{training.accumulate} gradient accumulation steps; change accumulate, the mesh or batch_size",
            code="FN-1251",
        )
