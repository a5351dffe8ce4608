"""``fanin infer`` and ``fanin inspect`` on model files and Bundles: their output, their files and their refusals."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from support import linear, scalar
from support.commands import Fanin, fanin_in_process, one_line, uncoded, usage_line
from support.data import real_places
from support.values import PUBLISHER

from fanin.commands.inspect import kind_of
from fanin.edge.assembly.assemble import assemble
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.tensors import encode_parameters

X = np.random.default_rng(3).standard_normal((5, linear.NUM_INPUTS))
LOGITS = X @ linear.WEIGHT + linear.BIAS


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model, inputs and a Bundle."""
    (tmp_path / "zeros.onnx").write_bytes(linear.infer_graph())
    np.save(tmp_path / "x.npy", X)
    np.savez(tmp_path / "named.npz", x=X.astype(np.float32), y=np.zeros(5))
    return tmp_path


@pytest.fixture
def bundle(folder: Path) -> Bundle:
    """The Bundle in the folder."""
    (folder / "key.pub").write_text(PUBLISHER.public + "\n")
    return assemble(linear.linear_graphs(), folder / "bundle", PUBLISHER)


@pytest.mark.parametrize("data", ["x.npy", "named.npz"])
@pytest.mark.parametrize("runtime", ["onnx", "reference"])
def test_a_file_predicts(fanin: Fanin, folder: Path, data: str, runtime: str) -> None:
    outcome = fanin("infer", folder / "zeros.onnx", "--data", folder / data, "--runtime", runtime, "--json")
    assert (outcome.status, uncoded(outcome.err)) == (0, "")
    row = json.loads(outcome.out)
    assert row["runtime"].startswith("onnx")
    assert row["outputs"] == {"logits": {"dtype": "float32", "shape": [5, 3], "values": [[1.0] * 3] * 5}}


def test_outputs_are_printed_and_written(fanin: Fanin, folder: Path) -> None:
    words = ("infer", folder / "zeros.onnx", "--data", folder / "x.npy")
    outcome = fanin(*words, "--out", folder / "out.npz", "--json", folder / "out.json")
    assert outcome.status == 0
    assert outcome.out.startswith("logits  float32 (5, 3)\n")
    assert json.loads((folder / "out.json").read_text())["outputs"] == {"logits": {"dtype": "float32", "shape": [5, 3]}}
    with np.load(folder / "out.npz") as arrays:
        np.testing.assert_array_equal(arrays["logits"], np.ones((5, 3), np.float32))
    outcome = fanin(*words, "--out", folder / "out.npy")
    assert outcome.out.startswith("logits  float32 (5, 3)\n[[1. 1. 1.]\n")
    np.testing.assert_array_equal(np.load(folder / "out.npy"), np.ones((5, 3), np.float32))


def test_a_bundle_predicts_with_its_first_version_or_another(fanin: Fanin, folder: Path, bundle: Bundle) -> None:
    words = ("infer", folder / "bundle", "--data", folder / "x.npy", "--publisher", folder / "key.pub", "--json")
    logits = json.loads(fanin(*words).out)["outputs"]["logits"]["values"]
    np.testing.assert_allclose(logits, LOGITS, atol=1e-5)
    table = bundle.manifest.table
    (folder / "version").write_bytes(encode_parameters(table, 2 * bundle.initial_parameters()))
    logits = json.loads(fanin(*words, "--version", folder / "version").out)["outputs"]["logits"]["values"]
    np.testing.assert_allclose(logits, 2 * LOGITS, atol=1e-5)


def two_inputs() -> bytes:
    """Return a model with two inputs, one with a name that is no identifier."""
    ports = [linear.port("a", "n", dtype=TensorProto.FLOAT), linear.port("b:0", "n")]
    return linear.file([helper.make_node("Sub", ["a", "b:0"], ["file"])], ports, [linear.port("file", "n")])


def test_several_inputs_are_distinguished_by_their_names(fanin: Fanin, folder: Path) -> None:
    (folder / "two.onnx").write_bytes(two_inputs())
    np.savez(folder / "two.npz", **{"a": np.array([3.0, 2.0]), "b:0": np.array([1.0, 5.0])})
    outcome = fanin("infer", folder / "two.onnx", "--data", folder / "two.npz", "--out", folder / "out.npz")
    assert outcome.status == 0, outcome.err
    with np.load(folder / "out.npz") as arrays:
        assert arrays["file"].tolist() == [2.0, -3.0]
    message = one_line(fanin("infer", folder / "two.onnx", "--data", folder / "x.npy"), "infer")
    assert message.endswith(
        "x.npy: got one array without a name, expected the model's inputs ['a', 'b:0'], such as in an .npz file"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.onnx", "--data", "x.npy"], "nothing.onnx: No such file or directory"),
        (["nofolder", "--data", "x.npy"], "nofolder: No such file or directory"),
        (["zeros.onnx", "--data", "nothing.npy"], "nothing.npy: No such file or directory"),
        (["torn.onnx", "--data", "x.npy"], "torn.onnx: onnxruntime cannot open it"),
        (["torn.tflite", "--data", "x.npy"], "torn.tflite: got 8 bytes that begin"),
        (["zeros.onnx", "--data", "torn.onnx"], "torn.onnx: not a readable .npy or .npz file of plain arrays"),
        (["zeros.onnx", "--data", "wide.npy"], "wide.npy: x: got float64 (5, 7), expected float32 (n, 6)"),
        (["zeros.onnx", "--data", "text.npy"], "text.npy: got no numbers in the array, expected arrays"),
        (["zeros.onnx", "--data", "x.npy", "--runtime", "litert"], "runtime 'litert': runs graphs in 'tflite'"),
        (["bundle", "--data", "x.npy", "--version", "x.npy"], "x.npy: got a single array of numpy"),
        (["bundle", "--data", "x.npy", "--publisher", "other.pub"], "bundle: signed by key"),
        (["bundle", "--data", "mask.npy"], "mask.npy: x: got bool (5, 6), expected float32 (n, 6); convert it by x.as"),
        (["bundle", "--data", "wide.npy"], "wide.npy: x: got float64 (5, 7), expected float32 (n, 6)"),
    ],
)
@pytest.mark.usefixtures("bundle")
def test_a_prediction_that_is_impossible_is_one_clear_line(
    fanin: Fanin, folder: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for name in ("torn.onnx", "torn.tflite"):
        (folder / name).write_bytes(b"no model")
    (folder / "other.pub").write_text("ab" * 32)
    np.save(folder / "wide.npy", np.zeros((5, 7)))
    np.save(folder / "mask.npy", np.zeros((5, 6), bool))
    np.save(folder / "text.npy", np.array(["a"]))
    assert message in one_line(fanin("infer", *words), "infer")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x.npy", "--data", "x.npy"], "x.npy: got a file of unknown format"),
        (["zeros.onnx", "--data", "x.npy", "--version", "x.npy"], "got --publisher, --version or --ranges for a file"),
        (["zeros.onnx", "--data", "x.npy", "--signature", "s"], "got --signature 's', but an .onnx file has a single"),
        (["zeros.onnx", "--data", "x.npy", "--out", "none/x.npy"], "--out: none/x.npy cannot be written, none is not"),
        (["zeros.onnx", "--data", "x.npy", "--json", "none/x"], "--json: none/x cannot be written, none is not a"),
        (["bundle", "--data", "x.npy", "--signature", "train"], "got --signature for a bundle, which is opened by"),
    ],
)
@pytest.mark.usefixtures("bundle")
def test_options_that_do_not_go_with_the_model_are_wrong_usage(
    fanin: Fanin, folder: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert message in usage_line(fanin("infer", *words), "infer")


def test_a_file_is_inspected(fanin: Fanin, folder: Path) -> None:
    path = folder / "zeros.onnx"
    row = json.loads(fanin("inspect", path, "--json").out)
    assert (row["format"], row["size_bytes"]) == ("onnx", path.stat().st_size)
    assert row["inputs"] == [{"name": "x", "dtype": "float32", "shape": [-1, 6]}]
    assert row["outputs"] == [{"name": "logits", "dtype": "float32", "shape": [-1, 3]}]
    assert "    logits                   float32  [-1, 3]\n" in fanin("inspect", path).out
    assert "unknown format" in usage_line(fanin("inspect", folder / "x.npy"), "inspect")


def test_int8_in_and_out_is_quantized_with_the_files_own_scale(fanin: Fanin, tmp_path: Path) -> None:
    data = real_places("mlperf-tiny").data
    assert data is not None
    path = data / "mlperf-tiny" / "vww_96_int8.tflite"
    np.save(tmp_path / "x.npy", np.random.default_rng(3).random((2, 96, 96, 3)))
    words = ("infer", path, "--data", tmp_path / "x.npy", "--json")
    (int8_output,) = json.loads(fanin(*words).out)["outputs"].values()
    (float_output,) = json.loads(fanin(*words, "--float").out)["outputs"].values()
    assert (int8_output["dtype"], float_output["dtype"]) == ("int8", "float32")
    np.testing.assert_allclose((np.array(int8_output["values"]) + 128) / 256, float_output["values"])
    np.testing.assert_allclose(np.sum(float_output["values"], axis=1), 1.0, atol=1 / 128)
    assert "value = 0.00390625 * (stored +128)" in fanin("inspect", path).out


def test_a_bundle_of_values_is_inspected(fanin: Fanin, folder: Path) -> None:
    assemble(scalar.scalar_graphs(), folder / "values", PUBLISHER)
    assert "  model       values\n" in fanin("inspect", folder / "values").out
    row = json.loads(fanin("inspect", folder / "values", "--json").out)
    assert (row["num_classes"], row["num_tokens"]) == (0, {})
    assert one_line(fanin("inspect", folder / "none"), "inspect").startswith(f"{folder / 'none'}: does not exist, ")


@pytest.mark.usefixtures("bundle")
def test_a_bundle_of_classes_is_inspected(fanin: Fanin, folder: Path) -> None:
    lines = fanin("inspect", folder / "bundle").out.splitlines()
    assert "  model       3 classes" in lines
    first = lines.index("  inputs")
    assert lines[first + 1 : first + 4] == [
        "    x                        float32  [-1, 6]",
        "  outputs",
        "    logits                   float32  [-1, 3]",
    ]
    row = json.loads(fanin("inspect", folder / "bundle", "--json").out)
    assert row["inputs"] == [{"name": "x", "dtype": "float32", "shape": [-1, 6]}]
    assert row["outputs"] == [{"name": "logits", "dtype": "float32", "shape": [-1, 3]}]


def test_the_kind_of_a_model_names_its_inputs_and_outputs(bundle: Bundle) -> None:
    manifest = replace(bundle.manifest, num_tokens={"x": 65})
    assert kind_of(manifest) == "65 tokens to 3 classes"
    assert kind_of(replace(manifest, num_classes=0)) == "65 tokens to values"
