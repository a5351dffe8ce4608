"""Measurements of a training job: one ``StepRecord`` per step.

The first rank measures (``Meter``) and passes each record to its sinks (``sinks``). This module does not communicate
with other ranks and does not import torch; the clock and the memory probe are arguments.
"""

import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fanin.datacenter.observers.events import DataRead, Event, StageComputed, StepComputed, StepEnded, StepStarted
from fanin.protos.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The measurements of one step.

    Attributes:
        step: Number of the step, from 0.
        loss: Loss before the step; None if the step was skipped.
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
    """An observer that builds a step record from the events of each step.

    Args:
        scale: The reference values.
        sinks: The receivers of the records.
        peak_memory: Returns the peak memory in bytes; by default that of this process.
        traffic: Returns the bytes that a step sends, by axis. All steps send the same, so it counts one of them.
    """

    def __init__(
        self,
        scale: Scale,
        sinks: Sequence[Sink],
        peak_memory: Callable[[], int] | None = None,
        traffic: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self.scale = scale
        self.sinks = sinks
        self._peak_memory = peak_memory or peak_resident_bytes
        self._traffic = traffic
        self._data_s = self._step_s = self._busy_s = 0.0

    def on(self, event: Event) -> None:
        """Measure a step, and write its record when it has ended.

        Raises:
            InvalidInput: A step ended that took no time.
        """
        match event:
            case StepStarted():
                self._data_s = self._step_s = self._busy_s = 0.0
            case DataRead(seconds=seconds):
                self._data_s = seconds
            case StageComputed(seconds=seconds):
                self._busy_s += seconds
            case StepComputed(seconds=seconds):
                self._step_s = seconds
            case StepEnded():
                self._write(event)

    def _write(self, event: StepEnded) -> None:
        if self._step_s <= 0:
            raise InvalidInput(
                f"meter: got no time for step {event.step}, expected a StepComputed before its StepEnded",
                code="FN-1390",
            )
        scale, seconds = self.scale, self._data_s + self._step_s
        rate, peak = event.units / seconds, scale.peak_flops_per_second * scale.num_ranks
        record = StepRecord(
            step=event.step,
            loss=event.loss,
            seconds=seconds,
            tokens_per_second=rate,
            data_seconds=self._data_s,
            peak_memory_bytes=self._peak_memory(),
            mfu=scale.flops_per_token * rate / peak if peak > 0 and scale.flops_per_token > 0 else None,
            gradient_norm=event.norm,
            learning_rate=event.rate,
            gain=event.gain,
            waiting_share=waiting_share(self._busy_s, self._step_s) if scale.pipelined else None,
            bytes_by_axis=dict(self._traffic()),
        )
        for sink in self.sinks:
            sink.write(record)

    def close(self) -> None:
        """Close all sinks; no step follows."""
        for sink in self.sinks:
            sink.close()


def waiting_share(busy_s: float, total_s: float) -> float:
    """Return the share of ``total_s`` in which a pipeline rank computed nothing: the bubble, and communication."""
    return max(0.0, 1.0 - busy_s / total_s) if total_s > 0 else 0.0


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process. The memory of a GPU is not included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The unit of ru_maxrss is kilobytes on Linux and bytes on macOS.
    return peak if sys.platform == "darwin" else peak * 1024
