"""``preprocess``: the graph equals its module, and a device applies it to raw examples only."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from support.models import app_of, export_bundle, with_artifact, with_manifest
from support.nightly import in_ci
from support.raw import BATCH_SIZE, NUM_CLASSES, PREPROCESS, Characters, Pixels, raw_app, raw_of
from support.values import assignment
from torch import Tensor, nn

from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import MemoryStore
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.training.trainer import RuntimeTrainer
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export import App, inputs_of
from fanin.edge.export.build import check_app
from fanin.edge.export.formats.preprocess import encode_preprocess, trace_preprocess, verify_preprocess
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import LoadedModel, ModelPort, Runtime
from fanin.edge.runtimes.models import model_inputs, open_preprocess, run_rows
from fanin.edge.signatures import Port
from fanin.edge.tensors import Array
from fanin.protos.errors import InvalidBundle, UnsupportedModel

RAW = {"pixels": ("uint8", (8, 8, 1)), "spectrogram": ("float32", (512,)), "characters": ("uint8", (12,))}
X = {"pixels": ("float32", (1, 8, 8)), "spectrogram": ("float32", (10, 15)), "characters": ("int32", (12,))}
ROUNDING = 1e-5


@cache
def bundle(name: str) -> Bundle:
    """Export the App to a Bundle in ONNX."""
    return export_bundle(raw_app(name), ["onnx"])


def examples(name: str, *, raw: bool) -> Examples:
    """Return eight examples, raw or in the form that the model accepts."""
    app = raw_app(name)
    x = (raw_of(name) if raw else app.inputs["x"])[:8].numpy()
    return Examples(inputs={"x": x}, y=(np.arange(8) % NUM_CLASSES).astype(np.int32))


@pytest.mark.parametrize("name", PREPROCESS)
@pytest.mark.parametrize(("runtime", "graph_format"), [("onnx", "onnx"), ("reference", "onnx"), ("litert", "tflite")])
def test_the_graph_is_the_module(name: str, runtime: str, graph_format: str) -> None:
    app, raw = raw_app(name), raw_of(name).numpy()
    model = open_runtime(runtime).open_model(file_of(name, graph_format), "graph")
    batch = -1 if graph_format == "onnx" else 1
    for (dtype, shape), ports, port in ((RAW[name], model.inputs, "raw"), (X[name], model.outputs, "x")):
        assert ports == (ModelPort(name=port, dtype=dtype, shape=(batch, *shape)),)
    actual = run_rows(model, {"raw": raw})["x"]
    expected = app.inputs["x"].numpy()
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(actual, expected, rtol=0, atol=ROUNDING if actual.dtype == np.float32 else 0)


@cache
def file_of(name: str, graph_format: str) -> bytes:
    """Return the graph in this format."""
    return encode_preprocess(raw_app(name), graph_format, name)


@pytest.mark.parametrize("name", in_ci(PREPROCESS, ("pixels",)))
def test_the_manifest_names_the_graph_and_a_runtime_opens_it(name: str) -> None:
    manifest = bundle(name).manifest
    signature = manifest.signatures["preprocess"]
    assert signature.inputs == (Port(name="raw", dtype=RAW[name][0], shape=(-1, *RAW[name][1])),)
    assert signature.outputs == manifest.signatures["infer"].inputs
    preprocess = open_preprocess(open_runtime("onnx"), bundle(name))
    assert preprocess is not None
    raw = raw_of(name).numpy()
    for num in (0, 1, 5):
        x = preprocess(raw[:num])
        assert (x.dtype.name, x.shape) == (X[name][0], (num, *X[name][1]))
        np.testing.assert_allclose(x, raw_app(name).inputs["x"][:num].numpy(), rtol=0, atol=ROUNDING)
    with pytest.raises(ValueError, match="raw: got float64"):
        preprocess(raw.astype(np.float64))


def without(original: Bundle) -> Bundle:
    """Return the Bundle without its ``preprocess`` Signature."""
    signatures = {name: row for name, row in original.manifest.signatures.items() if name != "preprocess"}
    return with_manifest(original, replace(original.manifest, signatures=signatures))


def test_a_bundle_without_preprocess_opens_none() -> None:
    assert open_preprocess(open_runtime("onnx"), without(bundle("pixels"))) is None


@pytest.mark.parametrize("name", in_ci(PREPROCESS, ("pixels",)))
def test_raw_examples_train_as_those_that_the_model_accepts(name: str) -> None:
    changes = []
    for raw in (True, False):
        trainer = RuntimeTrainer(open_runtime("onnx"), store(name, raw=raw))
        model = OpenedModel(bundle=bundle(name), parameters=bundle(name).initial_parameters())
        changes.append(trainer.train(model, assignment(), lambda: True).values)
    np.testing.assert_allclose(*changes, rtol=0, atol=ROUNDING)
    assert np.abs(changes[0]).max() > 10 * ROUNDING


def store(name: str, *, raw: bool) -> MemoryStore:
    """Return a store with the same examples for training and validation."""
    part = examples(name, raw=raw)
    return MemoryStore(partition=0, train=part, validation=part)


@dataclass
class Counted:
    """A model that counts its runs."""

    counting: "Counting"
    inner: LoadedModel

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def __call__(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        self.counting.num_runs += 1
        return self.inner(feed)


class Counting:
    """A runtime that counts the opened model files and their runs."""

    def __init__(self, inner: Runtime) -> None:
        self._inner = inner
        self.num_opened = self.num_runs = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def open_model(self, *arguments: object) -> object:
        self.num_opened += 1
        return Counted(self, self._inner.open_model(*arguments))


def test_examples_are_mapped_once_for_each_bundle() -> None:
    runtime = Counting(open_runtime("onnx"))
    trainer = RuntimeTrainer(runtime, store("pixels", raw=True))
    renamed = with_manifest(bundle("pixels"), replace(bundle("pixels").manifest, name="other"))
    for current, num_opened in ((bundle("pixels"), 1), (bundle("pixels"), 1), (renamed, 2), (bundle("pixels"), 3)):
        trainer.train(OpenedModel(bundle=current, parameters=current.initial_parameters()), assignment(), lambda: True)
        assert runtime.num_opened == num_opened
    plain = OpenedModel(bundle=without(renamed), parameters=renamed.initial_parameters())
    with pytest.raises(
        ValueError, match=r"x: got uint8 \(8, 8, 8, 1\), expected float32 \(n, 1, 8, 8\); scale the values"
    ):
        trainer.train(plain, assignment(), lambda: True)


@dataclass
class Live:
    """A store whose parts the app may replace."""

    train: Examples
    validation: Examples
    partition: int = 0


def test_only_the_part_that_changed_is_mapped_again() -> None:
    runtime, pixels = Counting(open_runtime("onnx")), bundle("pixels")
    raw = examples("pixels", raw=True)
    store = Live(train=raw, validation=raw)
    trainer = RuntimeTrainer(runtime, store)
    model = OpenedModel(bundle=pixels, parameters=pixels.initial_parameters())
    first = trainer.train(model, assignment(), lambda: True)
    # Both parts have the same size, so mapping one of them is half of the first number of runs.
    num_runs = runtime.num_runs
    store.train = Examples(inputs={"x": 255 - raw.inputs["x"]}, y=raw.y)
    second = trainer.train(model, assignment(), lambda: True)
    assert 2 * runtime.num_runs == 3 * num_runs
    assert np.abs(first.values - second.values).max() > 10 * ROUNDING
    third = trainer.train(model, assignment(), lambda: True)
    assert 2 * runtime.num_runs == 3 * num_runs
    # The graph stays open.
    assert runtime.num_opened == 1
    np.testing.assert_array_equal(second.values, third.values)


def test_an_input_that_is_neither_raw_nor_x_is_refused() -> None:
    pixels = bundle("pixels")
    preprocess = open_preprocess(open_runtime("onnx"), pixels)
    message = r"x: got float32 \(2, 8, 8\), expected float32 \(n, 1, 8, 8\), or raw as uint8 \(n, 8, 8, 1\)"
    with pytest.raises(ValueError, match=message):
        model_inputs(pixels, {"x": np.zeros((2, 8, 8), np.float32)}, preprocess)
    x = np.zeros((2, 1, 8, 8), np.float32)
    inputs = {"x": x}
    assert model_inputs(pixels, inputs, preprocess) is inputs


def test_a_signature_of_another_form_is_refused() -> None:
    pixels = bundle("pixels")
    signatures = pixels.manifest.signatures
    wrong = replace(signatures["preprocess"], outputs=signatures["preprocess"].inputs)
    changed = with_manifest(pixels, replace(pixels.manifest, signatures={**signatures, "preprocess": wrong}))
    with pytest.raises(InvalidBundle, match="FN-0417"):
        open_preprocess(open_runtime("onnx"), changed)
    narrow = replace(signatures["preprocess"], inputs=(Port(name="raw", dtype="uint8", shape=(-1, 8, 8, 3)),))
    changed = with_manifest(pixels, replace(pixels.manifest, signatures={**signatures, "preprocess": narrow}))
    with pytest.raises(InvalidBundle, match="FN-0417"):
        open_preprocess(open_runtime("onnx"), changed)


class Mean(Pixels):
    """A module whose result depends on the other samples of the batch."""

    def forward(self, raw: Tensor) -> Tensor:
        """Subtract the mean of the batch."""
        x = super().forward(raw)
        return x - x.mean()


class Noise(Pixels):
    """A module that draws random numbers."""

    def forward(self, raw: Tensor) -> Tensor:
        """Add random noise."""
        return super().forward(raw) + torch.rand(1, 8, 8)


class Branch(Pixels):
    """A module with a branch on a value."""

    def forward(self, raw: Tensor) -> Tensor:
        """Negate x if its sum is not positive."""
        x = super().forward(raw)
        return x if x.sum() > 0 else -x


class Twosome(Pixels):
    """A module that treats the number of samples as a constant."""

    def forward(self, raw: Tensor) -> Tensor:
        """Reshape to the number of samples of the example."""
        return super().forward(raw).reshape(2, 1, 8, 8)


def test_a_graph_that_differs_from_its_module_is_refused() -> None:
    message = r"preprocess \(Mean\) in onnxruntime \S+ differs from torch's by .* each sample by itself"
    app = replace(raw_app("pixels"), preprocess=Mean())
    changed = with_artifact(bundle("pixels"), "preprocess.onnx", encode_preprocess(app, "onnx", "graph"))
    with pytest.raises(UnsupportedModel, match=f"App pixels: {message}"):
        verify_preprocess(app, changed, open_runtime("onnx"))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Branch(), r"module itself \(Branch\) at test_preprocess.py:\d+ reads the value of a tensor, by bool\(\);"),
        (Noise(), r"module itself \(Noise\) at test_preprocess.py:\d+ draws .*; remove the random numbers from it"),
        (Twosome(), r"App pixels: preprocess: .* x.shape\[0\] instead of that number"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_module_that_cannot_be_traced_is_refused_with_its_line(module: nn.Module, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        trace_preprocess(replace(raw_app("pixels"), preprocess=module), 0)


def test_the_check_of_an_app_has_the_line_and_the_remedy() -> None:
    (finding,) = check_app(replace(raw_app("pixels"), preprocess=Branch()), ["onnx"])
    assert (finding.module, finding.kind, finding.graph_format) == ("preprocess", "Branch", "onnx")
    assert "at test_preprocess.py:" in finding.reason
    assert finding.advice.startswith("avoid Python branches and loops that read tensor values")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"raw": None}, "got only one of preprocess and raw, expected both or neither"),
        ({"preprocess": None}, "got only one of preprocess and raw, expected both or neither"),
        ({"raw": raw_of("pixels").long()}, r"raw inputs: got torch.int64 .* or uint8 bytes"),
        ({"raw": raw_of("pixels")[:1]}, r"raw inputs: got torch.uint8 \(1, 8, 8, 1\)"),
        ({"raw": raw_app("pixels").inputs["x"]}, "like the calibration data, expected another dtype or shape"),
        ({"raw": raw_of("characters")}, r"preprocess of raw inputs fails at raw.py:\d+ \(RuntimeError: "),
        (
            {"preprocess": nn.Flatten()},
            r"preprocess \(Flatten\): got \(torch.uint8, \(2, 64\)\) from two samples, expected",
        ),
    ],
)
def test_an_app_whose_preprocess_does_not_fit_is_refused(change: Mapping[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"App pixels: preprocess.*{message}|App pixels: .*{message}"):
        replace(raw_app("pixels"), **change)


def test_creating_an_app_leaves_its_modules_as_they_are() -> None:
    module = nn.Sequential(Pixels(), nn.Dropout(0.5))
    app = replace(raw_app("pixels"), preprocess=module)
    assert module.training
    torch.testing.assert_close(inputs_of(app, {"x": raw_of("pixels")}), app.inputs, rtol=0, atol=0)
    assert inputs_of(app, app.inputs) is app.inputs
    assert trace_preprocess(app, 1).inputs == ["raw"]
    assert module.training


def test_an_app_without_preprocess_uses_its_inputs_as_they_are() -> None:
    app: App = app_of("mlp")
    assert inputs_of(app, app.inputs) is app.inputs


def test_a_batch_of_the_app_is_the_output_of_the_module() -> None:
    assert Characters()(torch.tensor([list(b"Az a")], dtype=torch.uint8)).tolist() == [[0, 26, 0, 1]]
    assert raw_app("characters").examples(BATCH_SIZE)["x"].dtype == torch.int32
