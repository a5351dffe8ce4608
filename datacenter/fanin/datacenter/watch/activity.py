"""The current activity of a rank: its last collectives, and the stack of its training thread.

The watchdog reads both only after progress has stopped, so they cost nothing while a job runs well.
"""

import json
import linecache
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from fanin.datacenter.parallel.engine import Engine
from fanin.datacenter.parallel.pipelines.stages import Skip

WORLD: Final = "all ranks"
TORCH: Final = str(Path(torch.__file__).parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRecord:
    """An entry of torch's flight recorder: a collective of this rank, running or ended."""

    index: int
    group: str
    kind: str
    sequence: int
    ended: bool


def recent_collectives() -> list[CollectiveRecord]:
    """Return the last collectives of this rank, oldest first; empty if this torch has no flight recorder."""
    dump: Callable[[bool, bool], bytes] | None = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    entries = [] if dump is None else json.loads(dump(True, False)).get("entries", [])
    return [
        CollectiveRecord(
            index=entry["record_id"],
            group=entry["process_group"][0],
            kind=entry["profiling_name"].rpartition(":")[2],
            sequence=entry["collective_seq_id"],
            ended=entry["retired"],
        )
        for entry in entries
        if not entry["is_p2p"]
    ]


def groups_by_name(engine: Engine) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return (axis, ranks) of each process group of the mesh, by the group's name."""
    mesh = engine.rank_model.mesh
    if mesh is None:
        return {}
    axes = {dist.group.WORLD: WORLD} | {
        mesh.get_group(axis): axis for axis, size in engine.rank_model.parallel.mesh.sizes.items() if size > 1
    }
    return {
        group.group_name: (axis, tuple(dist.get_process_group_ranks(group)))
        for group, axis in axes.items()
        if group is not None
    }


def layers_of(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) for the children of a model and for each layer of its lists of layers."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if any(isinstance(each, nn.ModuleList | nn.ModuleDict) for each in child.modules()):
            yield from layers_of(child, f"{path}.")
        elif not isinstance(child, Skip):
            yield path, child


def frames_of(thread: int) -> Iterator[FrameType]:
    """Yield the stack frames of a thread, innermost first."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def describe_line(frames: list[FrameType]) -> str:
    """Return file, line and function of the innermost frame that is not torch's own."""
    frame = next((frame for frame in frames if not frame.f_code.co_filename.startswith(TORCH)), None)
    if frame is None:
        return "no Python line"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def source_line(frame: FrameType) -> str:
    """Return the source text of a frame's current line."""
    return str(linecache.getline(frame.f_code.co_filename, frame.f_lineno))
