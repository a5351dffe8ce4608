"""``fanin assemble`` turns graphs of another exporter into a Bundle, or reports in one line why it cannot."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.commands import Fanin, fanin_in_process, one_line, usage_line
from support.linear import BATCH_SIZE, BIAS, NUM_CLASSES, NUM_INPUTS, WEIGHT, linear_graphs, numpy_step

from fanin.edge.bundles.bundle import open_folder
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import PaddedBatch, StepSettings

SPEC = """
name = "linear"
batch_size = 4
num_classes = 3
parameters = "data/parameters.npz"

[graphs.onnx]
train = "data/train.onnx"
evaluate = "data/evaluate.onnx"
infer = "data/infer.onnx"
"""


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """The file that names the files of the linear model."""
    linear = linear_graphs()
    folder = tmp_path / "data"
    folder.mkdir()
    for name, data in linear.graphs["onnx"].items():
        (folder / f"{name}.onnx").write_bytes(data)
    np.savez(folder / "parameters.npz", **linear.parameters)
    path = tmp_path / "linear.toml"
    path.write_text(SPEC)
    return path


def run_command(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command as users do, in another folder than that of the files."""
    command = [sys.executable, "-m", "fanin.commands.main", *map(str, words)]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=60
    )


def test_a_bundle_of_files_is_signed_trained_and_predicts(spec: Path, tmp_path: Path) -> None:
    other_folder, bundle_folder, key = tmp_path / "elsewhere", tmp_path / "bundle", tmp_path / "publisher.key"
    other_folder.mkdir()
    assembly = run_command("assemble", spec, "--out", bundle_folder, "--key", key, "--json", cwd=other_folder)
    assert (assembly.returncode, assembly.stderr) == (0, "")
    row = json.loads(assembly.stdout)
    assert row["formats"] == ["onnx"] and row["num_parameters"] == WEIGHT.size + BIAS.size
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH_SIZE, NUM_INPUTS)).astype(np.float32)
    np.save(other_folder / "x.npy", x)
    inference = run_command(
        *("infer", bundle_folder, "--publisher", key.with_suffix(".pub"), "--data", "x.npy", "--out", "y.npy"),
        cwd=other_folder,
    )
    assert (inference.returncode, inference.stderr) == (0, "")
    np.testing.assert_allclose(np.load(other_folder / "y.npy"), x @ WEIGHT + BIAS, atol=1e-5)
    bundle = open_folder(bundle_folder, trusted=[key.with_suffix(".pub").read_text().strip()])
    assert bundle.sha256 == row["bundle"]
    step = open_runtime("onnx").open_train(bundle)
    y = rng.integers(0, NUM_CLASSES, BATCH_SIZE).astype(np.int32)
    batch = PaddedBatch(inputs={"x": x}, y=y, mask=np.ones(BATCH_SIZE, np.float32))
    state, loss = step(step.begin(bundle.initial_parameters()), batch, StepSettings(learning_rate=0.5))
    w, b, expected = numpy_step(WEIGHT.astype(np.float64), BIAS.astype(np.float64), x, y, 0.5)
    assert loss == pytest.approx(expected, abs=1e-5)
    np.testing.assert_allclose(bundle.manifest.table.views(state.parameters)["w"], w, atol=1e-6)
    np.testing.assert_allclose(bundle.manifest.table.views(state.parameters)["b"], b, atol=1e-6)


def test_a_summary_is_printed_and_a_bundle_is_never_overwritten(fanin: Fanin, spec: Path, tmp_path: Path) -> None:
    words = ("assemble", spec, "--out", tmp_path / "b", "--key", tmp_path / "k")
    outcome = fanin(*words)
    assert outcome.status == 0, outcome.err
    assert "each graph ran once in onnx" in outcome.out
    assert (
        usage_line(fanin(*words), "assemble")
        == f"--out: {tmp_path / 'b'} is not empty, expected a new folder; name another one, or remove it"
    )


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[graphs.onnx]", "[graphs.onnx", "linear.toml: not a TOML file ("),
        (
            "[graphs.onnx]",
            "optimizer.momentum = {default = 0.9, below = 1.0}\n[graphs.onnx]",
            "bundle: optimizer: got the setting 'momentum', expected an input 'optimizer.momentum' of the train graph",
        ),
        (
            "name =",
            "title =",
            "linear.toml: got unknown ['title'] and no ['name'], expected ['activations', ",
        ),
        (
            "num_classes =",
            "classes =",
            "linear.toml: got unknown ['classes'], expected ['activations', 'batch_size', ",
        ),
        (
            "[graphs.onnx]",
            "[[slots.onnx]]\nparameter = 'b'\nplace = 3\n[graphs.onnx]",
            "linear.toml.slots.onnx[0]: got unknown ['place'], expected ['activation', 'axis', ",
        ),
        ("batch_size = 4", 'batch_size = "4"', "linear.toml.batch_size: got str, expected int"),
        ("batch_size = 4", "batch_size = 8", "train graph: got 'mask' as float32 (4,), expected float32 (8,)"),
        ("train.onnx", "strain.onnx", "strain.onnx: No such file or directory"),
        ('train = "data/train.onnx"', "", "got graphs for ['evaluate', 'infer'] in onnx, expected"),
        ("data/parameters.npz", "data/train.onnx", "train.onnx: not a readable .npz file of plain arrays ("),
        ("data/parameters.npz", "data/one.npy", "one.npy: got a single array, expected an .npz file with one for each"),
        ("[graphs.onnx]", "[graphs.coreml]", "coreml"),
        (
            "[graphs.onnx]",
            "[[slots.onnx]]\nparameter = 'w'\n[graphs.onnx]",
            "infer graph (onnx): got no slots for ['b'], expected one for each parameter",
        ),
        (
            "[graphs.onnx]",
            "[[slots.onnx]]\nparameter = 'v'\n[graphs.onnx]",
            "linear.toml.slots.onnx[0].parameter: got 'v', expected one of ['b', 'w']",
        ),
    ],
)
def test_an_invalid_file_is_refused_in_one_line(
    fanin: Fanin, spec: Path, tmp_path: Path, before: str, after: str, message: str
) -> None:
    np.save(tmp_path / "data" / "one.npy", WEIGHT)
    assert SPEC.count(before) == 1
    spec.write_text(SPEC.replace(before, after))
    line = one_line(fanin("assemble", spec, "--out", tmp_path / "b", "--key", tmp_path / "k"), "assemble")
    assert message in line
    assert not (tmp_path / "b").exists()


def test_slots_of_a_file_are_used(fanin: Fanin, spec: Path, tmp_path: Path) -> None:
    rows = "".join(f"[[slots.onnx]]\nparameter = '{name}'\ninitializer = '{name}'\n" for name in ("b", "w"))
    spec.write_text(SPEC + rows)
    key = tmp_path / "k"
    assert fanin("assemble", spec, "--out", tmp_path / "b", "--key", key).status == 0
    bundle = open_folder(tmp_path / "b", trusted=[key.with_suffix(".pub").read_text().strip()])
    assert [slot.initializer for slot in bundle.manifest.slots["onnx"]] == ["b", "w"]
