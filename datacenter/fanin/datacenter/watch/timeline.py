"""Timeline of one rank: the spans of its steps, and a trace of them for a browser.

The trace is in Chrome's Trace Event Format (complete events, phase "X", microseconds), one file per rank. Perfetto and
``chrome://tracing`` open several files at once and show each rank as a process. Only the last ``limit`` spans are kept,
so the memory of a long job does not grow. The clocks of different machines are not synchronized.

This module does not import torch.
"""

import json
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fanin.datacenter.observers.events import DataRead, Event, StageComputed, StepComputed, StepStarted
from fanin.protos.errors import InvalidInput

LIMIT: Final = 100_000
"""Spans in a trace; a browser does not open a file with more."""
DATA: Final = "data"
STEP: Final = "step"
"""Names of the spans of DataRead and StepComputed. A StageComputed has the name of its work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A named interval of a step."""

    name: str
    started_s: float
    seconds: float
    step: int


class Timeline:
    """An observer that keeps the spans of a rank."""

    def __init__(self, rank: int, limit: int = LIMIT) -> None:
        if limit < 1:
            raise InvalidInput(f"timeline: got a limit of {limit} spans, expected at least 1", code="FN-1390")
        self.rank = rank
        self.spans: deque[Span] = deque(maxlen=limit)
        self._step = 0

    def on(self, event: Event) -> None:
        """Keep the span of an event that has one."""
        match event:
            case StepStarted(step=step):
                self._step = step
            case DataRead():
                self._add(DATA, event)
            case StageComputed(work=work):
                self._add(work, event)
            case StepComputed():
                self._add(STEP, event)

    def _add(self, name: str, event: DataRead | StageComputed | StepComputed) -> None:
        self.spans.append(Span(name=name, started_s=event.started_s, seconds=event.seconds, step=self._step))

    def write(self, path: Path) -> None:
        """Write the trace to a file, atomically."""
        draft = path.with_name(f"{path.name}.draft")
        draft.write_text(json.dumps(trace(self)) + "\n", encoding="utf-8")
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
