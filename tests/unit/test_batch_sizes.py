"""Batch sizes of a Plan: the train graphs in the manifest, the graph that a client trains, and refused values."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.errors import raises
from support.models import BATCH_SIZE, OTHER_SIZES, app_of, bundle_of, samples, with_manifest
from support.requests import requests_of
from support.scripted import run

from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import MemoryStore
from fanin.clients.device.contract import example_assignment
from fanin.clients.device.graphs import BundleGraphs
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.training.trainer import RuntimeTrainer
from fanin.clients.device.updates import Change
from fanin.edge.bundles.manifest import Manifest
from fanin.edge.bundles.manifest_json import dump_manifest, parse_manifest
from fanin.edge.export import App
from fanin.edge.export.vectorized.step import VectorStep
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.signatures import Port
from fanin.protos import messages as m
from fanin.protos.errors import InvalidBundle, InvalidInput, UnsupportedModel
from fanin.simulation.data.partitioning import Partition
from fanin.simulation.engines.vectorized import VectorTrainings
from fanin.simulation.workers import LocalTrainings, SharedGraphs, Trainings


@pytest.mark.parametrize("sizes", [(BATCH_SIZE,), (4, 4), (0,), (1, 2, 3, 4), (-3,)])
def test_an_app_refuses_batch_sizes_that_no_bundle_has(sizes: tuple[int, ...]) -> None:
    message = (
        f"App noisy: other_batch_sizes: got {list(sizes)} with batch_size {BATCH_SIZE}, expected at most 3 different "
        "integers of at least 1, without batch_size"
    )
    with raises(UnsupportedModel, message):
        replace(app_of("noisy"), other_batch_sizes=sizes)


@pytest.mark.parametrize(("value", "message"), [(4, "got 4, expected a tuple"), ((2.5,), "got 2.5, expected an int")])
def test_an_app_refuses_other_types_of_batch_sizes(value: object, message: str) -> None:
    changes: dict[str, object] = {"other_batch_sizes": value}
    with pytest.raises(UnsupportedModel, match=f"App noisy: other_batch_sizes: {message}"):
        App(name="noisy", module=app_of("noisy").module, calibration=app_of("noisy").inputs, batch_size=8, **changes)  # type: ignore[arg-type]


def test_the_manifest_names_a_train_graph_for_each_batch_size() -> None:
    manifest = bundle_of("sizes").manifest
    assert manifest == parse_manifest(dump_manifest(manifest))
    assert manifest.batch_sizes == (3, BATCH_SIZE, 20)
    assert set(manifest.signatures) == {"train", "train@b3", "train@b20", "evaluate", "infer"}
    view = manifest.at_batch(20)
    assert (view.batch_size, view.batch_sizes) == (20, (20,))
    assert view.signatures["train"] == manifest.signatures["train@b20"]
    assert view.signatures["evaluate"] == manifest.signatures["evaluate"]
    assert manifest.at_batch(0) is manifest.at_batch(BATCH_SIZE) is manifest
    assert manifest.files("onnx") == {"train.onnx", "train.onnx@b3", "train.onnx@b20", "evaluate.onnx", "infer.onnx"}


def test_a_bundle_with_one_batch_size_has_no_new_key() -> None:
    manifest = bundle_of("noisy").manifest
    assert b"other_batch_sizes" not in dump_manifest(manifest)
    empty = dump_manifest(manifest).replace(b'"batch_size"', b'"other_batch_sizes": [],\n "batch_size"')
    with raises(InvalidBundle, "manifest.other_batch_sizes: got none, expected at least one; leave the key out"):
        parse_manifest(empty)


def _remove_signature(manifest: Manifest) -> Manifest:
    return replace(
        manifest, signatures={key: signature for key, signature in manifest.signatures.items() if key != "train@b3"}
    )


def _swap_signatures(manifest: Manifest) -> Manifest:
    signatures = manifest.signatures
    return replace(manifest, signatures={**signatures, "train@b3": signatures["train@b20"]})


def _rename_port(manifest: Manifest) -> Manifest:
    train = manifest.signatures["train@b3"]
    outputs = (*train.outputs[:-1], Port(name="cost", dtype="float32", shape=()))
    return replace(manifest, signatures={**manifest.signatures, "train@b3": replace(train, outputs=outputs)})


CHANGES: list[tuple[Callable[[Manifest], Manifest], str]] = [
    (
        _remove_signature,
        "manifest: got the signatures ['train@b20'] of lengths and batch sizes, expected ['train@b20', ",
    ),
    (_swap_signatures, "manifest: signature 'train@b3': got 'x' of shape (20, 1, 8, 8), expected (3, 1, 8, 8)"),
    (_rename_port, "manifest: signature 'train@b3': got the ports [('next."),
    (
        lambda manifest: replace(manifest, batch_size=3),
        "manifest: other_batch_sizes: got [3, 20] with batch_size 3, expected at most 3 different",
    ),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_manifest_whose_batch_sizes_contradict_each_other_is_refused(
    change: Callable[[Manifest], Manifest], message: str
) -> None:
    bundle = bundle_of("sizes")
    with pytest.raises(InvalidBundle) as excinfo:
        with_manifest(bundle, change(bundle.manifest))
    assert str(excinfo.value).startswith(message)


def model() -> OpenedModel:
    bundle = bundle_of("sizes")
    return OpenedModel(bundle=bundle, parameters=bundle.initial_parameters())


def examples_of(seed: int) -> Examples:
    x, y = samples(9, seed=seed)
    return Examples(inputs={"x": x}, y=y)


def train_with(trainer: RuntimeTrainer, size: int) -> Change:
    training = m.Training(epochs=2, learning_rate=0.05, seed=1, batch_size=size)
    assignment = replace(example_assignment(bundle_of("sizes")), training=training)
    return trainer.train(model(), assignment, lambda: None)


def test_a_device_trains_with_the_batch_size_of_the_plan_and_evaluates_with_the_bundles() -> None:
    parts = {
        name: Examples(inputs={"x": x}, y=y) for name, (x, y) in zip("tv", (samples(31, seed=5),) * 2, strict=True)
    }
    trainer = RuntimeTrainer(open_runtime("onnx"), MemoryStore(train=parts["t"], validation=parts["v"], partition=2))
    changes = {size: train_with(trainer, size) for size in (0, BATCH_SIZE, *OTHER_SIZES, 0)}
    assert {size: change.num_steps for size, change in changes.items()} == {0: 8, BATCH_SIZE: 8, 3: 22, 20: 4}
    assert np.array_equal(changes[0].values, changes[BATCH_SIZE].values)
    assert len({change.values.tobytes() for change in changes.values()}) == 3
    of_training = {m.TRAIN_LOSS: 0, "steps": 0, "planned_steps": 0}
    version_counts = [{**change.counts, **of_training} for change in changes.values()]
    assert all(counts == version_counts[0] for counts in version_counts)
    message = (
        "batch_size: got 5, but the bundle's train graphs are for 3, 8, 20; choose one of these, or export the App "
        "with App(other_batch_sizes=(5,))"
    )
    with raises(InvalidInput, message):
        train_with(trainer, 5)


def test_a_device_downloads_the_train_graph_of_the_plans_batch_size_alone(tmp_path: Path) -> None:
    store = MemoryStore(train=examples_of(5), validation=examples_of(6), partition=0)
    others = {"evaluate.onnx", "infer.onnx"}
    for size, name in ((20, "train.onnx@b20"), (0, "train.onnx"), (BATCH_SIZE, "train.onnx")):
        coordinator = requests_of(bundle_of("sizes"), size)
        run(coordinator, tmp_path / str(size), RuntimeTrainer(open_runtime("onnx"), store))
        assert coordinator.graphs == {name} | others
        assert coordinator.failures == [] and len(coordinator.headers) == 1
    # The same folder: a later Run with another batch size downloads only the missing graph.
    coordinator = requests_of(bundle_of("sizes"), 3)
    run(coordinator, tmp_path / "20", RuntimeTrainer(open_runtime("onnx"), store))
    assert coordinator.graphs == {"train.onnx@b3"}


def test_a_device_reports_a_batch_size_that_the_bundle_lacks_before_it_downloads(tmp_path: Path) -> None:
    coordinator = requests_of(bundle_of("sizes"), 5)
    run(coordinator, tmp_path)
    assert coordinator.graphs == set()
    assert coordinator.failures[0].startswith("batch_size: got 5, but the bundle's train graphs are for 3, 8, 20")


def test_clients_train_together_with_the_batch_size_of_the_plan() -> None:
    graphs, sizes = BundleGraphs(open_runtime("onnx")), (30, 9, 14)
    x, y = samples(sum(sizes), seed=4)
    indices = tuple(np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]))
    clients = Partition(examples=Examples(inputs={"x": x}, y=y), indices=indices)
    training = m.Training(epochs=1, learning_rate=0.1, seed=1, batch_size=3)
    work = replace(example_assignment(bundle_of("sizes")), training=training)

    def changes_of(trainings: Trainings) -> list[Change]:
        pending = [trainings.begin(each, model(), replace(work, assignment_id=f"{each:032x}")) for each in range(3)]
        return [each() for each in pending]

    sequential = changes_of(LocalTrainings(graphs, clients, 0.2))
    step = VectorStep(app_of("sizes").for_batches(3))
    vectorized = changes_of(VectorTrainings(step, graphs, clients, 0.2))
    assert [change.num_steps for change in sequential] == [8, 3, 4]
    for one, other in zip(sequential, vectorized, strict=True):
        assert one.num_steps == other.num_steps
        assert np.abs(one.values - other.values).max() < 1e-5 * np.abs(one.values).max() + 1e-6


def test_all_clients_of_a_round_share_the_open_graphs() -> None:
    graphs, bundle = SharedGraphs(open_runtime("onnx")), bundle_of("sizes")
    parameters = bundle.initial_parameters()
    predict = graphs.open_predict(bundle, parameters)
    assert graphs.open_predict(bundle, parameters.copy()) is predict
    assert graphs.open_predict(bundle, parameters + 1.0) is not predict


def test_the_graph_of_one_batch_size_is_open_at_a_time() -> None:
    graphs, bundle = BundleGraphs(open_runtime("onnx")), bundle_of("sizes")
    first = graphs.open_train(bundle.at_batch(3))
    assert graphs.open_train(bundle.at_batch(3)) is first
    assert graphs.open_train(bundle) is not first
    assert graphs.open_evaluate(bundle) is graphs.open_evaluate(bundle.at_batch(3))
