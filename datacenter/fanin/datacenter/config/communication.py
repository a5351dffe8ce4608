"""Settings of the communication between replicas, the table ``[communication]`` of a config, and their checks.

``training.communication`` describes and applies the methods.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fanin.datacenter.parallel.settings import ParallelSettings
from fanin.protos.errors import InvalidInput

Hook = Literal["none", "fp16", "bf16", "powersgd"]
MIN_DENSE_STEPS = 2
"""torch's PowerSGD rebuilds its buckets in the first step and loses its error memory then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationSettings:
    """The communication between replicas, the table ``[communication]`` of a config.

    Attributes:
        hook: Compression of the gradients.
        rank: Rank of PowerSGD's factors.
        local_period: Steps between two averages of the replicas; 0 to average the gradients in every step.
        dense_steps: Exact steps before PowerSGD or local steps begin.
    """

    hook: Hook = "none"
    rank: int = 4
    local_period: int = 0
    dense_steps: int = 10

    def __post_init__(self) -> None:
        if self.rank < 1 or self.local_period < 0 or self.dense_steps < MIN_DENSE_STEPS:
            raise InvalidInput(
                f"communication: got rank {self.rank}, local_period {self.local_period} and dense_steps "
                f"{self.dense_steps}, expected at least 1, 0 and {MIN_DENSE_STEPS}",
                code="FN-1255",
            )
        if self.local_period and self.hook != "none":
            raise InvalidInput(
                f"communication: got hook {self.hook!r} and local_period {self.local_period}, expected one of them: in "
                "local steps no gradient travels",
                code="FN-1256",
            )

    @property
    def plain(self) -> bool:
        """Whether every step sends the gradients uncompressed."""
        return self.hook == "none" and not self.local_period


def check_communication(settings: CommunicationSettings, parallel: ParallelSettings, every: Sequence[int]) -> None:
    """Raise InvalidInput unless the mesh supports the settings.

    With local steps, evaluations and checkpoints must fall on steps at which the replicas agree.

    Args:
        settings: The communication settings.
        parallel: The job's mesh.
        every: Steps between (evaluations, checkpoints).
    """
    if settings.plain:
        return
    if parallel.sharded or parallel.pipelined or parallel.mesh.tp > 1 or parallel.mesh.dp_replicate == 1:
        raise InvalidInput(
            f"communication: got hook {settings.hook!r} and local_period {settings.local_period} for mesh "
            f"{parallel.mesh} (replicate {parallel.replicate!r}), expected a mesh of dp_replicate only, "
            "with replicate 'ddp'",
            code="FN-1256",
        )
    if parallel.precision == "double" and settings.hook in ("fp16", "bf16"):
        raise InvalidInput(
            f"communication: got hook {settings.hook!r} and precision 'double', expected hook 'none' or 'powersgd': "
            "the hook would round float64 gradients to 16 bits; omit the hook, or use precision 'full'",
            code="FN-1256",
        )
    period = settings.local_period
    if period and (every[0] == 0 or any(steps % period for steps in every)):
        raise InvalidInput(
            f"communication: got local_period {period}, an evaluation every {every[0]} and a checkpoint every "
            f"{every[1]} steps, expected multiples of the period: copies differ between averages; change one of them",
            code="FN-1257",
        )


def check_checkpointable(settings: CommunicationSettings, folder: Path | None) -> None:
    """Raise InvalidInput if the job writes checkpoints to ``folder`` and the replicas have separate state.

    A checkpoint cannot store each replica's unsent gradients (PowerSGD) or own parameters (local steps).
    """
    if folder is not None and (settings.local_period or settings.hook == "powersgd"):
        raise InvalidInput(
            f"communication: got hook {settings.hook!r} and local_period {settings.local_period} with checkpoints in "
            f"{folder}, expected neither powersgd nor local steps: a checkpoint cannot store the state that differs "
            "between the copies; remove one of them",
            code="FN-1257",
        )


def check_traffic(settings: CommunicationSettings, *, counted: bool) -> None:
    """Raise InvalidInput if bytes must be ``counted`` and steps send different amounts: only one step is counted."""
    if counted and (settings.local_period or settings.hook == "powersgd"):
        raise InvalidInput(
            f"watch: got traffic, hook {settings.hook!r} and local_period {settings.local_period}, expected neither "
            "powersgd nor local steps: the bytes of one step are counted, and here steps differ; omit traffic",
            code="FN-1257",
        )


def check_skips(settings: CommunicationSettings, max_skips: int, precision: str) -> None:
    """Raise InvalidInput if steps may be skipped and PowerSGD would add their gradients to later steps.

    With ``fp16``, a step is skipped whenever the scale of the loss is too large.
    """
    if settings.hook != "powersgd" or not (max_skips or precision == "fp16"):
        return
    received, advice = (f"max_skips {max_skips}", "set max_skips 0") if max_skips else ("precision 'fp16'", "take bf16")
    raise InvalidInput(
        f"training: got {received} and hook 'powersgd', expected one of them: the hook adds what it did not send of a "
        f"gradient to the next one, also if it is not finite; {advice}, or take another hook",
        code="FN-1257",
    )
