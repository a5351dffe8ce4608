"""An operator that the graph formats lack, with its form in docs/howto/operators.md, from outside the package."""

from pathlib import Path

import pytest
from house.tree import ROOT
from parallel.programs import Programs
from support.outside import python_blocks

PAGE = (ROOT / "docs" / "howto" / "operators.md").read_text()
PROGRAM = """
import sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.export import check_app, export
from fanin.edge.export.formats.graphs import FORMATS
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import PaddedBatch, StepSettings
from modulus_app import app

name = sys.argv[1]
print([row.operator for row in check_app(replace(app(), decompositions={}), [name])])
bundle = export(app(), Path(sys.argv[2]), SigningKey.generate(), [name]).bundle
step = open_runtime(FORMATS[name].runtime).open_train(bundle)
x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
batch = PaddedBatch(inputs={"x": x}, y=np.arange(8, dtype=np.int32) % 4, mask=np.ones(8, np.float32))
state, losses = step.begin(bundle.initial_parameters()), []
for _ in range(30):
    state, loss = step(state, batch, StepSettings(learning_rate=0.1))
    losses.append(loss)
print(losses[-1] < 0.5 * losses[0])
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the App of the page."""
    folder = tmp_path_factory.mktemp("site")
    example, _ = python_blocks(PAGE)
    assert len(example.splitlines()) < 40
    (folder / "modulus_app.py").write_text(example)
    return folder


def test_the_form_of_the_page_keeps_the_contract(site: Path, programs: Programs) -> None:
    check = python_blocks(PAGE)[1]
    completed = programs.script(check, site=site)
    assert (completed.returncode, completed.stderr) == (0, "")


@pytest.mark.nightly
@pytest.mark.parametrize("graph_format", ["onnx", "tflite"])
def test_an_app_with_its_own_form_is_exported_and_trains(
    site: Path, tmp_path: Path, programs: Programs, graph_format: str
) -> None:
    completed = programs.script(PROGRAM, graph_format, tmp_path / "bundle", site=site)
    assert completed.returncode == 0, completed.stderr
    missing_operators, result = completed.stdout.splitlines()[-2:]
    assert result == "True"
    if graph_format == "onnx":
        assert "hypot" in missing_operators
