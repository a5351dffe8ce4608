"""``fanin init``: the project that it writes runs, by the commands of its own README."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from house.tree import ROOT
from support.commands import Fanin, fanin_in_process, usage_line
from support.pages import run_page
from support.processes import Site

from fanin.clients.planfile import read_plan

FILES = [".gitignore", "README.md", "app.py", "plan.toml", "pytest.ini", "split.py", "test_app.py"]


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fanin:
    """The command line, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return fanin_in_process(capsys, monkeypatch)


@pytest.mark.parametrize(
    ("folder", "name"), [("wine", "wine"), ("⭐ Modèle 2", "mod-le-2"), ("日本", "project"), ("x" * 200, "x" * 40)]
)
def test_a_project_has_its_files_and_a_name_that_runs_may_have(fanin: Fanin, folder: str, name: str) -> None:
    outcome = fanin("init", folder, "--json")
    assert json.loads(outcome.out) == {"folder": folder, "name": name, "files": FILES}
    assert read_plan(Path(folder, "plan.toml")).plan.name == name
    assert sorted(path.name for path in Path(folder).iterdir()) == FILES
    assert not any("@NAME@" in path.read_text("utf-8") for path in Path(folder).iterdir())


def test_a_folder_with_content_is_left_alone(fanin: Fanin) -> None:
    assert fanin("init", "wine").status == 0
    Path("wine", "app.py").write_text("mine")
    assert usage_line(fanin("init", "wine"), "init").startswith("NAME: wine is not empty, it has ")
    assert Path("wine", "app.py").read_text() == "mine"
    assert "is a file" in usage_line(fanin("init", "wine/app.py"), "init")
    assert "none is not a folder" in usage_line(fanin("init", "none/wine"), "init")
    Path("empty").mkdir()
    assert fanin("init", "empty").status == 0


def test_the_files_of_a_project_have_the_style_of_the_house(fanin: Fanin) -> None:
    fanin("init", "wine")
    command = [sys.executable, "-m", "ruff"]
    for words in (["format", "--check"], ["check"]):
        settings = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", "wine"]
        completed = subprocess.run([*command, *words, *settings], capture_output=True, text=True, check=False)
        assert completed.returncode == 0, completed.stdout


@pytest.mark.nightly
def test_the_advice_to_refresh_the_scales_is_given_only_to_a_plan_that_does_not(
    fanin: Fanin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fanin("init", "wine")
    monkeypatch.chdir("wine")
    site, advice = Site(tmp_path), 'int8.ranges = "devices" in the plan'
    try:
        site.serve()
        run = ("run", "plan.toml", "--state", site.state, "--quiet")
        outcome = fanin(*run)
        assert outcome.status == 0 and "the cost of int8 is not measured" in outcome.err and advice not in outcome.err
        assert advice in fanin(*run, "--set", "int8.ranges=export").err
        # Under masks, no device may show its ranges.
        cohort = ("concurrency=3", "buffer=3", "quorum=3")
        masked = ["round.protocol=secagg", "aggregation.max_examples=4096", "codec.max_shift=0", "int8.ranges=export"]
        words = [word for each in (*masked, *(f"cohort.{key}" for key in cohort)) for word in ("--set", each)]
        outcome = fanin(*run, *words)
        assert (outcome.status, advice in outcome.err) == (0, False), outcome.err
    finally:
        site.close()


@pytest.mark.nightly
def test_the_commands_of_a_projects_readme_run(fanin: Fanin, tmp_path: Path) -> None:
    fanin("init", "⭐ modèle")
    folder = tmp_path / "⭐ modèle"
    outputs = list(run_page("README.md", folder, root=folder).values())
    assert "1 passed" in outputs[0]
    assert "round   5  2 devices" in outputs[2]
    assert outputs[3].count(": verified") == 6
