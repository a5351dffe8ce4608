"""The trace of an interrupted job has the lines of an uninterrupted job."""

import json
import re
from pathlib import Path

import pytest

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
    earlier = read_trace(tmp_path / "resumed", 4)
    assert (earlier.losses, earlier.evaluations, earlier.fault) == (history(4).losses, history(4).evaluated, "")
    # The new process begins with the full history.
    TraceWriter(tmp_path / "resumed").append(history(6))
    assert kinds(tmp_path / "resumed") == kinds(tmp_path / "whole")
    assert kinds(tmp_path / "whole")[:4] == [1.0, 2.0, "evaluation 2", 3.0]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Return a folder with the trace of six steps. Line 3 is the first evaluation, line 4 the third loss."""
    TraceWriter(tmp_path).append(history(6))
    return tmp_path


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"\xff", r"line 4: got b'\\xff', expected an object in JSON"),
        (b'{"loss": 3.0', "line 4: got b'.*', expected an object in JSON"),
        (b"[" * 100_000, r"line 4: got b'\[+', expected an object in JSON"),
        (b"3", "line 4: got 3, expected a table"),
        (b"{}", "line 4: got no step, expected a value"),
        (b'{"loss": "3"}', "line 4: got loss '3', expected a finite number or null"),
        (b'{"loss": NaN}', "line 4: got loss nan, expected a finite number or null"),
    ],
    ids=["no text", "no JSON", "deep", "a number", "an empty object", "a word", "not finite"],
)
def test_a_damaged_trace_is_lost_and_the_steps_keep_their_numbers(written: Path, line: bytes, fault: str) -> None:
    lines = (written / TRACE_FILE).read_bytes().split(b"\n")
    (written / TRACE_FILE).write_bytes(b"\n".join([*lines[:3], line, *lines[4:]]))
    earlier = read_trace(written, 6)
    assert (earlier.losses, earlier.evaluations) == ((None,) * 6, ())
    assert earlier.fault.startswith(str(written / TRACE_FILE))
    assert re.search(fault, earlier.fault)


def test_a_trace_without_all_losses_is_lost(written: Path) -> None:
    assert read_trace(written, 7).fault.endswith("steps.jsonl: got 6 losses, expected one for each of 7 steps")
    (written / TRACE_FILE).unlink()
    assert read_trace(written, 6).fault.endswith("steps.jsonl: cannot be read (No such file or directory)")
    assert read_trace(written, 6).losses == (None,) * 6


def test_an_incomplete_last_line_is_ignored(written: Path) -> None:
    with (written / TRACE_FILE).open("ab") as file:
        file.write(b'{"loss": 7')
    earlier = read_trace(written, 6)
    assert (earlier.losses, earlier.evaluations, earlier.fault) == (history(6).losses, history(6).evaluated, "")
