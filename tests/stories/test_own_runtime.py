"""The runtime of docs/howto/runtimes.md, from outside the package: a numpy interpreter that trains like torch."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from house.tree import ROOT
from parallel.programs import Programs
from support.models import app_of, batches, bundle_of, samples, write_copy
from support.outside import file_block, install, python_blocks
from torch import from_numpy
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from fanin.edge.runtimes.available import open_runtime

PAGE = (ROOT / "docs" / "howto" / "runtimes.md").read_text()
RUFF = Path(sys.executable).with_name("ruff")
LEARNING_RATE = 0.05
TRAIN = """
import sys
from pathlib import Path
import numpy as np
from fanin.edge.bundles.bundle import open_folder, read_signed_manifest
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import PaddedBatch, StepSettings

folder = Path("bundle")
bundle = open_folder(folder, trusted=[read_signed_manifest(folder).public_key])
step = open_runtime("numpy").open_train(bundle)
data = np.load("data.npz")
state = step.begin(bundle.initial_parameters())
for x, y, mask in zip(data["x"], data["y"], data["mask"], strict=True):
    state, _ = step(state, PaddedBatch(inputs={"x": x}, y=y, mask=mask), StepSettings(learning_rate=float(sys.argv[1])))
np.save("parameters.npy", state.parameters)
"""
MAIN = "import sys; from fanin.commands.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the distribution."""
    folder = tmp_path_factory.mktemp("site")
    install(folder, PAGE, "fanin.runtimes")
    (folder / "numpy_interpreter.py").write_text(file_block(PAGE, "numpy_interpreter.py"))
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Bundle."""
    folder = tmp_path_factory.mktemp("work")
    write_copy(bundle_of("mlp"), folder / "bundle")
    return folder


def test_the_example_is_shorter_than_40_lines_and_keeps_the_contract(
    site: Path, work: Path, programs: Programs
) -> None:
    example, check = file_block(PAGE, "numpy_onnx.py"), python_blocks(PAGE)[-1]
    completed = subprocess.run(
        [RUFF, "format", "-"], input=example, capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert len(completed.stdout.splitlines()) < 40
    outcome = programs.script(check, site=site, cwd=work)
    assert (outcome.returncode, outcome.stderr) == (0, "")


def test_the_example_trains_like_torch(site: Path, work: Path, programs: Programs) -> None:
    rows = list(batches(60, seed=7))
    np.savez(
        work / "data.npz",
        x=[row.inputs["x"] for row in rows],
        **{name: [getattr(row, name) for row in rows] for name in ("y", "mask")},
    )
    outcome = programs.script(TRAIN, LEARNING_RATE, site=site, cwd=work)
    assert (outcome.returncode, outcome.stderr) == (0, "")
    module = app_of("mlp").module
    optimizer = SGD(module.parameters(), lr=LEARNING_RATE, momentum=0.9)
    for row in rows:
        num = int(row.mask.sum())
        optimizer.zero_grad()
        cross_entropy(module(from_numpy(row.inputs["x"][:num])), from_numpy(row.y[:num]).long()).backward()
        optimizer.step()
    table = bundle_of("mlp").manifest.table
    expected = table.flatten({name: value.detach().numpy() for name, value in module.named_parameters()})
    np.testing.assert_allclose(np.load(work / "parameters.npy"), expected, rtol=0, atol=1e-5)


def test_infer_and_join_find_the_example_by_name(site: Path, work: Path, programs: Programs) -> None:
    x, _ = samples(5, seed=4)
    np.save(work / "x.npy", x)
    command = ("infer", "bundle", "--data", "x.npy", "--runtime", "numpy", "--json")
    outcome = programs.script(MAIN, *command, site=site, cwd=work)
    assert outcome.returncode == 0, outcome.stderr
    row = json.loads(outcome.stdout)
    bundle = bundle_of("mlp")
    expected = open_runtime("onnx").open_predict(bundle, bundle.initial_parameters())({"x": x})
    assert row["runtime"] == f"numpy {np.__version__}"
    np.testing.assert_allclose(row["outputs"]["logits"]["values"], expected, rtol=0, atol=0.05 * np.ptp(expected))
    (work / "key.pub").write_text(bundle.signed.public_key)
    files = ("--ca", "ca.pem", "--publisher", "key.pub", "--state", "state", "--data", "none.npz")
    words = ("join", "--server", "localhost:1", *files, "--runtime")
    # The runtime is opened before the data is read.
    assert "none.npz" in programs.script(MAIN, *words, "numpy", site=site, cwd=work).stderr
    assert "runtime: got 'nump'" in programs.script(MAIN, *words, "nump", site=site, cwd=work).stderr


def test_a_graph_with_an_operator_that_the_example_lacks_is_refused_by_name(
    site: Path, work: Path, programs: Programs
) -> None:
    write_copy(bundle_of("cnn"), work / "cnn" / "bundle")
    outcome = programs.script(TRAIN, LEARNING_RATE, site=site, cwd=work / "cnn")
    assert (
        "InvalidBundle: train graph: numpy has no operator Conv, which module 'body.0' uses (nor "
        "['BatchNormalization', 'Expand', 'LayerNormalization', 'Pad', 'ReduceMean']); use another runtime"
    ) in outcome.stderr
