"""The ratchet's verdict on given samples: worse, within the noise, or none on a busy machine. Nothing is timed here."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from house.tree import ROOT
from support.commands import Fanin, script_in_process

from fanin.commands.bench.rounds import GATE_AGAINST_BARE

BENCHMARKS = ROOT / "benchmarks"
RECORDS = BENCHMARKS / "records.json"
QUIET_LOOPS = [0.010] * 46 + [0.020] * 4
Sides = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""Samples of the recorded commit and of the working tree, by figure."""


@pytest.fixture
def ratchet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return script_in_process(BENCHMARKS / "ratchet.py", capsys)


def samples_file(folder: Path, figures: Sides, *, load: float = 0.1, loops: Sequence[float] = QUIET_LOOPS) -> Path:
    """Write what ``--json`` writes."""
    path = folder / "samples.json"
    sides = {name: {"record": list(record), "now": list(now)} for name, (record, now) in figures.items()}
    path.write_text(json.dumps({"commit": "c" * 40, "load": load, "loop_seconds": list(loops), "figures": sides}))
    return path


@pytest.mark.parametrize(
    ("figures", "worse"),
    [
        ({"rounds": ([2.4, 2.5, 2.4], [2.4, 2.4, 2.5]), "memory-4": ([2.3], [2.3])}, []),
        ({"memory-4": ([2.30, 2.31], [2.62, 2.63]), "fold": ([0.5], [0.5])}, ["memory-4"]),
        # A larger number is better for a speed.
        ({"fold": ([0.9, 0.9], [0.5, 0.5])}, ["fold"]),
        ({"fold": ([0.5, 0.5], [0.9, 0.9])}, []),
        # Within the stated noise, and one of three runs beyond it.
        ({"rounds": ([2.4, 2.4, 2.4], [2.6, 2.7, 2.6])}, []),
        ({"rounds": ([2.4, 2.4, 2.4], [2.4, 5.0, 2.4])}, []),
        # Both trees are slower in the second run: pairs are compared.
        ({"restart": ([10.0, 30.0], [10.5, 31.0])}, []),
        ({"machine": ([1.0, 3.0], [1.5, 4.5]), "rounds": ([2.0], [3.0])}, ["machine", "rounds"]),
    ],
    ids=["same", "memory", "speed down", "speed up", "noise", "outlier", "slower machine", "two"],
)
def test_a_figure_that_is_worse_by_more_than_its_noise_fails(
    ratchet: Fanin, tmp_path: Path, figures: Sides, worse: list[str]
) -> None:
    outcome = ratchet("--from", samples_file(tmp_path, figures))
    assert outcome.status == (1 if worse else 0), outcome.out
    last = outcome.out.splitlines()[-1]
    assert last == (f"worse than cccccccccccc: {', '.join(worse)}" if worse else "nothing is worse than cccccccccccc")
    rows = {line.partition(":")[0]: line for line in outcome.out.splitlines()[1:-1]}
    assert list(rows) == list(figures)
    assert [name for name, row in rows.items() if "WORSE" in row] == worse


def test_a_missed_gate_is_shown_and_is_no_failure(ratchet: Fanin, tmp_path: Path) -> None:
    outcome = ratchet("--from", samples_file(tmp_path, {"memory-64": ([2.9], [2.9]), "memory-4": ([2.3], [2.3])}))
    assert outcome.status == 0
    rows = outcome.out.splitlines()[1:-1]
    assert [row.endswith("misses its gate") for row in rows] == [True, False]


def test_the_rounds_have_one_gate_in_the_ratchet_the_command_and_their_page(ratchet: Fanin, tmp_path: Path) -> None:
    (row,) = ratchet("--from", samples_file(tmp_path, {"rounds": ([2.4], [2.4])})).out.splitlines()[1:-1]
    page = (ROOT / "docs/explanation/benchmarks.md").read_text()
    stated = [
        *re.findall(r"/ bare stream +<= (\S+)", row),
        *re.findall(r"\| (\S+) x the bare stream \|", page),
        *re.findall(r"bare stream \| ratio \| gate (\S+) x \|", page),
    ]
    assert stated == [f"{GATE_AGAINST_BARE:g}"] * 3


@pytest.mark.parametrize(
    ("load", "loops", "reason"),
    [
        (3.2, QUIET_LOOPS, "3.2 processes ran on each processor before the measurement, expected 0.5 or fewer"),
        (
            0.1,
            [0.010] * 8 + [0.020] * 2,
            "a tenth of the calibration loops took 100% longer than most, expected 30%",
        ),
    ],
    ids=["load", "spread"],
)
def test_a_busy_machine_gives_no_verdict(
    ratchet: Fanin, tmp_path: Path, load: float, loops: Sequence[float], reason: str
) -> None:
    # The figure is worse, which a busy machine does not prove.
    outcome = ratchet("--from", samples_file(tmp_path, {"memory-4": ([2.0], [9.0])}, load=load, loops=loops))
    assert outcome.status == 3
    assert outcome.out.splitlines()[-1] == (
        f"no verdict: this machine is too busy: {reason}; stop other programs, and repeat"
    )


def test_an_unknown_name_is_reported_with_the_nearest_one(ratchet: Fanin) -> None:
    outcome = ratchet("--only", "memory-46")
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.startswith("ratchet: --only: got 'memory-46', expected one of rounds, memory-4, memory-64,")
    assert re.search(r"; did you mean 'memory-6?4'\?$", outcome.err.strip())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read (Expecting value"),
        ("[]", "got no commit and figures, expected the JSON of a record or of --json"),
        ('{"commit": "", "figures": {"rounds": {"now": [1.0], "later": []}}}', "is not a file of --json ("),
        ('{"commit": "", "load": 0, "figures": {"speed": {}}}', "got figures speed, expected some of rounds, "),
    ],
    ids=["empty", "list", "other keys", "unknown figure"],
)
def test_a_file_without_samples_is_reported(ratchet: Fanin, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "samples.json"
    path.write_text(text)
    outcome = ratchet("--from", path)
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.startswith(f"ratchet: {path}: {message}") and outcome.err.count("\n") == 1


def test_the_records_have_a_commit_and_every_figure(ratchet: Fanin, tmp_path: Path) -> None:
    records = json.loads(RECORDS.read_text())
    assert re.fullmatch("[0-9a-f]{40}", records["commit"])
    figures = records["figures"]
    assert all(isinstance(value, float) and value > 0.0 for value in figures.values())
    same = {name: ([value], [value]) for name, value in figures.items()}
    outcome = ratchet("--from", samples_file(tmp_path, same))
    assert outcome.status == 0, outcome.out
    # A new figure is recorded in the change that adds it.
    unknown = ratchet("--from", samples_file(tmp_path, {"nothing": ([1.0], [1.0])})).err
    assert unknown.strip().partition("expected some of ")[2].split(", ") == list(figures)


@pytest.mark.nightly
def test_a_measurement_that_fails_leaves_the_others_their_figures(
    ratchet: Fanin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FANIN_DATA", str(tmp_path))
    outcome = ratchet("--anyway", "--only", "simulation", "--only", "machine")
    assert outcome.status == 2
    assert "machine: " in outcome.out and "simulation: " not in outcome.out
    assert "train-images-idx3-ubyte.gz" in outcome.err
