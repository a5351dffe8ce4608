"""What one rank did when: phases of its steps, and a trace of them that a browser shows.

The trace is in Chrome's Trace Event Format (complete events, phase "X", microseconds), one file a rank: Perfetto and
``chrome://tracing`` open several at once, with a rank as a process. Only the last ``limit`` phases are kept, so that a
long run's memory does not grow. Clocks of different machines are not brought together. Needs no torch.
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
"""Phases of a trace: more make files that no browser opens."""
FORWARD: Final = "forward"
BACKWARD: Final = "backward"
WEIGHTS: Final = "weights"
"""A backward pass that makes gradients of weights alone, in schedules that split it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Something that took a while."""

    name: str
    started_s: float
    seconds: float
    step: int


class Timeline:
    """The phases of a rank; ``clock`` in seconds."""

    def __init__(self, rank: int, clock: Callable[[], float] = time.perf_counter, limit: int = LIMIT) -> None:
        if limit < 1:
            raise InvalidInput(f"timeline: got a limit of {limit} phases, expected at least 1")
        self.rank = rank
        self.clock = clock
        self.step = 0
        self.phases: deque[Phase] = deque(maxlen=limit)
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note what is done within, also where it fails."""
        started_s = self.clock()
        try:
            yield
        finally:
            seconds = self.clock() - started_s
            self.phases.append(Phase(name=name, started_s=started_s, seconds=seconds, step=self.step))
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def next_step(self) -> dict[str, float]:
        """Seconds of the step that ends here by phase; the next begins."""
        found, self._seconds = self._seconds, {}
        self.step += 1
        return found

    def write(self, path: Path) -> None:
        """The trace, beside its name first and then in its place."""
        draft = path.with_name(f"{path.name}.draft")
        draft.write_text(json.dumps(trace(self)) + "\n")
        draft.replace(path)


def trace(timeline: Timeline) -> dict[str, object]:
    """The Trace Event Format's object."""
    events: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": timeline.rank, "tid": 0, "args": {"name": f"rank {timeline.rank}"}}
    ]
    events += [
        {
            "name": phase.name,
            "cat": "step",
            "ph": "X",
            "ts": phase.started_s * 1e6,
            "dur": phase.seconds * 1e6,
            "pid": timeline.rank,
            "tid": 0,
            "args": {"step": phase.step},
        }
        for phase in timeline.phases
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


class Stage(Protocol):
    """What torch's pipeline stages have, as far as it is timed."""

    forward_one_chunk: Callable[..., object]
    backward_one_chunk: Callable[..., object]
    backward_weight_one_chunk: Callable[..., object]


def watch_stage(stage: Stage, timeline: Timeline) -> None:
    """Note each piece that a stage of a pipeline computes; on a GPU, when its work was given out."""
    stage.forward_one_chunk = _noted(stage.forward_one_chunk, FORWARD, timeline)
    stage.backward_one_chunk = _noted(stage.backward_one_chunk, BACKWARD, timeline)
    stage.backward_weight_one_chunk = _noted(stage.backward_weight_one_chunk, WEIGHTS, timeline)


def waiting_share(seconds: dict[str, float], whole_s: float) -> float:
    """The share of a pipeline's ``whole_s`` in which its rank computed nothing: the bubble, and sending."""
    busy = sum(seconds.get(name, 0.0) for name in (FORWARD, BACKWARD, WEIGHTS))
    return max(0.0, 1.0 - busy / whole_s) if whole_s > 0 else 0.0


def _noted(function: Callable[..., object], name: str, timeline: Timeline) -> Callable[..., object]:
    def timed(*args: object, **kwargs: object) -> object:
        with timeline.phase(name):
            return function(*args, **kwargs)

    return timed
