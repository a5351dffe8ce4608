"""The model family of docs/howto/families.md, from outside the package: its contract, and its training on a mesh."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from house.tree import ROOT
from parallel.programs import Programs, forked_agents
from support.commands import Fanin, fanin_in_process, one_line, uncoded
from support.outside import install, python_blocks

from fanin.datacenter.config.train_config import read_train_config
from fanin.datacenter.jobs.job import train_rank

PAGE = (ROOT / "docs" / "howto" / "families.md").read_text()
CONFIG = """
[model.conv]
vocabulary = 16
width = 16
num_layers = 4
[data]
text = "{text}"
length = 16
[training]
batch_size = 16
learning_rate = 0.02
clip_norm = 1.0
[stop]
steps = 6
[parallel]
microbatches = 2
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the distribution."""
    folder = tmp_path / "site"
    folder.mkdir()
    install(folder, PAGE, "fanin.families")
    return folder


@pytest.fixture
def fanin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, site: Path, programs: Programs
) -> Iterator[Fanin]:
    """The command line with the distribution installed, which the ranks of a job find too."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))
    with forked_agents(programs):
        yield fanin_in_process(capsys, monkeypatch)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 60)
    path = tmp_path / "train.toml"
    path.write_text(CONFIG.format(text=text))
    return path


def test_the_example_is_shorter_than_40_lines_and_keeps_the_contract(site: Path, programs: Programs) -> None:
    example, check = python_blocks(PAGE)
    assert len(example.splitlines()) < 40
    completed = programs.script(check, site=site)
    assert (completed.returncode, completed.stderr) == (0, "")


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["pp=2", "pp=2,dp_replicate=2,dp_shard=2"])
def test_the_family_trains_on_a_mesh_as_in_one_process(fanin: Fanin, config: Path, tmp_path: Path, mesh: str) -> None:
    losses, out = train_rank(read_train_config(config)).metrics.trained.losses, tmp_path / "out.json"
    outcome = fanin("train", config, "--mesh", mesh, "--json", out)
    assert (outcome.status, uncoded(outcome.err)) == (0, "")
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.3
    assert json.loads(out.read_text())["loss"] == pytest.approx(losses, abs=1e-5)


def test_the_config_of_the_page_trains(fanin: Fanin, config: Path, tmp_path: Path) -> None:
    (text,) = re.findall(r"^```toml\n(\[model\.conv\]\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(text.splitlines()) == 10
    file = tmp_path / "text.txt"
    config.write_text(text.replace("tinyshakespeare", str(file)).replace("steps = 200", "steps = 2"))
    outcome = fanin("train", config)
    assert (outcome.status, uncoded(outcome.err)) == (0, "")


@pytest.mark.nightly
def test_the_family_trains_in_double_precision(fanin: Fanin, config: Path, tmp_path: Path) -> None:
    config.write_text(config.read_text() + 'precision = "double"\n')
    losses = []
    for mesh in ("none", "pp=2"):
        out = tmp_path / f"{mesh}.json"
        outcome = fanin("train", config, "--mesh", mesh, "--json", out)
        assert (outcome.status, uncoded(outcome.err)) == (0, "")
        losses.append(json.loads(out.read_text())["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0, abs=1e-10)


@pytest.mark.nightly
def test_a_forward_outside_of_the_layout_is_refused(fanin: Fanin, config: Path, site: Path) -> None:
    source = site / "conv_family.py"
    constructor = "return nn.Sequential(OrderedDict("
    code = source.read_text().replace(constructor, "return Doubled(OrderedDict(")
    assert code != source.read_text()
    class_code = "class Doubled(nn.Sequential):\n    def forward(self, x):\n        return 2 * super().forward(x)\n"
    source.write_text(f"{code}\n\n{class_code}")
    error = one_line(fanin("train", config, "--mesh", "pp=2"), "train")
    assert re.match(r"model: layout: for the same \d+ samples got the loss .* on mesh pp=2 .* name every module", error)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["none", "pp=2"])
def test_another_number_of_layers_than_the_layouts_is_refused(
    fanin: Fanin, config: Path, site: Path, mesh: str
) -> None:
    source = site / "conv_family.py"
    code = source.read_text().replace("for _ in range(config.num_layers)", "for _ in range(config.num_layers - 1)")
    assert code != source.read_text()
    source.write_text(code)
    error = one_line(fanin("train", config, "--mesh", mesh), "train")
    assert error == (
        "layout: got num_layers 4, expected 3, the number of modules in blocks; correct the sizes of the layout or the "
        "build of the model"
    )


def test_an_axis_without_a_plan_in_the_layout_is_refused(fanin: Fanin, config: Path) -> None:
    error = one_line(fanin("train", config, "--mesh", "tp=2"), "train")
    assert error == (
        "mesh tp=2: got tp 2 for the family 'conv', whose layout has no plan that splits its modules over tp; take "
        "dp_replicate and dp_shard, or add a plan to the family's layout"
    )


def test_keys_of_the_family_are_checked(fanin: Fanin, config: Path) -> None:
    config.write_text(config.read_text().replace("width", "widht"))
    error = one_line(fanin("train", config), "train")
    assert error.endswith("[model.conv]: got unknown key 'widht', did you mean 'width'?")
