"""Ranges of activations in every runtime: they are measured, and a Version's own ones fill the graph."""

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
from support.models import app_of, export_bundle, samples
from support.remote_runtime import runtime_of

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.formats import file_format
from fanin.edge.bundles.quantize import fill_slots
from fanin.edge.bundles.slots import SlotKind
from fanin.edge.ranges import columns, grids_of, initial_ranges, ranges_of_data
from fanin.edge.runtimes.models import run_rows
from fanin.edge.tensors import Float32s
from fanin.protos.errors import InvalidBundle, InvalidVersion

FORMATS = MappingProxyType({"onnx": "onnx", "reference": "onnx", "litert": "tflite", "tflite": "tflite"})
"""The graph format of each runtime."""
MODELS = ("mlp", "cnn")
ROUNDED_WEIGHTS = 0.03
"""Largest difference of measured ranges, as a share of their width: an ONNX graph measures with weights in int8."""
X, _ = samples(64, seed=1)
"""The calibration data of the models."""


@pytest.fixture(params=FORMATS)
def runtime(request: pytest.FixtureRequest) -> str:
    """Each runtime in turn."""
    return str(request.param)


@pytest.fixture(params=MODELS)
def bundle(request: pytest.FixtureRequest, both_formats: Callable[[str], Bundle]) -> Bundle:
    """Each model's Bundle in turn."""
    return both_formats(request.param)


def later(bundle: Bundle) -> tuple[Float32s, Float32s]:
    """Return the parameters and the ranges of a later Version."""
    rng = np.random.default_rng(7)
    parameters = bundle.initial_parameters()
    parameters = parameters + rng.normal(0.0, 0.05, parameters.shape).astype(np.float32)
    ranges = initial_ranges(bundle.manifest.activations)
    return parameters, ranges * rng.uniform(0.5, 3.0, ranges.shape).astype(np.float32)


@pytest.mark.heavy
def test_new_ranges_give_the_bits_of_a_graph_that_was_exported_with_them(runtime: str, bundle: Bundle) -> None:
    from fanin.edge.export.formats.graphs import FORMATS as EXPORTS
    from fanin.edge.export.formats.int8.activations import activation_name
    from fanin.edge.export.module.prepare import prepare

    graph_format, (parameters, ranges) = FORMATS[runtime], later(bundle)
    logits = runtime_of(runtime).open_predict(bundle, parameters, ranges)({"x": X})
    assert not np.array_equal(logits, runtime_of(runtime).open_predict(bundle, parameters)({"x": X}))

    prepared = prepare(app_of(bundle.manifest.name))
    names = [row.name for row in bundle.manifest.activations]
    bounds = dict(zip(names, ranges.reshape(-1, 2).tolist(), strict=True))
    first = EXPORTS[graph_format].make(prepared, None).ranges
    later_ranges = {name: tuple(bounds.get(activation_name(graph_format, name), span)) for name, span in first.items()}
    graphs = EXPORTS[graph_format].make(prepared, later_ranges)
    values = fill_slots(graphs.slots, prepared.table, parameters, graphs.derived, grids_of(graphs.activations))
    file = file_format(graph_format)
    data = file.fill_slots(graphs.files[graphs.signatures["infer"]], graphs.slots, values, "infer graph")
    model = runtime_of(runtime).open_model(data, "infer graph", "infer" if file.has_signatures else "")
    assert logits.tobytes() == run_rows(model, {"x": X})["logits"].tobytes()


@pytest.mark.heavy
def test_an_onnx_graph_depends_on_ranges_in_its_slots_alone(bundle: Bundle) -> None:
    from fanin.edge.export.formats.graphs import onnx_graphs
    from fanin.edge.export.module.prepare import prepare

    prepared = prepare(app_of(bundle.manifest.name))
    graphs = onnx_graphs(prepared)
    wider = {name: (2.0 * low, 4.0 * high) for name, (low, high) in graphs.ranges.items()}
    others = onnx_graphs(prepared, wider)
    assert graphs.slots == others.slots and graphs.files["infer.onnx"] == others.files["infer.onnx"]


def test_measured_ranges_of_the_calibration_data_are_those_of_the_export(runtime: str, bundle: Bundle) -> None:
    activations = bundle.manifest.activations
    where, before = columns(activations, FORMATS[runtime]), initial_ranges(activations).reshape(-1, 2)
    lows, highs = runtime_of(runtime).open_ranges(bundle, bundle.initial_parameters())({"x": X})
    assert lows.shape == highs.shape == (len(X), len(where)) and lows.dtype == highs.dtype == np.float32
    assert (lows <= highs).all()
    ranges, expected = ranges_of_data(lows, highs, np.zeros_like(before[where])), before[where]
    tolerance = ROUNDED_WEIGHTS if FORMATS[runtime] == "onnx" else 1e-5
    assert (np.abs(ranges - expected).max(axis=1) <= tolerance * np.ptp(expected, axis=1)).all()


def test_ranges_are_those_of_the_parameters(runtime: str, bundle: Bundle) -> None:
    open_ranges = runtime_of(runtime).open_ranges
    first, second = (
        open_ranges(bundle, values)({"x": X[:3]}) for values in (bundle.initial_parameters(), later(bundle)[0])
    )
    inputs = sum(np.array_equal(left, right) for left, right in zip(first[1].T, second[1].T, strict=True))
    # The input of the model does not depend on them, and TFLite may have several forms of it.
    assert 1 <= inputs < first[1].shape[1]
    alone = open_ranges(bundle, bundle.initial_parameters())({"x": X[2:3]})
    np.testing.assert_array_equal([side[0] for side in alone], [side[2] for side in first])


def test_an_almost_dead_layer_runs(runtime: str, bundle: Bundle) -> None:
    """The delegate of TFLite refuses an output that is much narrower than its factors, or ends the process."""
    parameters, ranges = later(bundle)
    for at in range(len(bundle.manifest.activations)):
        narrow = ranges.copy()
        narrow[2 * at : 2 * at + 2] = (-1e-12, 1e-12)
        assert np.isfinite(runtime_of(runtime).open_predict(bundle, parameters, narrow)({"x": X[:2]})).all()


def test_ranges_of_another_bundle_are_refused(runtime: str, bundle: Bundle) -> None:
    parameters, ranges = later(bundle)
    for wrong in (ranges[:-2], -ranges, np.full_like(ranges, np.nan)):
        with pytest.raises(InvalidVersion, match="ranges: got"):
            runtime_of(runtime).open_predict(bundle, parameters, wrong)


def test_a_bundle_without_activations_measures_nothing(bundle: Bundle) -> None:
    slots = {
        name: tuple(slot for slot in row if not slot.activation and slot.kind is not SlotKind.BIAS)
        for name, row in bundle.manifest.slots.items()
    }
    manifest = replace(bundle.manifest, activations=(), slots=slots)
    for name in ("onnx", "litert"):
        with pytest.raises(InvalidBundle, match="FN-0319"):
            runtime_of(name).open_ranges(Bundle(bundle.signed, manifest, bundle._read), bundle.initial_parameters())


@pytest.mark.heavy
def test_frozen_weights_of_the_graph_of_ranges_are_those_of_the_int8_graph() -> None:
    import torch
    from ai_edge_litert import schema_py_generated as schema

    from fanin.edge.export import App, Recipe

    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Conv2d(8, 32, 3)]
    module = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(512, 4))
    app = App(
        name="frozen",
        module=module.eval(),
        calibration=torch.from_numpy(X),
        batch_size=8,
        num_classes=4,
        recipe=Recipe(trains="head"),
    )
    bundle = export_bundle(app, ["tflite"])
    model = schema.ModelT.InitFromPackedBuf(bundle.graph("infer", "tflite"))
    graphs = {row.signatureKey.decode(): model.subgraphs[row.subgraphIndex] for row in model.signatureDefs}
    ranges, infer = (
        {tensor.buffer for tensor in graphs[name].tensors if tensor.type == schema.TensorType.INT8 and tensor.buffer}
        for name in ("ranges", "infer")
    )
    assert ranges and ranges <= infer
    floats = [
        tensor for tensor in graphs["ranges"].tensors if tensor.type == schema.TensorType.FLOAT32 and tensor.buffer
    ]
    assert all(np.prod(tensor.shape) < 256 for tensor in floats)
    lows, highs = runtime_of("litert").open_ranges(bundle, bundle.initial_parameters())({"x": X})
    before = initial_ranges(bundle.manifest.activations).reshape(-1, 2)
    expected = ranges_of_data(lows, highs, before)
    assert (np.abs(expected - before).max(axis=1) <= ROUNDED_WEIGHTS * np.ptp(before, axis=1)).all()
