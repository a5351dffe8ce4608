"""Custom metrics: functions and ONNX graphs, on the test data and on the validation part of each client."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from support.errors import raises
from support.linear import evaluate_graph, linear_graphs
from support.metric_graphs import write_graph
from support.models import app_of, bundle_of, samples
from support.virtual import PUBLISHER
from torch import nn

from fanin.clients import Examples
from fanin.clients.data.batching import batches_in_order
from fanin.clients.data.stores import memory_store
from fanin.clients.device.contract import Countdown, example_assignment, example_model
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.training.trainer import RuntimeTrainer
from fanin.clients.device.updates import Change
from fanin.edge.assembly.assemble import assemble
from fanin.edge.codecs.statistics import declared, fitted
from fanin.edge.export import App
from fanin.edge.metrics.contract import check_metric
from fanin.edge.metrics.graphs import graph_metric
from fanin.edge.metrics.metric import METRICS, Metric, MetricRows, metrics_of
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import Inputs, VersionValues
from fanin.edge.runtimes.measure import Observation
from fanin.protos import messages as m
from fanin.protos.errors import InvalidBundle, InvalidInput, InvalidPlan
from fanin.protos.plans import Statistic
from fanin.server.evaluation.metrics import evaluate_version
from fanin.simulation import Iid, Result, SimulationSettings, load_data, partition, simulate
from fanin.simulation.studies.records import RecordedTrainings, RecordFolder
from fanin.simulation.workers import PendingTraining

ROUNDS: Final = 2


def misses(predictions: Inputs, targets: Inputs) -> float:
    """Return the share of wrong labels."""
    return float((predictions != targets).mean())


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The result of a simulation with a function, a graph and an installed metric, in two processes."""
    return simulated(tmp_path_factory.mktemp("metrics"), processes=2)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The same simulation in this process."""
    return simulated(tmp_path_factory.mktemp("alone"))


def simulated(folder: Path, **changes: object) -> Result:
    torch.manual_seed(3)
    data = load_data("digits")
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    images = torch.from_numpy(data.train.inputs["x"][:64])
    app = App(name="digits", module=net, calibration=images, batch_size=8, num_classes=10)
    names = ("misses", "misses_int8", "right", "macro_f1", "nll", "first_nll", "top3_accuracy")
    plan = {
        "training.learning_rate": 0.1,
        "statistics": [{"name": f"evaluate.{name}", "bound": 4096 << 16} for name in names],
        "evaluation.metrics": [{"name": "nll"}, {"name": "auc"}],
    }
    # Worker processes cannot import this function, as in a notebook.
    wrong = Metric(function=lambda predictions, targets: (predictions != targets).mean(), higher_is_better=False)
    metrics = {
        "misses": wrong,
        "right": write_graph(folder / "right.onnx"),
        "first_nll": Metric(function=METRICS["nll"].function, higher_is_better=False, wants="logits"),
        "largest": write_graph(folder / "largest.onnx", "Max", form="logits"),
    }
    settings = SimulationSettings(test=data.test, metrics=metrics, plan=plan, quiet=True)
    settings = replace(settings, **changes)  # type: ignore[arg-type]
    return simulate(app, partition(data.train, 5, Iid()), cohort=3, rounds=ROUNDS, settings=settings)


def test_a_function_and_a_graph_are_metrics_of_each_version(result: Result) -> None:
    assert result.failures == ()
    for row in result.rounds:
        assert row.metrics["misses"] == pytest.approx(1 - row.test_accuracy)
        assert row.metrics["right"] == pytest.approx(row.test_accuracy)
        # The loss of the App is the cross entropy.
        assert row.metrics["nll"] == pytest.approx(row.test_loss, rel=1e-5)
        assert row.metrics["first_nll"] == row.metrics["nll"] != row.metrics["nll_int8"]
        assert 0 < row.metrics["auc"] < 1 and row.metrics["largest"] > 0
        assert row.metrics["misses_int8"] == pytest.approx(1 - row.test_accuracy_int8)
    assert {"metrics.misses", "metrics.right_int8", "means.evaluate.right"} <= set(result.columns())


def test_a_metric_cannot_change_what_the_next_one_reads() -> None:
    def in_place(predictions: Inputs, targets: Inputs) -> float:
        predictions[:] = 0
        return 0.0

    rows = MetricRows({"in_place": Metric(function=in_place), "misses": Metric(function=misses)})
    labels = np.arange(6, dtype=np.int32)
    rows.add(Observation(targets=labels, in_float=labels.copy(), in_int8=labels.copy()))
    with pytest.raises(InvalidPlan, match=r"metric 'in_place' raised ValueError: .*read-only"):
        rows.values(6)


def test_the_clients_of_each_round_are_columns(result: Result) -> None:
    columns = result.client_columns()
    assert list(zip(columns["round"], columns["client"], strict=True)) == [
        (row.round, row.client) for row in result.clients
    ]
    assert "means.evaluate.right" in columns
    assert replace(result, clients=()).client_columns()["client"] == []


def test_each_client_has_its_metrics_and_the_round_their_weighted_means(result: Result) -> None:
    sizes = {client: round(size * 0.1) for client, size in enumerate(partition_sizes())}
    for number in range(1, ROUNDS + 1):
        rows, of_round = [row for row in result.clients if row.round == number], result.rounds[number]
        weights = [sizes[row.client] for row in rows]
        for row in rows:
            assert row.means["evaluate.right"] == pytest.approx(row.validation_accuracy, abs=1e-4)
            assert row.means["evaluate.misses"] == pytest.approx(1 - row.validation_accuracy, abs=1e-4)
            assert row.means["evaluate.nll"] == pytest.approx(row.validation_loss, abs=1e-4)
            assert row.means["evaluate.top3_accuracy"] >= row.validation_accuracy
            assert 0 < row.means["evaluate.macro_f1"] <= 1 or row.validation_accuracy == 0
        for name in ("evaluate.macro_f1", "evaluate.misses", "evaluate.misses_int8"):
            assert of_round.statistics[name] == sum(row.statistics[name] for row in rows)
            mean = np.average([row.means[name] for row in rows], weights=weights)
            assert of_round.means[name] == pytest.approx(mean, abs=1e-4)
        accuracy = np.average([row.validation_accuracy for row in rows], weights=weights)
        assert of_round.validation_accuracy == pytest.approx(accuracy)
        assert of_round.means["evaluate.misses_int8"] == pytest.approx(1 - of_round.validation_accuracy_int8, abs=1e-4)
        loss = np.average([row.validation_loss for row in rows], weights=weights)
        assert of_round.validation_loss == pytest.approx(loss)


def partition_sizes() -> list[int]:
    return list(partition(load_data("digits").train, 5, Iid()).sizes)


def test_one_process_has_the_bits_and_the_events_of_two(result: Result, alone: Result) -> None:
    assert alone.digests == result.digests and len(set(result.digests)) == ROUNDS + 1
    assert alone.events == result.events
    assert alone.clients == result.clients
    # The first row has no training loss: NaN is not equal to itself.
    assert alone.rounds[1:] == result.rounds[1:]


def test_metrics_change_no_version(alone: Result, tmp_path: Path) -> None:
    plain = simulated(tmp_path, metrics={}, plan={"training.learning_rate": 0.1})
    assert plain.digests == alone.digests


@pytest.mark.nightly
def test_metrics_are_the_same_with_vmap(alone: Result, tmp_path: Path) -> None:
    vectorized = simulated(tmp_path, engine="vmap")
    assert [row.means for row in vectorized.clients if row.round == 1] == [
        row.means for row in alone.clients if row.round == 1
    ]


def counts_of(names: tuple[str, ...], metrics: Mapping[str, Metric]) -> dict[str, int]:
    """Return the counts of a device whose Plan declares these statistics."""
    x, y = samples(40, seed=4)
    bundle = bundle_of("cnn")
    declared = tuple(Statistic(name=name, bound=m.MAX_COUNT) for name in names)
    assignment = example_assignment(bundle)
    assignment = replace(assignment, statistics=(*assignment.statistics, *declared))
    store = memory_store(Examples(inputs={"x": x}, y=y), 0, 0.25)
    trainer = RuntimeTrainer(open_runtime("onnx"), store, metrics)
    return dict(trainer.train(example_model(bundle), assignment, Countdown()).counts)


def test_a_device_reports_only_the_metrics_of_the_plan() -> None:
    metrics = {"misses": Metric(function=misses)}
    counts = counts_of(("evaluate.misses", "evaluate.macro_f1_int8"), metrics)
    wrong = counts[m.EVAL_EXAMPLES] - counts[m.EVAL_CORRECT_FLOAT]
    assert counts["evaluate.misses"] == wrong << 16
    assert 0 <= counts["evaluate.macro_f1_int8"] <= counts[m.EVAL_EXAMPLES] << 16
    extra = {name for name in counts if name.startswith("evaluate.")}
    assert extra == {"evaluate.misses", "evaluate.macro_f1_int8"}
    assert not any(name.startswith("evaluate.") for name in counts_of((), metrics))


MEASURED = ("evaluate.right", "global.right", "personal.right")


def test_metrics_of_more_examples_than_count_are_scaled_with_them() -> None:
    own = [Statistic(name=name, bound=m.MAX_COUNT) for name in (*MEASURED, "train.right", "words")]
    statistics = declared(own, max_examples=100, num_labels=1, num_values=3)
    counts = {m.EXAMPLES: 400, m.EVAL_EXAMPLES: 200, "train.right": 300 << 16, "words": 9}
    counts |= dict.fromkeys(MEASURED, 150 << 16)
    assert fitted(counts, statistics) == {
        m.EXAMPLES: 100,
        m.TRAINED: 400,
        m.EVAL_EXAMPLES: 100,
        **dict.fromkeys(MEASURED, 75 << 16),
        "train.right": 75 << 16,
        "words": 9,
    }


def test_a_record_has_a_training_for_each_set_of_declared_metrics(tmp_path: Path) -> None:
    trainings: list[str] = []

    class Named:
        def begin(
            self, client: int, model: OpenedModel, assignment: m.Assignment, due_s: float = 0.0
        ) -> PendingTraining:
            trainings.append(assignment.statistics[-1].name)
            return lambda: Change(values=model.parameters, counts={m.EXAMPLES: 1}, num_steps=1)

    folder = RecordFolder(tmp_path / "record", "").folder
    bundle = bundle_of("cnn")
    for name in ("evaluate.right", "evaluate.wrong", "evaluate.right", "train.right", "words"):
        assignment = example_assignment(bundle)
        own = (*assignment.statistics, Statistic(name=name, bound=1))
        RecordedTrainings(Named(), folder).begin(0, example_model(bundle), replace(assignment, statistics=own))()
    # A trainer of the device may count each of them.
    assert trainings == ["evaluate.right", "evaluate.wrong", "train.right", "words"]


def test_a_flower_app_has_metrics_of_its_own() -> None:
    settings = SimulationSettings(metrics={"own": misses}, plan={"training.learning_rate": 0.1}, quiet=True)
    with pytest.raises(InvalidInput, match="FN-1183"):
        simulate(lambda context: None, 2, cohort=2, rounds=1, settings=settings)


def broken(predictions: Inputs, targets: Inputs) -> float:
    raise ZeroDivisionError("no such class")


def test_a_metric_that_fails_or_is_unknown_is_left_out_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fanin.edge.metrics"):
        for _ in range(2):
            counts = counts_of(("evaluate.broken", "evaluate.unknown"), {"broken": Metric(function=broken)})
            assert m.EXAMPLES in counts and not any(name.startswith("evaluate.") for name in counts)
    texts = sorted(record.getMessage() for record in caplog.records)
    assert len(texts) == 2
    assert "metric 'broken' raised ZeroDivisionError: no such class; correct its function, or remove" in texts[0]
    assert "got 'unknown', expected one of ['absolute_error', 'auc', 'balanced_accuracy', 'ece', " in texts[1]


def test_a_metric_without_a_value_on_the_examples_of_a_device_is_left_out_of_the_mean() -> None:
    def undefined(logits: Inputs, targets: Inputs) -> None:
        assert logits.shape == (len(targets), 10)

    own = {"undefined": Metric(function=undefined, wants="logits")}
    counts = counts_of(("evaluate.undefined", "evaluate.nll"), own)
    assert {name for name in counts if name.startswith("evaluate.")} == {"evaluate.nll"}
    assert counts["evaluate.nll"] == pytest.approx(counts[m.EVAL_LOSS], rel=1e-3)


def test_a_graph_without_logits_is_refused_for_a_metric_of_logits(tmp_path: Path) -> None:
    graphs = linear_graphs()
    row = {**graphs.graphs["onnx"], "evaluate": evaluate_graph()}
    bundle = assemble(replace(graphs, graphs={"onnx": row}), tmp_path / "bundle", PUBLISHER)
    x = np.ones((3, 6), np.float32)
    batches = batches_in_order(Examples(inputs={"x": x}, y=np.zeros(3, np.int32)), bundle.manifest.batch_size)
    version = VersionValues(parameters=bundle.initial_parameters())
    with pytest.raises(InvalidPlan, match="FN-1891"):
        evaluate_version(open_runtime("onnx"), bundle, version, batches, metrics_of(["nll"]))
    with pytest.raises(InvalidInput, match="FN-1890"):
        Metric(function=misses, wants="probabilities")


def test_a_graph_keeps_the_contract_of_a_metric(tmp_path: Path) -> None:
    metric = graph_metric(write_graph(tmp_path / "right.onnx"))
    check_metric(metric)
    (tmp_path / "right.onnx").unlink()
    labels = np.array([0, 1, 2, 2], np.int32)
    assert metric.function(labels, np.array([0, 1, 1, 1], np.int32)) == 0.5
    assert graph_metric(write_graph(tmp_path / "one.onnx", shape=(1,))).function(labels, labels) == 1.0
    assert METRICS["macro_f1"].function(labels, labels) == 1.0


def test_a_graph_that_is_no_metric_raises_one_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="FN-0352"):
        graph_metric(tmp_path / "none.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"no graph")
    with pytest.raises(InvalidBundle, match=r"metric bad\.onnx"):
        graph_metric(tmp_path / "bad.onnx")
    identity = helper.make_node("Identity", ["x"], ["y"])
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    graph = helper.make_graph([identity], "other", ports[:1], ports[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, tmp_path / "other.onnx")
    with raises(
        InvalidInput,
        "metric other.onnx: got a graph from x to float32 (2,), expected one from predictions or logits, targets to "
        "one float number; correct the graph",
    ):
        graph_metric(tmp_path / "other.onnx")


@pytest.mark.parametrize(
    ("metrics", "error"),
    [
        (
            {"loss": misses},
            r"simulate: metrics: 'loss': expected a name that is not in \['accuracy', 'accuracy_int8', ",
        ),
        ({"own_int8": misses}, "simulate: metrics: 'own_int8': expected a name that is not in "),
        ({"own": 3}, "simulate: metrics: 'own': got int, expected a function "),
        ([misses], r"simulate: metrics: got \[<function .*>\], expected metrics by name, such as "),
        ({1: misses}, r"simulate: metrics: got {1: <function .*>}, expected metrics by name, such as "),
    ],
)
def test_a_wrong_metric_is_one_error_before_the_export(metrics: object, error: str) -> None:
    x, y = samples(8, seed=1)
    clients = partition(Examples(inputs={"x": x}, y=y), 2, Iid())
    settings = SimulationSettings(metrics=metrics, plan={"training.learning_rate": 0.1}, quiet=True)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=error):
        simulate(app_of("cnn"), clients, cohort=2, rounds=1, settings=settings)
