"""``fanin simulate --flower``: the PyTorch quickstart of the docs with ten clients, and wrong options."""

import json
import shutil
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from house.tree import ROOT
from support.commands import Fanin, fanin_in_process, uncoded

EXAMPLE: Final = ROOT / "examples" / "flower"
QUICKSTART: Final = ("--flower", ".")


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


def test_the_quickstart_is_simulated_with_ten_clients(
    fanin: Fanin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "quickstart"
    shutil.copytree(EXAMPLE, project)
    monkeypatch.chdir(project)
    row = tmp_path / "row.json"
    words = ("--clients", 10, "--cohort", 10, "--rounds", 2, "--json", row, "--out", "final.npz")
    outcome = fanin("simulate", "plan.toml", *QUICKSTART, *words)
    assert outcome.status == 0, outcome.err
    result = json.loads(row.read_text())
    mean = result["rounds"][2]["means"]["evaluate.eval_acc"]
    (line,) = [each for each in outcome.out.splitlines() if each.startswith("round    2  evaluated: validation loss ")]
    assert line.endswith(f"  evaluate.eval_acc {mean:.4f}")
    assert (result["engine"], len(result["versions"])) == ("flower", 3)
    first, last = result["rounds"][1], result["rounds"][2]
    assert (first["num_clients"], last["num_clients"]) == (10, 10)
    # Each of ten partitions has 64 of 640 pictures, and four fifths of these train.
    assert first["num_examples"] == 10 * (64 * 4 // 5)
    assert last["train_loss"] < first["train_loss"]
    assert first["statistics"]["evaluate.eval_acc"] >= 0
    with np.load("final.npz") as final:
        assert (120, 16 * 5 * 5) in {final[name].shape for name in final.files}


def test_a_first_change_that_would_be_cut_is_a_note_at_the_start(
    fanin: Fanin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "quickstart"
    shutil.copytree(EXAMPLE, project)
    monkeypatch.chdir(project)
    words = ("simulate", "plan.toml", *QUICKSTART, "--clients", 2, "--cohort", 2, "--rounds", 1, "--quiet")
    note = "note: codec.max_shift: got 0, so the first Round cuts a change of a small value to 4; "
    assert note in fanin(*words, "--set", "codec.max_shift=0").err
    # The Plan of the example has room for a change of 1024.
    assert "note: " not in fanin(*words).err


def test_a_warning_of_several_worker_processes_is_printed_once(
    fanin: Fanin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(EXAMPLE)
    words = ("--clients", 2, "--cohort", 2, "--rounds", 2, "--processes", 2)
    assert fanin("simulate", *QUICKSTART, *words).status == 0
    (line,) = [text for text in caplog.messages if "without [[statistics]]" in text]
    assert "evaluate.eval_acc" in line


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((), "APP: got none, expected package.module:name, or a Flower app with --flower"),
        (
            ("app.py:app", "plan.toml", *QUICKSTART),
            "--flower: got it with the App app.py:app, expected a plan alone; remove the App",
        ),
        (
            ("app.py:app", "--initial", "x.npz"),
            (
                "--initial, --keep, --node-config, --run-config: got them without --flower, expected them for a Flower "
                "app only"
            ),
        ),
    ],
)
def test_wrong_options_are_wrong_usage(fanin: Fanin, words: tuple[str, ...], error: str) -> None:
    outcome = fanin("simulate", *words)
    assert (outcome.status, uncoded(outcome.err)) == (2, f"fanin simulate: {error}; see fanin simulate --help\n")
