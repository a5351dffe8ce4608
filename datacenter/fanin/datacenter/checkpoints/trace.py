"""Trace of a job: the loss of each step and each evaluation, one JSON object per line in ``steps.jsonl``.

A checkpoint holds the state that decides the next steps. The trace holds the history, which is only reported. A job
that resumes at step n keeps the first n losses of the trace, so its final trace equals that of an uninterrupted job.
Damage to the trace never ends a job: only the first rank reads it, and the job resumes with unknown losses.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from fanin.datacenter.checkpoints.progress import describe_latest
from fanin.datacenter.config.records import record_of
from fanin.datacenter.files.jobfiles import HeldOutEvaluation, TrainingHistory
from fanin.protos.errors import InvalidInput, StorageFull

TRACE_FILE: Final = "steps.jsonl"
LOSS: Final = "loss"


class TraceWriter:
    """Writes the trace of one job into a folder. Only the first rank has one."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / TRACE_FILE
        self._num_losses = 0
        self._num_evaluations = 0

    def append(self, history: TrainingHistory) -> None:
        """Write and sync the part of the history that is not yet in the file. Raises StorageFull."""
        losses, evaluations = history.losses[self._num_losses :], history.evaluated[self._num_evaluations :]
        steps = [(step, {LOSS: loss}) for step, loss in enumerate(losses, self._num_losses + 1)]
        # Stable: an evaluation follows the loss of its step, in a resumed job as in an uninterrupted one.
        rows = sorted([*steps, *((each.step, asdict(each)) for each in evaluations)], key=lambda row: row[0])
        lines: list[Mapping[str, object]] = [line for _, line in rows]
        # The first call writes the complete trace under another name, because it replaces the file that the existing
        # checkpoints rely on.
        path = self._path if self._num_losses else self._path.with_name(f"{TRACE_FILE}.new")
        try:
            with path.open("a" if self._num_losses else "w", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(line, allow_nan=False)}\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())
            path.replace(self._path)
        except OSError as exc:
            raise StorageFull(
                f"{path}: the trace could not be written ({exc}); {describe_latest(path.parent)}", code="FN-1332"
            ) from exc
        self._num_losses, self._num_evaluations = len(history.losses), len(history.evaluated)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierHistory:
    """The history before the step that a job resumes from.

    Attributes:
        losses: One loss a step, also if the trace is lost; None if the step was skipped or it is unknown.
        evaluations: The evaluations; empty if the trace is lost.
        fault: Reason why the trace is lost; empty if it is complete.
    """

    losses: tuple[float | None, ...] = ()
    evaluations: tuple[HeldOutEvaluation, ...] = ()
    fault: str = ""


def read_trace(folder: Path, step: int) -> EarlierHistory:
    """Return the first ``step`` losses and the evaluations up to that step, from the trace in a folder.

    A damaged trace is lost completely: a line does not name its step, so a line that cannot be read would shift the
    steps of all later ones. The job can resume without it, because only the checkpoint decides the next steps.
    """
    path = folder / TRACE_FILE
    losses: list[float | None] = []
    evaluations: list[HeldOutEvaluation] = []
    try:
        # A job that was killed may leave an incomplete last line. Its step is repeated.
        *lines, _ = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            row = _row_of(line, f"{path}: line {number}")
            if isinstance(row, HeldOutEvaluation):
                evaluations.append(row)
            elif len(losses) == step:
                break
            else:
                losses.append(row)
    except OSError as exc:
        return _lost(f"{path}: cannot be read ({exc.strerror})", step)
    except InvalidInput as exc:
        return _lost(str(exc), step)
    if len(losses) < step:
        return _lost(f"{path}: got {len(losses)} losses, expected one for each of {step} steps", step)
    return EarlierHistory(losses=tuple(losses), evaluations=tuple(each for each in evaluations if each.step <= step))


def _lost(fault: str, step: int) -> EarlierHistory:
    return EarlierHistory(losses=(None,) * step, fault=fault)


def _row_of(line: bytes, where: str) -> float | HeldOutEvaluation | None:
    """Return the loss or the evaluation in a line. Raises InvalidInput."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise InvalidInput(f"{where}: got {line[:40]!r}, expected an object in JSON", code="FN-1346") from exc
    if not isinstance(row, dict) or LOSS not in row:
        return record_of(HeldOutEvaluation, row, where)
    loss = row[LOSS]
    if loss is not None and (type(loss) not in (int, float) or not math.isfinite(loss)):
        raise InvalidInput(f"{where}: got loss {loss!r}, expected a finite number or null", code="FN-1346")
    return None if loss is None else float(loss)
