"""Trace of a job: the loss of each step and each evaluation, one JSON object per line in ``steps.jsonl``.

A checkpoint holds the state that decides the next steps. The trace holds the history, which is only reported. A job
that resumes at step n keeps the first n losses of the trace, so its final trace equals that of an uninterrupted job.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from fanin.datacenter.config.records import record_of
from fanin.datacenter.files.jobfiles import HeldOutEvaluation, TrainingHistory
from fanin.protos.errors import StorageFull

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
            raise StorageFull(f"{path}: the trace could not be written ({exc}); the last checkpoint stays") from exc
        self._num_losses, self._num_evaluations = len(history.losses), len(history.evaluated)


def read_trace(folders: list[Path], step: int) -> tuple[list[float | None], list[HeldOutEvaluation]]:
    """Return the first ``step`` losses and the evaluations up to that step, from the first folder that has a trace."""
    path = next((folder / TRACE_FILE for folder in folders if (folder / TRACE_FILE).exists()), None)
    losses: list[float | None] = []
    evaluations: list[HeldOutEvaluation] = []
    for line in [] if path is None else path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            # A job that was killed may leave an incomplete last line. Its step is repeated.
            break
        if LOSS in row:
            losses.append(None if row[LOSS] is None else float(row[LOSS]))
        else:
            evaluations.append(record_of(HeldOutEvaluation, row, str(path)))
    return losses[:step], [each for each in evaluations if each.step <= step]
