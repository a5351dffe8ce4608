"""``fanin fetch --onnx`` from a real coordinator, and its refusals of options."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from support import federations as f
from support import linear
from support.commands import Fanin, fanin_in_process, one_line
from support.hosted import Hosted

from fanin.edge.assembly.assemble import assemble

X = np.random.default_rng(3).standard_normal((5, linear.NUM_INPUTS)).astype(np.float32)


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
    words = ("fetch", "run", "--state", host.state, "--onnx", path, "--int8")
    outcome = fanin(*words)
    assert outcome.status == 0, outcome
    assert outcome.out.endswith(f", verified, written to {path}\n")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": X})[0], X @ linear.WEIGHT + linear.BIAS, atol=1e-5)
    assert fanin(*words).out.endswith(f"is there already: {path}\n")
    row = json.loads(fanin(*words, "--out", tmp_path / "v.npz", "--json").out)
    assert (row["models"], row["out"], row["written"]) == ([str(path)], str(tmp_path / "v.npz"), True)
    path.write_bytes(b"mine")
    assert one_line(fanin(*words), "fetch").startswith(f"{path}: something else is there")
    assert path.read_bytes() == b"mine"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "v.npz"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--out: got none, expected FILE.npz or a folder, or --onnx FILE or --tflite FILE"),
        (("--out", "z.pt"), "--out: got z.pt, expected FILE.npz or a folder; for a model file use --onnx or --tflite"),
        (("--int8",), "--int8: expected --onnx FILE or --tflite FILE with it"),
        (("--onnx", "m.onnx"), "--onnx: got neither --int8 nor --app, expected --int8 for the int8 model"),
        (("--onnx", "m.onnx", "--int8", "--app", "a.py:app"), "--onnx: got both --int8 and --app, expected"),
        (("--onnx", "m.tflite", "--int8"), "--onnx: got m.tflite, expected a file that ends in .onnx"),
        (("--tflite", "m.tflite", "--int8"), "--tflite: the run's bundle has graphs in ['onnx'] only"),
        (("--onnx", "m.onnx", "--app", "a.py:app"), "App: no file a.py, expected the path of a Python file"),
        (("--onnx", "m.onnx", "--int8", "--bundle"), "--bundle: expected --out FOLDER"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_options_that_do_not_fit_are_refused(
    fanin: Fanin, host: Hosted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert one_line(fanin("fetch", "run", "--state", host.state, *words), "fetch").startswith(message)
    assert list(tmp_path.iterdir()) == []
