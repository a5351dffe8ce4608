"""A model of one length: devices, predictions, evaluations, simulations and files with rows that are shorter."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BundleFor
from support.commands import fanin_in_process
from support.errors import raises
from support.models import with_manifest, write_copy
from support.padded import LONGEST, NUM_TAGS, PADDING, padded_app, padded_examples
from support.requests import requests_of
from support.scripted import client_of, run
from support.tags import NUM_WORDS, SIZES, tags_app, tags_examples

from fanin.clients.data.examples import Examples
from fanin.clients.data.npz import write_npz
from fanin.clients.data.stores import MemoryStore
from fanin.clients.device.contract import example_assignment
from fanin.clients.device.graphs import BundleGraphs
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.training.trainer import RuntimeTrainer
from fanin.clients.operator import ref_of
from fanin.commands.evaluator import JobEvaluator
from fanin.datacenter.config.settings import DataSettings, ModelSettings, StopSettings
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.data.loading import load_data
from fanin.datacenter.families.family import TokenModel
from fanin.datacenter.parallel.settings import TrainingSettings
from fanin.datacenter.training.pretraining import Pretraining, fitting_data, pretrain
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export import Lengths
from fanin.edge.export.standalone.floats import float_models
from fanin.edge.export.standalone.quantized import int8_models
from fanin.edge.export.vectorized.step import VectorStep
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.buckets.dispatch import output_axis
from fanin.edge.runtimes.models import check_targets, run_rows
from fanin.edge.signatures import Port
from fanin.protos.chunks import cut
from fanin.protos.errors import InvalidInput
from fanin.server.evaluation.jobs import EvaluationJob
from fanin.server.storage.blobs import FolderBlobs
from fanin.server.storage.disk import Durability
from fanin.simulation import Iid, SimulationSettings, partition, simulate
from fanin.simulation.arguments import check_arguments
from fanin.simulation.engines.vectorized import VectorTrainings
from fanin.simulation.workers import LocalTrainings, Trainings

SHORT = padded_examples(10, 4, seed=2)
TOO_LONG = padded_examples(30, LONGEST + 2, seed=2)
TOO_LONG_ROW = (
    f"row 0: got the length 7, expected at most {LONGEST}, the longest of the model's lengths [{LONGEST}]; cut the "
    "row, or export the App with a longer one"
)


@pytest.fixture
def bundle(bundle_for: BundleFor) -> Bundle:
    """The Bundle of the App with one length."""
    return bundle_for("padded", "onnx")


def padded(examples: Examples) -> Examples:
    """Return the examples, padded by hand to the length of the model."""
    width = [(0, 0), (0, LONGEST - examples.y.shape[1])]
    values = {"ids": PADDING, "seen": 0}
    return Examples(
        inputs={name: np.pad(array, width, constant_values=values[name]) for name, array in examples.inputs.items()},
        y=np.pad(examples.y, width, constant_values=-1),
    )


def test_a_device_trains_and_predicts_with_shorter_rows(bundle: Bundle, tmp_path: Path) -> None:
    assert {*bundle.manifest.signatures} == {"train", "evaluate", "infer"}
    parameters = []
    for name, part in (("short", SHORT), ("padded", padded(SHORT))):
        store, coordinator = MemoryStore(train=part, validation=part, partition=0), requests_of(bundle)
        trainer = RuntimeTrainer(open_runtime("onnx"), store)
        client = client_of(coordinator, tmp_path / name, trainer, runtime=open_runtime("onnx"))
        client.run()
        assert (coordinator.failures, coordinator.headers[0].telemetry.num_steps) == ([], 6)
        assert coordinator.graphs == {"train.onnx", "evaluate.onnx", "infer.onnx"}
        parameters.append(coordinator.headers[0].payload.sha256)
        assert client.predict(dict(part.inputs)).shape == (10, LONGEST, NUM_TAGS)
    assert parameters[0] == parameters[1]


def test_a_longer_row_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    coordinator = requests_of(bundle)
    store = MemoryStore(train=TOO_LONG, validation=TOO_LONG, partition=0)
    run(coordinator, tmp_path, RuntimeTrainer(open_runtime("onnx"), store))
    assert coordinator.failures[0].startswith(f"training: training examples: {TOO_LONG_ROW}")


def test_targets_without_a_length_have_one_shape(bundle: Bundle) -> None:
    lengths = Lengths(sizes=(LONGEST,), axes={"ids": 1, "seen": 1})
    fixed = with_manifest(bundle, replace(bundle.manifest, lengths=lengths)).manifest
    with raises(ValueError, f"y: got int32 (10, 4), expected int32 (n, {LONGEST})"):
        check_targets(fixed, SHORT.y)
    check_targets(bundle.manifest, SHORT.y)


def test_an_output_with_as_many_values_as_positions_is_not_cut(bundle: Bundle) -> None:
    assert output_axis(bundle.manifest) == 1
    infer = bundle.manifest.signatures["infer"]
    pooled = replace(infer, outputs=(Port(name="logits", dtype="float32", shape=(-1, LONGEST)),))
    signatures = {**bundle.manifest.signatures, "infer": pooled}
    lengths = Lengths(sizes=(LONGEST,), axes={"ids": 1, "seen": 1})
    assert output_axis(replace(bundle.manifest, signatures=signatures, lengths=lengths)) == 0


def test_the_commands_accept_shorter_rows(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_copy(bundle, Path("bundle"))
    rows = []
    for name, part in (("short", SHORT), ("padded", padded(SHORT))):
        write_npz(Path(f"{name}.npz"), part)
        fanin = fanin_in_process(capsys, monkeypatch)
        rows.append(json.loads(fanin("infer", "bundle", "--data", f"{name}.npz", "--json").out))
    assert rows[0]["predictions"] == rows[1]["predictions"] and rows[0]["accuracy"] == rows[1]["accuracy"]
    assert f"  lengths     {LONGEST} on ids, seen, y; shorter rows are" in fanin("inspect", "bundle").out


def test_held_out_data_may_have_shorter_rows(bundle: Bundle, tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path / "blobs", Durability.PROCESS)
    files = (bundle.signed.data, *map(bundle.artifact, bundle.manifest.artifacts))
    for digest, chunk in ((ref.sha256, chunk) for file in files for ref, chunk in cut(file)):
        blobs.put(digest, chunk)
    replies = []
    for part in (SHORT, padded(SHORT), TOO_LONG):
        write_npz(tmp_path / "data.npz", part)
        job = EvaluationJob(
            blobs=tmp_path / "blobs", data=tmp_path / "data.npz", bundle=ref_of(bundle.signed), best="loss"
        )
        replies.append(JobEvaluator().reply(job))
    assert replies[0].values and replies[0].values == replies[1].values
    assert replies[2].problem.startswith(TOO_LONG_ROW)


@pytest.mark.parametrize("engine", ["graph", "vmap"])
def test_a_simulated_client_trains_with_shorter_rows(bundle: Bundle, engine: str) -> None:
    graphs, assignment = BundleGraphs(open_runtime("onnx")), example_assignment(bundle)
    model = OpenedModel(bundle=bundle, parameters=bundle.initial_parameters())

    def change(part: Examples, trainings: Callable[..., Trainings]) -> Any:
        return trainings(graphs, partition(part, 1, Iid()), 0.2).begin(0, model, assignment)()

    expected = change(padded(SHORT), LocalTrainings)
    actual = change(
        SHORT, LocalTrainings if engine == "graph" else lambda *rest: VectorTrainings(VectorStep(padded_app()), *rest)
    )
    assert actual.num_steps == expected.num_steps == 4
    np.testing.assert_allclose(actual.values, expected.values, rtol=0.0, atol=1e-6)
    assert np.abs(actual.values).max() > 1e-3


def test_a_simulation_checks_the_lengths_of_its_rows() -> None:
    app, settings = padded_app(), SimulationSettings(test=SHORT)
    check_arguments(app, partition(SHORT, 2, Iid()), settings)
    for lengths in (app.lengths, Lengths(sizes=(2, LONGEST), axes=app.lengths.axes, padding=app.lengths.padding)):
        check_arguments(replace(app, lengths=lengths), partition(SHORT, 2, Iid()), settings)
    with raises(InvalidInput, f"simulate: clients: {TOO_LONG_ROW}"):
        check_arguments(app, partition(TOO_LONG, 2, Iid()), settings)


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["graph", "vmap"])
def test_a_simulation_learns_from_shorter_rows(engine: Any) -> None:
    clients = partition(padded_examples(80, 4, seed=4), 4, Iid())
    settings = SimulationSettings(
        engine=engine, plan={"training.learning_rate": 0.1}, test=padded_examples(40, 5, seed=5), quiet=True
    )
    result = simulate(padded_app(), clients, cohort=4, rounds=3, settings=settings)
    assert result.rounds[-1].test_loss < result.rounds[0].test_loss


def test_a_fetched_model_is_one_file(bundle: Bundle) -> None:
    app, parameters = padded_app(), bundle.initial_parameters()
    int8, floats = int8_models(bundle, parameters, "onnx"), float_models(app, bundle, parameters, "onnx")
    assert [*int8] == [*floats] == ["infer"]
    runtime, inputs = open_runtime("onnx"), dict(padded(SHORT).inputs)
    expected = runtime.open_predict(bundle, parameters)(dict(SHORT.inputs))
    logits = run_rows(runtime.open_model(int8["infer"], "file"), inputs)["logits"]
    np.testing.assert_array_equal(logits[:, :4], expected)
    with torch.no_grad():
        ids, seen = (torch.from_numpy(SHORT.inputs[name]) for name in ("ids", "seen"))
        exact = app.module.eval()(ids, seen).numpy()
    logits = run_rows(runtime.open_model(floats["infer"], "file"), inputs)["logits"]
    np.testing.assert_allclose(logits[:, :4], exact, rtol=0.0, atol=1e-5)


def test_a_training_job_pads_shorter_rows(tmp_path: Path) -> None:
    app = tags_app()
    config = TrainConfig(
        model=ModelSettings(app="app.py:app"),
        data=DataSettings(examples=tmp_path / "data.npz"),
        training=TrainingSettings(batch_size=2, learning_rate=0.1),
        stop=StopSettings(steps=1),
    )
    whole = tags_examples(10, seed=2)
    write_npz(tmp_path / "data.npz", Examples(inputs={"x": whole.inputs["x"][:, :9]}, y=whole.y[:, :5]))
    x, y = load_data(config, app, TokenModel(vocabulary=NUM_WORDS)).train.take(np.arange(9))
    assert x.shape == y.shape == (9, SIZES[-1])
    assert (x[:, 9:] == 0).all() and (y[:, 5:] == -1).all()
    write_npz(tmp_path / "data.npz", Examples(inputs={"x": np.ones((10, 17), np.int32)}, y=whole.y))
    with pytest.raises(InvalidInput, match="FN-1185"):
        load_data(config, app, TokenModel(vocabulary=NUM_WORDS))


def test_a_pretraining_accepts_shorter_rows() -> None:
    app = padded_app()
    inputs, y = fitting_data(app, SHORT)
    np.testing.assert_array_equal(inputs["ids"].numpy(), padded(SHORT).inputs["ids"])
    np.testing.assert_array_equal(y.numpy(), padded(SHORT).y)
    pretrain(app, SHORT, Pretraining(epochs=1), lambda line: None)
    with raises(InvalidInput, f"pretraining: got data {TOO_LONG_ROW}"):
        fitting_data(app, TOO_LONG)
