"""Timeline of one rank: the spans of its steps, and a trace of them for a browser.

The trace is in Chrome's Trace Event Format (complete events, phase "X", microseconds), one file per rank. Perfetto and
``chrome://tracing`` open several files at once and show each rank as a process. Only the last ``limit`` spans are kept,
so the memory of a long job does not grow. The clocks of different machines are not synchronized.

This module does not import torch.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from fanin.protos.errors import InvalidInput

LIMIT: Final = 100_000
"""Spans in a trace; a browser does not open a file with more."""
FORWARD: Final = "forward"
BACKWARD: Final = "backward"
WEIGHTS: Final = "weights"
"""A backward pass that computes only the gradients of weights, in schedules that split the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A named interval of a step."""

    name: str
    started_s: float
    seconds: float
    step: int


class Timeline:
    """The spans of a rank. ``clock`` returns seconds."""

    def __init__(self, rank: int, clock: Callable[[], float] = time.perf_counter, limit: int = LIMIT) -> None:
        if limit < 1:
            raise InvalidInput(f"timeline: got a limit of {limit} spans, expected at least 1")
        self.rank = rank
        self.clock = clock
        self.step = 0
        self.spans: deque[Span] = deque(maxlen=limit)
        self._seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the enclosed block as a span, even if it raises."""
        started_s = self.clock()
        try:
            yield
        finally:
            seconds = self.clock() - started_s
            self.spans.append(Span(name=name, started_s=started_s, seconds=seconds, step=self.step))
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def next_step(self) -> dict[str, float]:
        """End the current step and return its seconds by span name."""
        seconds, self._seconds = self._seconds, {}
        self.step += 1
        return seconds

    def write(self, path: Path) -> None:
        """Write the trace to a file, atomically."""
        draft = path.with_name(f"{path.name}.draft")
        draft.write_text(json.dumps(trace(self)) + "\n")
        draft.replace(path)


def trace(timeline: Timeline) -> dict[str, object]:
    """Return the timeline as an object of the Trace Event Format."""
    events: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": timeline.rank, "tid": 0, "args": {"name": f"rank {timeline.rank}"}}
    ]
    events += [
        {
            "name": span.name,
            "cat": "step",
            "ph": "X",
            "ts": span.started_s * 1e6,
            "dur": span.seconds * 1e6,
            "pid": timeline.rank,
            "tid": 0,
            "args": {"step": span.step},
        }
        for span in timeline.spans
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


class TimedStage(Protocol):
    """The methods of torch's pipeline stages that are timed."""

    forward_one_chunk: Callable[..., object]
    backward_one_chunk: Callable[..., object]
    backward_weight_one_chunk: Callable[..., object]


def watch_stage(stage: TimedStage, timeline: Timeline) -> None:
    """Record each microbatch that a pipeline stage computes. On a GPU a span is the time to launch its kernels."""
    stage.forward_one_chunk = _timed(stage.forward_one_chunk, FORWARD, timeline)
    stage.backward_one_chunk = _timed(stage.backward_one_chunk, BACKWARD, timeline)
    stage.backward_weight_one_chunk = _timed(stage.backward_weight_one_chunk, WEIGHTS, timeline)


def waiting_share(seconds: dict[str, float], total_s: float) -> float:
    """Return the share of ``total_s`` in which a pipeline rank computed nothing: the bubble, and communication."""
    busy = sum(seconds.get(name, 0.0) for name in (FORWARD, BACKWARD, WEIGHTS))
    return max(0.0, 1.0 - busy / total_s) if total_s > 0 else 0.0


def _timed(function: Callable[..., object], name: str, timeline: Timeline) -> Callable[..., object]:
    def timed(*args: object, **kwargs: object) -> object:
        with timeline.span(name):
            return function(*args, **kwargs)

    return timed
