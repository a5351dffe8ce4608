"""Names the rank that hangs, with the axis, the collective and the module, before torch's own timeout says less.

    with Watchdog(engine, folder, timeout_s) as watchdog:
        for ...:
            engine.step(batch)
            watchdog.beat(step)

A thread looks now and then whether anything has moved: steps, layers, collectives, or what else is told to be
``alive``. If nothing has for ``timeout_s``, the rank leaves a report of what it waits for (``hangs``), as
do all others that see one, and ends with status ``HUNG``: torchrun ends the rest, and starts all of them again if it
may. While all is well it costs next to nothing: torch records collectives in C++ itself, layers leave their name in
passing, and the rest is read off the training thread's stack when it is too late.
"""

import json
import linecache
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fanin.datacenter.jobs.elastic import attempt
from fanin.datacenter.parallel.engine import Engine
from fanin.datacenter.parallel.mesh import PIPELINE
from fanin.datacenter.parallel.pipelines.stages import Skip
from fanin.datacenter.watch.hangs import Report, Wait, attempt_folder, read_reports, report_name, sentence, write_report

HUNG: Final = 86
"""The status of a rank that ends because the job stands still."""
LOOKS: Final = 10
"""How often it is looked within a timeout: a hang is told at most a tenth of it late."""
GRACE_S: Final = 3.0
"""How long a rank waits for the others' reports; what they wait for ends when it ends."""
WORLD: Final = "all ranks"
TORCH: Final = str(Path(torch.__file__).parent)
BACKWARD: Final = "_engine_run_backward"


class Watchdog:
    """Looks after the training of the thread that enters it."""

    def __init__(self, engine: Engine, folder: Path, timeout_s: float) -> None:
        self._engine = engine
        self._folder = attempt_folder(folder, attempt())
        self._timeout_s = timeout_s
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._own = self._folder / report_name(self._rank)
        self._entered_s = time.time()
        self._groups = _groups(engine)
        self._names = {id(each): name for part in engine.parts.values() for name, each in part.named_modules()}
        self._hooks: list[RemovableHandle] = []
        self._ended = threading.Event()
        self._trainer = 0
        self._step = 0
        self._moves = 0
        self._passing = ""

    def __enter__(self) -> "Watchdog":
        self._trainer = threading.get_ident()
        self._own.unlink(missing_ok=True)
        # A compiled layer would compile them too.
        if not self._engine.rank_model.parallel.compile:
            for part in self._engine.parts.values():
                for name, layer in _layers(part, ""):
                    self._follow(name, layer)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for hook in self._hooks:
            hook.remove()

    def beat(self, step: int) -> None:
        """A step is done."""
        self._step = step
        self._pass("")

    def alive(self) -> None:
        """Something goes on that is no step, such as an evaluation's batch, or a checkpoint that is written."""
        self._moves += 1

    def report(self, still_s: float) -> Report:
        """What the training thread is at right now."""
        frames = list(_frames(self._trainer))
        recorded = _recorded()
        backward = any(frame.f_code.co_name == BACKWARD for frame in frames)
        within = "" if backward else self._module(frames)
        return Report(
            rank=self._rank,
            mesh=str(self._engine.rank_model.parallel.mesh),
            step=self._step,
            still_s=still_s,
            waits=self._pending(recorded) or self._message(frames),
            module=within or self._passing,
            phase="backward" if backward else "forward" if within else "after",
            line=_line(frames),
            done=self._done(recorded),
        )

    def _follow(self, name: str, layer: nn.Module) -> None:
        def before(_module: nn.Module, _inputs: object) -> None:
            self._pass(name)

        def after(_module: nn.Module, _inputs: object, output: object) -> None:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda _grad: self._pass(name))  # type: ignore[no-untyped-call]

        self._hooks += [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]

    def _pass(self, name: str) -> None:
        self._passing = name
        self._moves += 1

    def _watch(self) -> None:
        seen, since_s = (0, 0), time.monotonic()
        while not self._ended.wait(self._timeout_s / LOOKS):
            now_s, moved = time.monotonic(), (self._moves, max((each.index for each in _recorded()), default=0))
            if moved != seen:
                seen, since_s = moved, now_s
            # Whoever came last to what the others wait for has stood still for less long.
            if now_s - since_s >= self._timeout_s or self._is_called():
                self._tell(now_s - since_s)
                return

    def _is_called(self) -> bool:
        """Whether another rank has left a report in this attempt."""
        with suppress(OSError):
            return any(path.stat().st_mtime > self._entered_s for path in self._folder.glob(report_name("*")))
        return False

    def _tell(self, still_s: float) -> None:
        with suppress(OSError):
            write_report(self._folder, self.report(still_s))
        until_s = time.monotonic() + max(GRACE_S, 2 * self._timeout_s / LOOKS)
        reports: Mapping[int, Report] = {}
        while time.monotonic() < until_s and len(reports) < self._engine.rank_model.parallel.mesh.num_ranks:
            time.sleep(self._timeout_s / LOOKS / 10)
            reports = read_reports(self._folder)
        if reports:
            sys.stderr.write(f"watchdog: no progress for {still_s:.1f} s: {sentence(reports)}\n")
            sys.stderr.flush()
        # The others read it, too, before a rank that ends takes away what they wait in.
        time.sleep(self._timeout_s / LOOKS)
        os._exit(HUNG)

    def _pending(self, recorded: "list[Recorded]") -> Wait | None:
        for each in recorded:
            if each.group in self._groups and not each.ended:
                axis, ranks = self._groups[each.group]
                return Wait(axis=axis, kind=each.kind, ranks=ranks, sequence=each.sequence)
        return None

    def _message(self, frames: list[FrameType]) -> Wait | None:
        """Messages are not recorded; but what waits for one says so in its line."""
        if not frames or not any(word in _source(frames[0]) for word in (".wait(", "recv(")):
            return None
        for axis, ranks in self._groups.values():
            if axis == PIPELINE:
                return Wait(axis=axis, kind="receive", ranks=ranks)
        return None

    def _done(self, recorded: "list[Recorded]") -> dict[str, int]:
        return {self._groups[each.group][0]: each.sequence for each in recorded if each.group in self._groups}

    def _module(self, frames: list[FrameType]) -> str:
        for frame in frames:
            name: str | None = self._names.get(id(frame.f_locals.get("self")))
            if name:
                return name
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A collective as torch remembers it."""

    index: int
    group: str
    kind: str
    sequence: int
    ended: bool


def _recorded() -> list[Recorded]:
    """The last collectives of this rank, oldest first; none where this torch keeps no record."""
    dump: Callable[[bool, bool], bytes] | None = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    entries = [] if dump is None else json.loads(dump(True, False)).get("entries", [])
    return [
        Recorded(
            index=entry["record_id"],
            group=entry["process_group"][0],
            kind=entry["profiling_name"].rpartition(":")[2],
            sequence=entry["collective_seq_id"],
            ended=entry["retired"],
        )
        for entry in entries
        if not entry["is_p2p"]
    ]


def _groups(engine: Engine) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name of a group to its axis and ranks."""
    mesh = engine.rank_model.mesh
    if mesh is None:
        return {}
    found = {dist.group.WORLD: WORLD} | {
        mesh.get_group(axis): axis for axis, size in engine.rank_model.parallel.mesh.sizes.items() if size > 1
    }
    return {
        group.group_name: (axis, tuple(dist.get_process_group_ranks(group)))
        for group, axis in found.items()
        if group is not None
    }


def _layers(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a model is a row of: its children, and those of a list of layers one by one."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if any(isinstance(each, nn.ModuleList | nn.ModuleDict) for each in child.modules()):
            yield from _layers(child, f"{path}.")
        elif not isinstance(child, Skip):
            yield path, child


def _frames(thread: int) -> Iterator[FrameType]:
    """What a thread is in, innermost first."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _line(frames: list[FrameType]) -> str:
    ours = (frame for frame in frames if not frame.f_code.co_filename.startswith(TORCH))
    frame = next(ours, None)
    if frame is None:
        return "no Python line"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def _source(frame: FrameType) -> str:
    return str(linecache.getline(frame.f_code.co_filename, frame.f_lineno))
