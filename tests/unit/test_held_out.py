"""Which Version is evaluated next, and the forms of a job and its reply."""

from collections.abc import Collection
from pathlib import Path

import pytest

from fanin.commands.serve import data_sets
from fanin.protos.errors import InvalidInput
from fanin.server.evaluation.evaluator import next_due
from fanin.server.evaluation.jobs import EvaluationJob, EvaluationReply
from fanin.server.evaluation.metrics import score_of
from fanin.server.settings import Settings
from fanin.server.storage.contracts.values import BUNDLE, version


@pytest.mark.parametrize(
    ("newest", "every", "evaluated", "expected"),
    [
        (0, 1, (), 0),
        (0, 1, (0,), None),
        (7, 1, (0, 1), 7),
        (7, 1, (7, 6, 0), 5),
        (7, 3, (), 6),
        (7, 3, (6,), 3),
        (7, 3, (6, 3), 0),
        (8, 3, (6, 3, 0), None),
        (9, 3, (6, 3, 0), 9),
    ],
)
def test_the_newest_due_version_without_an_evaluation_is_next(
    newest: int, every: int, evaluated: Collection[int], expected: int | None
) -> None:
    assert next_due(newest, every, evaluated) == expected


@pytest.mark.parametrize("number", [None, 1])
def test_a_job_and_its_reply_survive_a_line(number: int | None) -> None:
    of = None if number is None else version(version())
    job = EvaluationJob(blobs=Path("/a state"), data=Path("/x.npz"), bundle=BUNDLE, version=of)
    assert EvaluationJob.from_line(job.to_line()) == job
    reply = EvaluationReply(values={"loss": 0.1}, num_examples=3, data_sha256="ab", runtime="r 1", seconds=0.5)
    assert EvaluationReply.from_line(reply.to_line()) == reply
    assert job.to_line().count(b"\n") == reply.to_line().count(b"\n") == 1


def test_a_larger_score_is_better() -> None:
    assert score_of("loss", {"loss": 0.5}) > score_of("loss", {"loss": 0.7})
    assert score_of("accuracy_int8", {"accuracy_int8": 0.9}) > score_of("accuracy_int8", {"accuracy_int8": 0.7})


@pytest.mark.parametrize("text", ["digits", "digits=", "a=1"])
def test_a_data_set_needs_a_name_of_its_own_and_a_path(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        data_sets(["a=x.npz", text])
    assert "expected NAME=PATH" in str(caught.value)


def test_a_data_set_without_a_file_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        Settings(state=tmp_path, listen="127.0.0.1:0", data={"digits": tmp_path / "none.npz"})
    assert "none.npz: no such file" in str(caught.value)
