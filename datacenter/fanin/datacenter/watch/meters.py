"""Measurements of a training job: one ``StepRecord`` per step.

The first rank measures (``Meter``) and passes each record to its sinks (``sinks``). This module does not communicate
with other ranks and does not import torch; the clock and the memory probe are arguments.
"""

import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from fanin.datacenter.watch.timeline import Timeline, waiting_share
from fanin.protos.errors import InvalidInput

DATA: Final = "data"
STEP: Final = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The measurements of one step.

    Attributes:
        step: Number of the step, from 0.
        loss: Loss before the step; None if it is not finite.
        seconds: Duration of the step, with the wait for its data.
        tokens_per_second: Throughput of all ranks, in tokens or samples.
        data_seconds: Seconds of the wait for data.
        peak_memory_bytes: Most memory that this process has used so far.
        mfu: Model FLOPs utilization as defined in ``flops``; None if the hardware's peak is unknown.
        gradient_norm: Norm of the gradient; None if it is not finite.
        learning_rate: Learning rate of the step.
        gain: AdaScale's gain.
        waiting_share: Share of the time in which a pipeline rank computed nothing.
        bytes_by_axis: Payload that a rank sends, in bytes by mesh axis.
    """

    step: int
    loss: float | None
    seconds: float
    tokens_per_second: float
    data_seconds: float
    peak_memory_bytes: int
    mfu: float | None = None
    gradient_norm: float | None = None
    learning_rate: float | None = None
    gain: float | None = None
    waiting_share: float | None = None
    bytes_by_axis: Mapping[str, int] = field(default_factory=dict)


class Sink(Protocol):
    """A destination of step records."""

    def write(self, row: StepRecord) -> None:
        """Accept a record."""

    def close(self) -> None:
        """Release the destination; no record follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The reference values of a job's throughput; 0.0 is an unknown value.

    ``pipelined`` is True if the ranks of a pipeline wait for each other.
    """

    num_ranks: int = 1
    flops_per_token: float = 0.0
    peak_flops_per_second: float = 0.0
    pipelined: bool = False


class Meter:
    """Builds step records from the ``data`` and ``step`` spans of a Timeline::

    with timeline.span(DATA):
        batch = next(batches)
    with timeline.span(STEP):
        stepped = engine.step(batch)
        loss = float(stepped.loss)            # waits for the GPU to finish the step
    meter.record(loss, num_tokens)
    """

    def __init__(
        self, timeline: Timeline, scale: Scale, sinks: Sequence[Sink], peak_memory: Callable[[], int] | None = None
    ) -> None:
        self.timeline = timeline
        self.scale = scale
        self.sinks = sinks
        self.bytes_by_axis: Mapping[str, int] = {}
        """Bytes that a step sends. All steps send the same, so the caller counts one step with a ByteCounter."""
        self._peak_memory = peak_memory or peak_resident_bytes

    def record(
        self,
        loss: float | None,
        num_tokens: int,
        norm: float | None = None,
        learning_rate: float | None = None,
        gain: float | None = None,
    ) -> StepRecord:
        """End the current step, and pass its record to all sinks.

        Args:
            loss: Loss of the step.
            num_tokens: Tokens or samples of the step over all ranks, without padding.
            norm: Norm of the gradient.
            learning_rate: Learning rate of the step.
            gain: AdaScale's gain.

        Raises:
            InvalidInput: The timeline has no ``step`` span.
        """
        step = self.timeline.step
        seconds = self.timeline.next_step()
        data_s, step_s = seconds.get(DATA, 0.0), seconds.get(STEP, 0.0)
        if step_s <= 0:
            raise InvalidInput(f"meter: got no time under {STEP!r} in step {step}, expected timeline.span({STEP!r})")
        rate = num_tokens / (data_s + step_s)
        scale = self.scale
        peak = scale.peak_flops_per_second * scale.num_ranks
        record = StepRecord(
            step=step,
            loss=loss,
            seconds=data_s + step_s,
            tokens_per_second=rate,
            data_seconds=data_s,
            peak_memory_bytes=self._peak_memory(),
            mfu=scale.flops_per_token * rate / peak if peak > 0 and scale.flops_per_token > 0 else None,
            gradient_norm=norm,
            learning_rate=learning_rate,
            gain=gain,
            waiting_share=waiting_share(seconds, step_s) if scale.pipelined else None,
            bytes_by_axis=dict(self.bytes_by_axis),
        )
        for sink in self.sinks:
            sink.write(record)
        return record

    def close(self) -> None:
        """Close all sinks; no step follows."""
        for sink in self.sinks:
            sink.close()


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process. The memory of a GPU is not included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The unit of ru_maxrss is kilobytes on Linux and bytes on macOS.
    return peak if sys.platform == "darwin" else peak * 1024
