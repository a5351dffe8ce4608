"""``fanin fetch`` from a real coordinator: model files, the parameters for torch, and the refusals of options."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from conftest import BundleOf
from support import federations as f
from support import linear
from support.commands import Fanin, fanin_in_process, one_line, uncoded, usage_line
from support.hosted import Hosted
from support.models import app_of, export_bundle
from support.plain_files import in_litert, in_onnxruntime
from torch import Tensor, nn

from fanin.edge.assembly.assemble import assemble
from fanin.edge.bundles.arrays import write_arrays
from fanin.edge.parameter_files import read_parameters
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.tensors import TensorTable

X = np.random.default_rng(3).standard_normal((5, linear.NUM_INPUTS)).astype(np.float32)
INT8 = "the model is the int8 one of the bundle; --app APP, with the App of the run, writes the float one\n"


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """A coordinator with a Run of a linear model, at its first Version."""
    host = Hosted(tmp_path_factory.mktemp("fetched")).start()
    host.start_run(f.plan(), assemble(linear.linear_graphs(), host.folder / "linear", f.PUBLISHER), f.PUBLISHER)
    host.await_round("run", 1)
    (host.state / "tokens").mkdir()
    (host.state / "tokens" / "operator.token").write_text(host.operator_token)
    (host.state / "address").write_text(host.address)
    yield host
    host.stop()


def test_a_version_is_fetched_as_a_model_that_runs_without_fanin(fanin: Fanin, host: Hosted, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    words = ("fetch", "run", "--state", host.state, "--onnx", path)
    outcome = fanin(*words)
    assert outcome.status == 0, outcome
    assert outcome.out.endswith(f", verified, written to {path}\n{INT8}")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": X})[0], X @ linear.WEIGHT + linear.BIAS, atol=1e-5)
    assert fanin(*words).out.endswith(f"is there already: {path}\n{INT8}")
    row = json.loads(fanin(*words, "--out", tmp_path / "v.npz", "--json").out)
    assert (row["models"], row["out"], row["written"]) == ([str(path)], str(tmp_path / "v.npz"), True)
    assert row["precision"] == "int8"
    path.write_bytes(b"mine")
    message = (
        f"{path}: has another version or another file, which differs; replace it with --force, or name another --onnx"
    )
    assert one_line(fanin(*words, "--out", tmp_path / "new.npz"), "fetch") == message
    assert path.read_bytes() == b"mine"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "v.npz"]


class Tied(nn.Module):
    """A weight with two names, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.second(torch.relu(self.norm(self.first(x.flatten(1))))))


def test_a_fetched_version_loads_into_the_module(fanin: Fanin, host: Hosted, tmp_path: Path) -> None:
    app = replace(app_of("mlp"), module=Tied())
    host.start_run(f.plan(), export_bundle(app), f.PUBLISHER, "tied")
    path = tmp_path / "version.npz"
    outcome = fanin("fetch", "tied", "--state", host.state, "--out", path)
    assert outcome.status == 0 and outcome.out.endswith(f"written to {path}\n"), outcome
    note = "the file has no num_batches_tracked, which does not travel; use load_state_dict(state, strict=False)"
    assert uncoded(outcome.err) == f"note: {note}\n"

    module = Tied()
    state = {name: torch.from_numpy(value) for name, value in np.load(path).items()}
    missing, unexpected = module.load_state_dict(state, strict=False)

    assert (missing, unexpected) == (["second.weight"], [])
    with torch.no_grad():
        x = app.inputs["x"]
        torch.testing.assert_close(module.eval()(x), app.module.eval()(x), rtol=0.0, atol=0.0)


def test_a_fetched_version_of_a_flower_app_is_a_complete_state(fanin: Fanin, host: Hosted, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    module(torch.randn(4, 2))
    arrays = {name: value.numpy() for name, value in module.state_dict().items()}
    arrays["mask"] = np.array([True, False])
    bundle = write_arrays(arrays, tmp_path / "bundle", f.PUBLISHER, "flower")
    host.start_run(f.plan(), bundle, f.PUBLISHER, "flower")
    path = tmp_path / "version.npz"
    outcome = fanin("fetch", "flower", "--state", host.state, "--out", path)
    assert outcome.status == 0, outcome
    note = "note: mask (bool): the values of the initial arrays, because these arrays do not travel\n"
    assert outcome.err == note
    state = {name: torch.from_numpy(value) for name, value in np.load(path).items()}
    assert list(state) == list(arrays)
    loaded = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    del state["mask"]
    loaded.load_state_dict(state, strict=True)
    assert loaded[1].num_batches_tracked == 1
    # The file is also one of parameters, which an App has without counters.
    shapes = {spec.name: spec.shape for spec in bundle.manifest.table.specs if "tracked" not in spec.name}
    assert read_parameters(path)[0] == TensorTable.of(shapes)


def test_int8_and_float_files_of_an_app_are_fetched(
    fanin: Fanin, host: Hosted, both_formats: BundleOf, tmp_path: Path
) -> None:
    bundle, app, x = both_formats("cnn"), app_of("cnn"), app_of("cnn").inputs["x"]
    host.start_run(f.plan(), bundle, f.PUBLISHER, "cnn")
    fetch = ("fetch", "cnn", "--state", host.state)

    int8 = tmp_path / "int8.tflite"
    outcome = fanin(*fetch, "--tflite", int8)
    assert outcome.status == 0, outcome
    predict = open_runtime("litert").open_predict(bundle, bundle.initial_parameters())
    np.testing.assert_array_equal(in_litert(int8.read_bytes(), x.numpy()), predict({"x": x.numpy()}))

    source, floats = tmp_path / "own_app.py", tmp_path / "floats.onnx"
    source.write_text('from support.models import app_of\n\napp = app_of("cnn")\n')
    outcome = fanin(*fetch, "--onnx", floats, "--app", f"{source}:app")
    assert outcome.status == 0, outcome
    assert outcome.out.endswith(f"written to {floats}\nthe model is the float one, traced from {source}:app\n")
    with torch.no_grad():
        expected = app.module.eval()(x).numpy()
    np.testing.assert_allclose(in_onnxruntime(floats.read_bytes(), x.numpy()), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--out: got none, expected FILE.npz or a folder, or --onnx FILE or --tflite FILE"),
        (("--out", "z.pt"), "--out: got z.pt, expected FILE.npz or a folder; for a model file use --onnx or --tflite"),
        (("--app", "a.py:app"), "--app: got a.py:app without a file, expected also --onnx FILE or --tflite FILE"),
        (("--onnx", "m.tflite"), "--onnx: got m.tflite, expected a file that ends in .onnx"),
        (("--onnx", "m.onnx", "--bundle"), "--bundle: expected --out FOLDER"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_options_that_do_not_fit_are_refused(
    fanin: Fanin, host: Hosted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert usage_line(fanin("fetch", "run", "--state", host.state, *words), "fetch").startswith(message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tflite", "m.tflite"), "--tflite: the run's bundle has graphs in ['onnx'] only"),
        (("--onnx", "m.onnx", "--app", "a.py:app"), "App: no file a.py, expected the path of a Python file"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_a_model_that_cannot_be_written_is_refused(
    fanin: Fanin, host: Hosted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert one_line(fanin("fetch", "run", "--state", host.state, *words), "fetch").startswith(message)
    assert list(tmp_path.iterdir()) == []
