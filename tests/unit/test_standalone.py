"""Standalone models of a Version: predictions of onnxruntime and LiteRT from the file alone."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import BundleFor, BundleOf
from support.errors import raises
from support.models import PUBLISHER, app_of, export_bundle
from support.nightly import in_ci
from support.plain_files import LIBRARIES, in_onnxruntime
from torch import nn

from fanin.clients.versions import FetchedVersion
from fanin.commands.control.standalone import standalone_models
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.versions import sign_version
from fanin.edge.export import Adapters, App, Lengths, Recipe
from fanin.edge.export.module.prepare import with_parameters
from fanin.edge.export.standalone.floats import float_models
from fanin.edge.export.standalone.quantized import int8_models
from fanin.edge.ranges import initial_ranges, ranges_table
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.models import run_rows
from fanin.edge.tensors import Float32s, encode_parameters
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import InvalidInput


def later_parameters(bundle: Bundle) -> Float32s:
    """Return the parameters of a later Version."""
    first = bundle.initial_parameters()
    return first + np.random.default_rng(4).normal(0.0, 0.05, first.shape).astype(np.float32)


def logits_of(app: App, bundle: Bundle) -> Float32s:
    """Return torch's logits of the later Version on the calibration data."""
    with torch.no_grad():
        return with_parameters(app, bundle.manifest.table.views(later_parameters(bundle)))(app.inputs["x"]).numpy()


@pytest.mark.parametrize("graph_format", LIBRARIES)
def test_an_int8_file_matches_the_predictions_of_the_bundle(both_formats: BundleOf, graph_format: str) -> None:
    bundle, x = both_formats("cnn"), app_of("cnn").inputs["x"].numpy()
    runtime, run = LIBRARIES[graph_format]
    data = int8_models(bundle, later_parameters(bundle), graph_format)["infer"]
    expected = open_runtime(runtime).open_predict(bundle, later_parameters(bundle))({"x": x})
    np.testing.assert_array_equal(run(data, x), expected)
    assert len(data) < len(bundle.graph("infer", graph_format)) + 4 * bundle.manifest.table.num_values


@pytest.mark.parametrize("graph_format", LIBRARIES)
def test_a_float_file_matches_the_predictions_of_torch(both_formats: BundleOf, graph_format: str) -> None:
    bundle, app = both_formats("cnn"), app_of("cnn")
    data = float_models(app, bundle, later_parameters(bundle), graph_format)["infer"]
    run = LIBRARIES[graph_format][1]
    np.testing.assert_allclose(run(data, app.inputs["x"].numpy()), logits_of(app, bundle), rtol=0, atol=1e-5)


def fetched_of(bundle: Bundle, parameters: Float32s, ranges: Float32s | None = None) -> FetchedVersion:
    """Return a Version as it is fetched."""
    data = encode_parameters(bundle.manifest.table, parameters)
    version = sign_version(
        PUBLISHER, parent=None, run_id="run", bundle_sha256=bundle.sha256, parameters=artifact_of(data)
    )
    table = ranges_table(bundle.manifest.activations)
    own = b"" if ranges is None else encode_parameters(table, ranges)
    return FetchedVersion(version=version, data=data, bundle=bundle, layout=None, ranges_data=own)


@pytest.mark.parametrize("runtime", ["onnx", "litert"])
def test_an_int8_file_has_the_ranges_of_its_version(both_formats: BundleOf, runtime: str) -> None:
    bundle, graph_format = both_formats("mlp"), "onnx" if runtime == "onnx" else "tflite"
    version, ranges = later_parameters(bundle), initial_ranges(bundle.manifest.activations) * np.float32(3.0)
    (data,) = standalone_models(fetched_of(bundle, version, ranges), {graph_format: Path("m")}, "").values()
    x = app_of("mlp").inputs["x"].numpy()
    logits = run_rows(open_runtime(runtime).open_model(data, "the file"), {"x": x})["logits"]
    np.testing.assert_array_equal(logits, open_runtime(runtime).open_predict(bundle, version, ranges)({"x": x}))


@pytest.mark.parametrize("runtime", in_ci(("onnx", "litert"), ("onnx",)))
def test_each_length_is_a_file(runtime: str, bundle_for: BundleFor) -> None:
    graph_format = "onnx" if runtime == "onnx" else "tflite"
    run, bundle, app = LIBRARIES[graph_format][1], bundle_for("tags", runtime), app_of("tags")
    version, suffix = later_parameters(bundle), f".{graph_format}"
    target = {graph_format: Path(f"tags{suffix}")}
    int8 = standalone_models(fetched_of(bundle, version), target, "")
    names = [f"tags{suffix}", f"tags@8{suffix}", f"tags@4{suffix}"]
    assert [str(path) for path in int8] == names
    floats = float_models(app, bundle, version, graph_format)
    assert [*floats] == ["infer", "infer@8", "infer@4"]
    predict = open_runtime(runtime).open_predict(bundle, version)
    module = with_parameters(app, bundle.manifest.table.views(version))
    for size, in_int8, in_float in zip((16, 8, 4), int8.values(), floats.values(), strict=True):
        x = app.inputs["x"].numpy()[:, :size]
        x[:, -1] = 1  # the last position is used, so the runtime uses the graph of this length
        # By default, onnxruntime's int8 kernels saturate on some processors. The kernels of fanin's runtime do not.
        model = open_runtime(runtime).open_model(in_int8, "the file")
        np.testing.assert_array_equal(run_rows(model, {"x": x})["logits"], predict({"x": x}))
        with torch.no_grad():
            expected = module(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(run(in_float, x), expected, rtol=0, atol=1e-5)


def test_an_app_with_other_lengths_is_refused(bundle_for: BundleFor) -> None:
    bundle, app = bundle_for("tags", "onnx"), app_of("tags")
    other = replace(app, lengths=Lengths(sizes=(4, 16), axes={"x": 1, "y": 1}))
    message = (
        "App tags (Tagger): got the lengths [4, 16], axes {'x': 1, 'y': 1} and padding {'x': 0.0, 'y': -1.0}, "
        "expected the lengths [4, 8, 16], axes {'x': 1, 'y': 1} and padding {'x': 0.0, 'y': -1.0} as in the Bundle; "
        "pass the App that was exported"
    )
    with raises(InvalidInput, message):
        float_models(other, bundle, bundle.initial_parameters(), "onnx")
    message = "App tags (Tagger): got no lengths, expected"
    with pytest.raises(InvalidInput, match=re.escape(message)):
        float_models(replace(app, lengths=None), bundle, bundle.initial_parameters(), "onnx")


class Normed(nn.Sequential):
    """A norm whose statistics are shared parameters, and a head."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))


def normed_app(**fields: object) -> App:
    """Return an App of ``Normed``, always with the same weights."""
    torch.manual_seed(5)
    return replace(app_of("mlp"), module=Normed(), **fields)  # type: ignore[arg-type]  # any field of an App


def test_statistics_of_norms_are_the_versions() -> None:
    app = normed_app()
    bundle = export_bundle(app)
    version = np.abs(later_parameters(bundle))
    data = float_models(app, bundle, version, "onnx")["infer"]
    with torch.no_grad():
        expected = with_parameters(app, bundle.manifest.table.views(version))(app.inputs["x"]).numpy()
    np.testing.assert_allclose(in_onnxruntime(data, app.inputs["x"].numpy()), expected, rtol=0, atol=1e-5)
    # The norm is folded, so its parameters must not stay in the file: onnxruntime warns of unused ones.
    graph = onnx.load_from_string(data).graph
    assert {value.name for value in graph.initializer} <= {name for node in graph.node for name in node.input}


@cache
def adapted_bundle() -> Bundle:
    """Return a Bundle of ``Normed`` with adapters."""
    return export_bundle(normed_app(recipe=Recipe(trains=Adapters(rank=2))))


def other_weights() -> App:
    """Return an App of the same form with other frozen weights."""
    return replace(normed_app(recipe=Recipe(trains=Adapters(rank=2))), module=Normed())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_weights, "has a loss of .* expected that of the Bundle, .* pass the App that was exported, with a seed"),
        (lambda: normed_app(recipe=Recipe(trains="head")), "got parameters of another model, expected"),
        (
            lambda: normed_app(recipe=Recipe(trains=Adapters(rank=2)), batch_size=4),
            "got batch_size 4 and num_classes 4, exp",
        ),
    ],
)
def test_an_app_of_another_bundle_is_refused(change: Callable[[], App], message: str) -> None:
    bundle = adapted_bundle()
    with pytest.raises(InvalidInput, match=message):
        float_models(change(), bundle, bundle.initial_parameters(), "onnx")


def test_frozen_weights_come_from_the_app() -> None:
    app, bundle = normed_app(recipe=Recipe(trains=Adapters(rank=2))), adapted_bundle()
    data = float_models(app, bundle, later_parameters(bundle), "onnx")["infer"]
    np.testing.assert_allclose(in_onnxruntime(data, app.inputs["x"].numpy()), logits_of(app, bundle), rtol=0, atol=1e-5)


def test_a_format_that_the_bundle_lacks_is_refused() -> None:
    with pytest.raises(InvalidInput, match="FN-0796"):
        int8_models(adapted_bundle(), adapted_bundle().initial_parameters(), "tflite")
