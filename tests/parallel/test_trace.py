"""The trace of an interrupted job has the lines of an uninterrupted job."""

import json
from pathlib import Path

from fanin.datacenter.checkpoints.trace import LOSS, TRACE_FILE, TraceWriter, read_trace
from fanin.datacenter.files.jobfiles import HeldOutEvaluation, TrainingHistory


def history(num_steps: int) -> TrainingHistory:
    """Return the history of a job that evaluates after each second step."""
    evaluations = tuple(
        HeldOutEvaluation(step=step, epoch=0, train_loss=1.0, validation_loss=2.0, validation_accuracy=0.5)
        for step in range(2, num_steps + 1, 2)
    )
    losses = tuple(float(step) for step in range(1, num_steps + 1))
    return TrainingHistory(losses=losses, evaluated=evaluations, best=0, flat=False, skipped=0)


def kinds(folder: Path) -> list[object]:
    """Return the loss of each line, or the step of an evaluation as text."""
    rows = [json.loads(line) for line in (folder / TRACE_FILE).read_text().splitlines()]
    return [row[LOSS] if LOSS in row else f"evaluation {row['step']}" for row in rows]


def test_a_resumed_job_writes_the_lines_of_an_uninterrupted_one_in_their_order(tmp_path: Path) -> None:
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
    writer = TraceWriter(tmp_path / "whole")
    for num_steps in range(1, 7):
        writer.append(history(num_steps))
    TraceWriter(tmp_path / "resumed").append(history(4))
    losses, evaluations = read_trace([tmp_path / "resumed"], 4)
    assert (tuple(losses), tuple(evaluations)) == (history(4).losses, history(4).evaluated)
    # The new process begins with the full history.
    TraceWriter(tmp_path / "resumed").append(history(6))
    assert kinds(tmp_path / "resumed") == kinds(tmp_path / "whole")
    assert kinds(tmp_path / "whole")[:4] == [1.0, 2.0, "evaluation 2", 3.0]
