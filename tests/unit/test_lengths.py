"""Lengths: the length of each row, batches of one length only, and refused lengths."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.errors import raises
from support.models import PUBLISHER, bundle_of, with_manifest
from support.requests import requests_of
from support.scripted import client_of, run
from support.tags import BATCH_SIZE, NUM_WORDS, SIZES, tags_app, tags_examples

from fanin.clients.data.batching import batches, batches_in_order, num_batches
from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import MemoryStore
from fanin.clients.device.footprint import SparingTrainer
from fanin.clients.device.graphs import BundleGraphs
from fanin.clients.device.training.local_data import LocalData
from fanin.clients.device.training.trainer import RuntimeTrainer
from fanin.clients.device.updates import UnfitExamples, row_sizes
from fanin.edge.bundles.derived import Derived
from fanin.edge.bundles.manifest import Manifest
from fanin.edge.bundles.manifest_json import dump_manifest, parse_manifest
from fanin.edge.export import App, Lengths, export
from fanin.edge.export.formats.graphs import FORMATS, Graphs, graphs_of, onnx_infer
from fanin.edge.export.formats.int8.activations import Ranges, check_names
from fanin.edge.export.formats.int8.folding import fold_norms
from fanin.edge.export.graph.forward import trace_infer
from fanin.edge.export.module.lengths import at_length
from fanin.edge.export.module.prepare import Prepared, prepare
from fanin.edge.export.vectorized.step import VectorStep
from fanin.edge.metrics.metric import METRICS, Metric, MetricRows
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import VersionValues
from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.edge.runtimes.measure import Observation, measure
from fanin.edge.signatures import Port
from fanin.protos import messages as m
from fanin.protos.errors import InvalidBundle, InvalidInput, UnsupportedModel
from fanin.simulation import Habits, SyntheticTrainer
from fanin.simulation.devices.conduct import Collusion, Conduct
from fanin.simulation.federation.observed import ObservedTrainer

LENGTHS = Lengths(sizes=SIZES, axes={"x": 1, "y": 1})


@given(lengths=st.lists(st.integers(0, 16), min_size=1, max_size=40), width=st.integers(16, 20), seed=st.integers(0, 9))
def test_an_epoch_has_each_row_once_in_the_smallest_length_that_holds_it(
    lengths: list[int], width: int, seed: int
) -> None:
    is_word = np.arange(width) < np.array(lengths)[:, None]
    marks = 1 + np.arange(len(lengths))[:, None]
    examples = Examples(
        inputs={"x": np.where(is_word, marks, 0).astype(np.int32)}, y=np.where(is_word, 1, -1).astype(np.int32)
    )
    seen = 0
    for batch in batches(examples, BATCH_SIZE, np.random.default_rng(seed), LENGTHS):
        size = batch.y.shape[1]
        assert batch.inputs["x"].shape == batch.y.shape == (BATCH_SIZE, size)
        for x, y in zip(batch.inputs["x"][batch.mask > 0], batch.y[batch.mask > 0], strict=True):
            length = lengths[x[0] - 1] if x[0] else 0
            assert size == min(each for each in SIZES if each >= length)
            assert (x == np.where(np.arange(size) < length, x[0], 0)).all() and (y >= 0).sum() == length
        seen += int(batch.mask.sum())
    assert seen == len(lengths)
    assert num_batches(examples, BATCH_SIZE, LENGTHS) == len(list(batches_in_order(examples, BATCH_SIZE, LENGTHS)))


def test_batches_follow_from_the_seed_and_alternate_lengths() -> None:
    examples = tags_examples(60, seed=2)
    first, repeat, other = (
        [batch.inputs["x"] for batch in batches(examples, BATCH_SIZE, np.random.default_rng(seed), LENGTHS)]
        for seed in (1, 1, 2)
    )
    assert all((a == b).all() for a, b in zip(first, repeat, strict=True))
    assert [x.shape for x in first] != [x.shape for x in other] != sorted(x.shape for x in other)


def test_a_target_after_the_last_word_counts() -> None:
    x, y = np.zeros((2, 16), np.int32), np.full((2, 16), -1, np.int32)
    x[:, 0], y[1, 6] = 1, 2
    all_batches = list(batches_in_order(Examples(inputs={"x": x}, y=y), 1, LENGTHS))
    assert [batch.y.shape for batch in all_batches] == [(1, 4), (1, 8)] and all_batches[1].y[0, 6] == 2


def test_a_row_that_no_length_holds_is_named() -> None:
    x = np.zeros((3, 20), np.int32)
    x[2, 17] = 1
    examples = Examples(inputs={"x": x}, y=np.full((3, 20), -1, np.int32))
    message = (
        "row 2: got the length 18, expected at most 16, the longest of the model's lengths [4, 8, 16]; cut the row, "
        "or export the App with a longer one"
    )
    with raises(ValueError, message):
        list(batches(examples, BATCH_SIZE, np.random.default_rng(0), LENGTHS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": ()}, "lengths: sizes: got (), expected 1 to 4 different integers"),
        ({"sizes": (8, 4)}, "lengths: sizes: got (8, 4), expected 1 to 4 different integers"),
        ({"sizes": (1, 2, 3, 4, 5)}, "lengths: sizes: got (1, 2, 3, 4, 5), expected 1 to 4"),
        ({"axes": {"y": 1}}, "lengths: axes: got {'y': 1}, expected the axis of the length"),
        ({"axes": {"x": 0}}, "lengths: axes: got {'x': 0}, expected the axis of the length"),
        ({"padding": {"z": 0}}, "lengths: padding: got {'z': 0}, expected finite numbers by the names of axes: ['x']"),
        ({"padding": {"x": float("nan")}}, "lengths: padding: got {'x': nan}, expected finite numbers"),
    ],
)
def test_invalid_lengths_are_refused(change: Mapping[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as excinfo:
        Lengths(**({"sizes": (4, 8), "axes": {"x": 1}} | dict(change)))
    assert str(excinfo.value).startswith(message)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((4, 8), "App tags: lengths: got (4, 8), expected Lengths(sizes=(16, 32), axes={'x': 1})"),
        (Lengths(sizes=(4, 16), axes={"ids": 1}), "App tags: lengths: got axes of ['ids'], expected names of"),
        (Lengths(sizes=(4, 8), axes={"x": 1}), "App tags: lengths: got x of shape (32, 16), expected the longest"),
        (Lengths(sizes=(4, 16), axes={"x": 2}), "App tags: lengths: got x of shape (32, 16), expected the longest"),
        (Lengths(sizes=(4, 16), axes={"x": 1}, padding={"x": -1}), "App tags: lengths: got the padding -1 of x"),
    ],
)
def test_an_app_refuses_lengths_that_do_not_fit_its_data(lengths: Lengths, message: str) -> None:
    with pytest.raises(UnsupportedModel) as excinfo:
        replace(tags_app(), lengths=lengths)
    assert str(excinfo.value).startswith(message)


@pytest.mark.parametrize("sizes", [(4, 16), (16,)])
def test_an_export_of_tags_needs_the_axis_of_the_targets(sizes: tuple[int, ...], tmp_path: Path) -> None:
    app = replace(tags_app(), lengths=Lengths(sizes=sizes, axes={"x": 1}))
    with pytest.raises(UnsupportedModel, match="FN-0741"):
        export(app, tmp_path, PUBLISHER, ["onnx"])


def test_graphs_of_lengths_with_other_constants_are_refused() -> None:
    prepared, ports = prepare(tags_app()), {"train": ((Port(name="y", dtype="int32", shape=(4, 16)),), ())}

    def make(single: Prepared, ranges: Ranges | None) -> Graphs:
        derived = Derived(constants={"mean": np.float32(single.app.input_shapes["x"]).tobytes()})
        return Graphs(files={}, signatures={}, ports=ports, slots=(), derived=derived, ranges={}, activations=())

    with pytest.raises(UnsupportedModel, match="FN-0742"):
        graphs_of(prepared, replace(FORMATS["onnx"], make=make))


class Pooled(torch.nn.Module):
    """A class for each row: its output is the quantized product itself, which has no length."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(NUM_WORDS, 8), torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (B, 3)."""
        return self.head(self.table(x).mean(1))


def test_a_quantized_output_has_the_range_of_the_longest_length() -> None:
    torch.manual_seed(0)
    lengths, x = Lengths(sizes=(2, 4), axes={"x": 1}), torch.randint(NUM_WORDS, (32, 4), dtype=torch.int32)
    app = App(name="rows", module=Pooled(), calibration=x, batch_size=4, num_classes=3, lengths=lengths)

    def ranges_at(size: int, ranges: Ranges | None) -> Ranges:
        single = at_length(prepare(app), size)
        return onnx_infer(single, fold_norms(trace_infer(single), single, FORMATS["onnx"].forms), ranges).ranges

    ranges = ranges_at(4, None)
    assert ranges_at(2, ranges) == ranges


def test_graphs_of_lengths_with_other_activations_are_refused() -> None:
    check_names(["x", "y"], {"y": (0.0, 3.0), "x": (-0.5, 0.0)})
    for others in (["x", "y", "z"], ["x"]):
        with pytest.raises(UnsupportedModel, match="FN-0742"):
            check_names(others, ["x", "y"])


def test_one_length_of_an_app_has_the_same_parameters() -> None:
    prepared = prepare(tags_app())
    short = at_length(prepared, 8)
    assert short.module is prepared.module and short.app.input_shapes == {"x": (8,)}


def test_clients_of_several_lengths_do_not_train_together() -> None:
    with pytest.raises(UnsupportedModel, match="FN-0798"):
        VectorStep(tags_app())


def test_a_bundle_measures_data_of_all_lengths() -> None:
    bundle = bundle_of("tags")
    all_batches = batches_in_order(tags_examples(30, seed=3), BATCH_SIZE, bundle.manifest.lengths)
    rows = MetricRows({"nll": METRICS["nll"], "misses": Metric(function=lambda predictions, targets: 0.0)})
    seen: list[Observation] = []

    class Seen:
        needs_logits = True

        def add(self, observation: Observation) -> None:
            seen.append(observation)
            rows.add(observation)

    quality = measure(
        open_runtime("onnx"),
        bundle,
        VersionValues(parameters=bundle.initial_parameters()),
        all_batches,
        Seen(),
    )
    assert {array.shape[1:] for each in seen for array in (each.targets, each.in_float, each.in_int8)} == {(SIZES[-1],)}
    # Logits of labelled positions alone. The loss of a sample is the sum or the mean over its positions.
    num = sum(int((each.targets != NO_TOKEN).sum()) for each in seen)
    assert num == quality.num_predictions == sum(len(each.labels) for each in seen if each.labels is not None)
    for each in seen:
        assert each.logits is not None
        assert np.array_equal(each.logits.argmax(-1), each.in_float[each.targets != NO_TOKEN])
    assert 0 < rows.values(bundle.manifest.num_classes)["nll"] < 10
    assert quality.num_examples == 30 and quality.num_agreeing > 0.8 * quality.num_predictions


def short_examples(num: int, longest: int) -> Examples:
    """Return ``num`` rows of at most ``longest`` words."""
    part = tags_examples(num, seed=4)
    is_word = np.arange(SIZES[-1]) < longest
    return Examples(inputs={"x": np.where(is_word, part.inputs["x"], 0)}, y=np.where(is_word, part.y, -1))


def test_a_device_downloads_the_graphs_for_the_lengths_of_its_rows_alone(tmp_path: Path) -> None:
    store = MemoryStore(train=short_examples(6, 4), validation=short_examples(3, 8), partition=0)
    coordinator = requests_of(bundle_of("tags"))
    run(coordinator, tmp_path, RuntimeTrainer(open_runtime("onnx"), store))
    assert coordinator.graphs == {f"{kind}.onnx@{size}" for kind in ("train", "evaluate", "infer") for size in (4, 8)}
    assert coordinator.failures == [] and coordinator.headers[0].telemetry.num_steps == 4
    # A longer row arrives later: only its graphs are missing.
    longer = MemoryStore(train=tags_examples(20, seed=5), validation=store.validation, partition=0)
    later = requests_of(bundle_of("tags"))
    run(later, tmp_path, SparingTrainer(RuntimeTrainer(open_runtime("onnx"), longer), lambda: None))
    assert later.graphs == {"train.onnx", "evaluate.onnx", "infer.onnx"}


def test_a_device_that_serves_can_predict_rows_of_all_lengths(tmp_path: Path) -> None:
    store = MemoryStore(train=short_examples(6, 4), validation=short_examples(3, 4), partition=0)
    coordinator = requests_of(bundle_of("tags"))
    client = client_of(coordinator, tmp_path, RuntimeTrainer(open_runtime("onnx"), store), runtime=open_runtime("onnx"))
    client.run()
    infers = {"infer.onnx", "infer.onnx@4", "infer.onnx@8"}
    assert coordinator.graphs == {"train.onnx@4", "evaluate.onnx@4"} | infers
    assert client.predict({"x": np.ones((2, 16), np.int32)}).shape == (2, 16, 3)


def test_a_device_that_only_serves_downloads_no_train_graph(tmp_path: Path) -> None:
    coordinator = requests_of(bundle_of("tags"))
    publication = replace(coordinator.work.publication, download_id="run.v0.device")
    coordinator.answer = m.Wait(retry_min_s=0.0, retry_max_s=0.0, newest=publication)
    store = MemoryStore(train=short_examples(6, 4), validation=short_examples(3, 4), partition=0)
    client = client_of(coordinator, tmp_path, RuntimeTrainer(open_runtime("onnx"), store), runtime=open_runtime("onnx"))
    coordinator.stop = lambda: client.stop() if client.served_version else None
    client.run()
    assert client.served_version == ("run", 0)
    assert coordinator.graphs == {"infer.onnx", "infer.onnx@4", "infer.onnx@8"}


def test_a_device_reports_a_row_that_no_length_holds_before_it_downloads_graphs(tmp_path: Path) -> None:
    x = np.ones((3, 20), np.int32)
    part = Examples(inputs={"x": x}, y=x)
    coordinator = requests_of(bundle_of("tags"))
    store = MemoryStore(train=part, validation=part, partition=0)
    run(coordinator, tmp_path, RuntimeTrainer(open_runtime("onnx"), store))
    assert coordinator.graphs == set()
    assert coordinator.failures[0].startswith("training: training examples: row 0: got the length 20, expected at")
    # The device gives up later Assignments of the Bundle until its rows change.
    with pytest.raises(UnfitExamples) as excinfo:
        RuntimeTrainer(open_runtime("onnx"), store).row_sizes(bundle_of("tags"))
    assert not excinfo.value.has_changed()


def test_a_training_that_did_not_take_place_leaves_no_examples_for_another_bundle() -> None:
    class Rows:
        """A live store."""

        partition, num_reads = 0, 0

        @property
        def train(self) -> Examples:
            self.num_reads += 1
            return short_examples(6, 4)

        validation = None

    store, bundle = Rows(), bundle_of("tags")
    data = LocalData(BundleGraphs(open_runtime("onnx")), store)
    other = with_manifest(bundle, replace(bundle.manifest, name="other"))
    for chosen, num_reads in ((bundle, 1), (other, 2)):
        data.row_sizes(bundle)
        store.num_reads = 1
        data.examples(chosen)
        assert store.num_reads == num_reads


HONEST = Conduct("device", Habits(), Collusion())


def test_a_simulated_device_knows_the_lengths_of_its_trainer() -> None:
    store = MemoryStore(train=short_examples(6, 4), validation=short_examples(3, 4), partition=0)
    trainers = RuntimeTrainer(open_runtime("onnx"), store), SyntheticTrainer(partition=0)
    sizes = [
        row_sizes(ObservedTrainer(each, "device", lambda event: None, lambda: False, HONEST), bundle_of("tags"))
        for each in trainers
    ]
    assert [sorted(each) for each in sizes] == [[4], [4, 8, 16]]


def test_the_manifest_names_the_graphs_of_each_length() -> None:
    manifest = bundle_of("tags").manifest
    assert manifest == parse_manifest(dump_manifest(manifest))
    assert set(manifest.signatures) == {
        f"{kind}{suffix}" for kind in ("train", "evaluate", "infer") for suffix in ("", "@4", "@8")
    }
    assert manifest.at(8).signatures["train"] == manifest.signatures["train@8"]


def _without(manifest: Manifest, name: str) -> Manifest:
    return replace(manifest, signatures={key: each for key, each in manifest.signatures.items() if key != name})


def _swapped(manifest: Manifest) -> Manifest:
    signatures = manifest.signatures
    return replace(manifest, signatures={**signatures, "train@4": signatures["train@8"]})


CHANGES: list[tuple[Callable[[Manifest], Manifest], str]] = [
    (lambda manifest: _without(manifest, "infer@4"), "manifest: got the signatures ['evaluate@4', 'evaluate@8'"),
    (lambda manifest: replace(manifest, lengths=None), "manifest: slots in 'onnx@4', expected only in formats"),
    (_swapped, "manifest: signature 'train@4': got 'x' of shape (4, 8), expected (4, 4)"),
    (
        lambda manifest: replace(manifest, slots={"onnx": manifest.slots["onnx"]}),
        "manifest: got no slots in 'onnx', expected at least one",
    ),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_manifest_whose_lengths_contradict_each_other_is_refused(
    change: Callable[[Manifest], Manifest], message: str
) -> None:
    bundle = bundle_of("tags")
    with pytest.raises(InvalidBundle) as excinfo:
        with_manifest(bundle, change(bundle.manifest))
    assert str(excinfo.value).startswith(message)


def test_a_batch_of_another_length_is_refused() -> None:
    bundle = bundle_of("tags")
    step = open_runtime("onnx").open_train(bundle)
    assert step.begin(bundle.initial_parameters()).optimizer.shape == (bundle.manifest.table.num_values,)
    (batch, *_) = batches_in_order(tags_examples(8, seed=3), BATCH_SIZE, bundle.manifest.lengths)
    evaluate = open_runtime("onnx").open_evaluate(bundle)
    odd = replace(batch, inputs={"x": batch.inputs["x"][:, :3]})
    with pytest.raises(ValueError, match=r"batch: got the lengths \{'x': 3, 'y': \d+\}, expected one of \[4, 8, 16\]"):
        evaluate(bundle.initial_parameters(), odd)
