"""Evaluation on held-out data: the choice of the next Version, jobs and replies, and metrics."""

import csv
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from support.boards import scalars_in

from fanin.commands.console.show import evaluation_text
from fanin.commands.console.usage import data_sets
from fanin.commands.control.evaluations import write_csv, write_tensorboard
from fanin.edge.metrics.contract import check_metric
from fanin.edge.metrics.metric import METRICS, Metric, absolute_error, balanced_accuracy, macro_f1, metrics_of, value_of
from fanin.edge.runtimes.base import Inputs
from fanin.protos.errors import InvalidInput, InvalidPlan, RuntimeMissing
from fanin.protos.messages import VersionEvaluation
from fanin.server.evaluation.jobs import EvaluationJob, EvaluationReply
from fanin.server.evaluation.metrics import score_of
from fanin.server.settings import Settings
from fanin.server.storage.contracts.values import BUNDLE, version


@pytest.mark.parametrize("number", [None, 1])
def test_a_job_and_its_reply_survive_a_line(number: int | None) -> None:
    job_version = None if number is None else version(version())
    job = EvaluationJob(
        blobs=Path("/a state"),
        data=Path("/x.npz"),
        bundle=BUNDLE,
        best="loss",
        metrics=("macro_f1",),
        version=job_version,
    )
    assert EvaluationJob.from_line(job.to_line()) == job
    reply = EvaluationReply(values={"loss": 0.1}, num_examples=3, data_sha256="ab", runtime="r 1", seconds=0.5)
    assert EvaluationReply.from_line(reply.to_line()) == reply
    assert job.to_line().count(b"\n") == reply.to_line().count(b"\n") == 1


def test_a_larger_score_is_better() -> None:
    assert score_of("loss", {"loss": 0.5}) > score_of("loss", {"loss": 0.7})
    assert score_of("absolute_error_int8", {"absolute_error_int8": 0.5}, METRICS) == -0.5
    assert score_of("macro_f1_int8", {"macro_f1_int8": 0.5}, METRICS) == 0.5
    assert score_of("accuracy_int8", {"accuracy_int8": 0.9}) > score_of("accuracy_int8", {"accuracy_int8": 0.7})


def test_metrics_of_labels_and_values() -> None:
    targets, predictions = np.array([0, 0, 0, 1, 2], np.int32), np.array([0, 0, 1, 1, 3], np.int32)
    # Class 0: 4 / 5, class 1: 2 / 3, classes 2 and 3: 0.
    assert macro_f1(predictions, targets) == pytest.approx((4 / 5 + 2 / 3) / 4)
    assert balanced_accuracy(predictions, targets) == pytest.approx((2 / 3 + 1 + 0) / 3)
    values = np.array([[0.0], [2.0]], np.float32)
    assert absolute_error(values, np.array([[1.0], [-1.0]], np.float32)) == 2.0


@pytest.mark.parametrize("name", METRICS)
def test_our_metrics_keep_the_contract(name: str) -> None:
    check_metric(METRICS[name], num_classes=0 if name == "absolute_error" else 12)


@pytest.mark.parametrize(
    ("predictions", "targets", "message"),
    [
        (np.ones((4, 1), np.float32), np.ones(4, np.float32), "predictions (4, 1) and targets (4,), expected equal"),
        (np.ones((4, 2), np.float32), np.ones((4, 1), np.int32), "predictions (4, 2) and targets (4, 1), expected"),
        (np.ones(4, np.int32), np.ones(4, np.int32), "predictions of int32, expected values; choose"),
    ],
)
def test_the_absolute_error_of_other_forms_is_refused(predictions: Inputs, targets: Inputs, message: str) -> None:
    with pytest.raises(InvalidPlan, match=re.escape(f"metric 'a' raised ValueError: got {message}")):
        value_of("a", METRICS["absolute_error"], predictions, targets)


def distance(predictions: Inputs, targets: Inputs) -> float:
    return float(np.abs(predictions - targets).mean())


def from_first(predictions: Inputs, targets: Inputs) -> float:
    return float(predictions.ravel()[0])


def in_place(predictions: Inputs, targets: Inputs) -> float:
    predictions[0] += 1
    return 0.0


def always_nan(predictions: Inputs, targets: Inputs) -> float:
    return math.nan


def result_of(value: object) -> Metric:
    """Return a metric with this result."""
    return Metric(function=lambda predictions, targets: value)  # type: ignore[arg-type, return-value]  # mistakes


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.5), np.int64(2), np.array(0.5)])
def test_the_numbers_of_numpy_are_values(value: float) -> None:
    check_metric(result_of(value))


@pytest.mark.parametrize(
    ("metric", "kind", "problem"),
    [
        (Metric(function=distance), AssertionError, "correct higher_is_better"),
        (Metric(function=from_first), AssertionError, "the order of the examples changed the value"),
        (Metric(function=in_place), InvalidPlan, "raised ValueError: .*read-only"),
        (Metric(function=always_nan), InvalidPlan, "got nan, expected a finite number"),
        (result_of("0.5"), InvalidPlan, "got '0.5', expected a finite number"),
        (result_of(None), AssertionError, "got None for 40 examples, expected a number"),
        (result_of(True), InvalidPlan, "got True, expected a finite number"),
        (result_of(np.bool_(False)), InvalidPlan, r"got (np\.)?False_?, expected a finite number"),
        (always_nan, AssertionError, r"got function, expected a Metric\(function=\.\.\.\)"),
        (
            Metric(function=METRICS["macro_f1"].function),
            InvalidPlan,
            "raised ValueError: got targets of float32",
        ),
    ],
)
def test_a_metric_that_breaks_the_contract_is_refused(metric: Metric, kind: type[Exception], problem: str) -> None:
    with pytest.raises(kind, match=problem):
        check_metric(metric, num_classes=0)


@pytest.mark.parametrize("name", ["loss", "accuracy_int8", "own_int8", "none"])
def test_a_metric_that_is_not_installed_or_has_a_taken_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidPlan, match=f"evaluation.metrics: got '{name}', expected"):
        metrics_of([name])


@pytest.mark.parametrize("text", ["digits", "digits=", "a=1"])
def test_a_data_set_needs_a_name_of_its_own_and_a_path(text: str) -> None:
    with pytest.raises(InvalidInput) as excinfo:
        data_sets(["a=x.npz", text])
    assert "expected NAME=PATH" in str(excinfo.value)


def test_a_data_set_without_a_file_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as excinfo:
        Settings(state=tmp_path, listen="127.0.0.1:0", data={"digits": tmp_path / "none.npz"})
    assert "none.npz: no such file" in str(excinfo.value)


def test_metrics_of_sets_are_shown_with_their_names_and_an_earlier_version_has_none(tmp_path: Path) -> None:
    rows = [
        VersionEvaluation(version=1, data="digits", num_examples=30, values={"loss": 0.5}, time=7.0),
        VersionEvaluation(version=2, data="digits", num_examples=30, values={"loss": 0.4, "noisy.loss": 2}, time=8.0),
    ]
    assert [evaluation_text(row).partition(": ")[2] for row in rows] == [
        "loss 0.5000",
        "loss 0.4000, noisy.loss 2.0000",
    ]
    write_csv(tmp_path / "rows.csv", rows)
    with (tmp_path / "rows.csv").open() as file:
        assert [(row["loss"], row["noisy.loss"]) for row in csv.DictReader(file)] == [("0.5", ""), ("0.4", "2")]


@pytest.mark.heavy
def test_evaluations_are_written_for_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        VersionEvaluation(version=2, data="digits", values={"loss": 0.5, "accuracy": 0.75}, time=7.0),
        VersionEvaluation(version=4, data="digits", problem="no such file", time=8.0),
    ]
    write_tensorboard(tmp_path, rows)
    assert scalars_in(tmp_path) == [("held_out/loss", 2, 0.5, 7.0), ("held_out/accuracy", 2, 0.75, 7.0)]
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(RuntimeMissing, match="FN-1054"):
        write_tensorboard(tmp_path, rows)


def test_a_smaller_int8_error_is_better() -> None:
    assert score_of("squared_error_int8", {"squared_error_int8": 2.0}) == -2.0
