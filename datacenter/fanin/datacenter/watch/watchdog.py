"""Watchdog of one rank: ends a job that makes no progress, and names the rank that hangs.

    with Watchdog(engine, folder, timeout_s) as watchdog:
        TrainingLoop(engine, scored, config, data, LoopStart(observers=Observers([watchdog]))).run()

A thread checks for progress: events, layers and collectives. In your own loop, call ``beat`` after each step, and
``alive`` inside long operations. After ``timeout_s`` without progress the rank writes a report of its activity
(``hangs``). Every rank that detects a report writes its own. Then each rank logs the diagnosis and ends with status
``HUNG``. torchrun ends the remaining ranks and restarts all of them if it has restarts left. The diagnosis must come
before torch's own timeout, whose message does not name a cause.

The cost during normal training is close to zero: torch records collectives in C++, and each layer stores its name in a
hook. All other facts are read from the training thread's stack after a hang.
"""

import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fanin.datacenter.observers.events import Event, StepEnded, TrainingStarted
from fanin.datacenter.parallel.engine import Engine
from fanin.datacenter.ranks.elastic import attempt
from fanin.datacenter.ranks.mesh import PIPELINE
from fanin.datacenter.watch.activity import (
    CollectiveRecord,
    describe_line,
    frames_of,
    groups_by_name,
    layers_of,
    recent_collectives,
    source_line,
)
from fanin.datacenter.watch.hangs import (
    HangReport,
    PendingOperation,
    attempt_folder,
    diagnose,
    read_reports,
    report_name,
    write_report,
)

HUNG: Final = 86
"""Exit status of a rank that ends because the job makes no progress."""
CHECKS: Final = 10
"""Checks per timeout: a hang is detected at most a tenth of the timeout late."""
GRACE_S: Final = 3.0
"""Seconds that a rank waits for the reports of others. When it ends, the operations in which they wait end, too."""
BACKWARD: Final = "_engine_run_backward"


class Watchdog:
    """An observer that monitors the training thread, which is the thread that enters it."""

    def __init__(self, engine: Engine, folder: Path, timeout_s: float) -> None:
        self._engine = engine
        self._folder = attempt_folder(folder, attempt())
        self._timeout_s = timeout_s
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._own = self._folder / report_name(self._rank)
        self._entered_s = time.time()
        self._groups = groups_by_name(engine)
        self._names = {id(each): name for part in engine.parts.values() for name, each in part.named_modules()}
        self._hooks: list[RemovableHandle] = []
        self._stop = threading.Event()
        self._thread = 0
        self._step = 0
        self._num_events = 0
        self._last_layer = ""

    def __enter__(self) -> "Watchdog":
        self._thread = threading.get_ident()
        self._own.unlink(missing_ok=True)
        # torch.compile would compile the hooks, too.
        if not self._engine.rank_model.parallel.compile:
            for part in self._engine.parts.values():
                for name, layer in layers_of(part, ""):
                    self._add_hooks(name, layer)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for hook in self._hooks:
            hook.remove()

    def on(self, event: Event) -> None:
        """Record an event as progress."""
        match event:
            case TrainingStarted(num_steps=num_steps):
                self.beat(num_steps)
            case StepEnded(step=step):
                self.beat(step + 1)
            case _:
                self.alive()

    def beat(self, step: int) -> None:
        """Record that ``step`` steps are done."""
        self._step = step
        self._pass("")

    def alive(self) -> None:
        """Record progress outside of steps, such as a batch of an evaluation or a checkpoint in progress."""
        self._num_events += 1

    def report(self, still_s: float) -> HangReport:
        """Return the current activity of the training thread, after ``still_s`` seconds without progress."""
        frames = list(frames_of(self._thread))
        collectives = recent_collectives()
        backward = any(frame.f_code.co_name == BACKWARD for frame in frames)
        module = "" if backward else self._module(frames)
        return HangReport(
            rank=self._rank,
            mesh=str(self._engine.rank_model.parallel.mesh),
            step=self._step,
            still_s=still_s,
            waits=self._pending(collectives) or self._message(frames),
            module=module or self._last_layer,
            phase="backward" if backward else "forward" if module else "after",
            line=describe_line(frames),
            done=self._last_sequences(collectives),
        )

    def _add_hooks(self, name: str, layer: nn.Module) -> None:
        def before(_module: nn.Module, _inputs: object) -> None:
            self._pass(name)

        def after(_module: nn.Module, _inputs: object, output: object) -> None:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda _grad: self._pass(name))  # type: ignore[no-untyped-call]

        self._hooks += [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]

    def _pass(self, name: str) -> None:
        self._last_layer = name
        self._num_events += 1

    def _watch(self) -> None:
        previous, since_s = (0, 0), time.monotonic()
        while not self._stop.wait(self._timeout_s / CHECKS):
            now_s = time.monotonic()
            current = (self._num_events, max((each.index for each in recent_collectives()), default=0))
            if current != previous:
                previous, since_s = current, now_s
            # The rank that entered a blocked collective last has waited for less time than the others.
            if now_s - since_s >= self._timeout_s or self._others_report():
                self._end(now_s - since_s)
                return

    def _others_report(self) -> bool:
        """Return whether another rank has written a report in this attempt."""
        with suppress(OSError):
            return any(path.stat().st_mtime > self._entered_s for path in self._folder.glob(report_name("*")))
        return False

    def _end(self, still_s: float) -> None:
        """Write the report, collect those of other ranks, log the diagnosis and end the process."""
        with suppress(OSError):
            write_report(self._folder, self.report(still_s))
        until_s = time.monotonic() + max(GRACE_S, 2 * self._timeout_s / CHECKS)
        reports: Mapping[int, HangReport] = {}
        while time.monotonic() < until_s and len(reports) < self._engine.rank_model.parallel.mesh.num_ranks:
            time.sleep(self._timeout_s / CHECKS / 10)
            reports = read_reports(self._folder)
        if reports:
            sys.stderr.write(f"watchdog: no progress for {still_s:.1f} s: {diagnose(reports)}\n")
            sys.stderr.flush()
        # The other ranks need time to read the reports, too: when this rank ends, their collectives fail.
        time.sleep(self._timeout_s / CHECKS)
        os._exit(HUNG)

    def _pending(self, collectives: list[CollectiveRecord]) -> PendingOperation | None:
        for each in collectives:
            if each.group in self._groups and not each.ended:
                axis, ranks = self._groups[each.group]
                return PendingOperation(axis=axis, kind=each.kind, ranks=ranks, sequence=each.sequence)
        return None

    def _message(self, frames: list[FrameType]) -> PendingOperation | None:
        """Return the message that the thread waits for. torch records no messages, so the source line decides."""
        if not frames or not any(word in source_line(frames[0]) for word in (".wait(", "recv(")):
            return None
        for axis, ranks in self._groups.values():
            if axis == PIPELINE:
                return PendingOperation(axis=axis, kind="receive", ranks=ranks)
        return None

    def _last_sequences(self, collectives: list[CollectiveRecord]) -> dict[str, int]:
        return {self._groups[each.group][0]: each.sequence for each in collectives if each.group in self._groups}

    def _module(self, frames: list[FrameType]) -> str:
        for frame in frames:
            name: str | None = self._names.get(id(frame.f_locals.get("self")))
            if name:
                return name
        return ""
