"""``examples/char_decoder``: after a minute of tinyshakespeare, a decoder predicts better than pairs of letters."""

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from support.commands import Fanin, fanin_in_process
from support.data import real_places

from fanin.clients.data.files import DATA_VARIABLE
from fanin.datacenter.config.settings import SHAKESPEARE
from fanin.datacenter.config.train_config import read_train_config
from fanin.datacenter.data.loading import read_characters, split_text
from fanin.datacenter.jobs.job import train_rank

EXAMPLE = Path(__file__).parents[2] / "examples/char_decoder/train.toml"


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """Return the command line, which uses the data that the test found."""
    monkeypatch.setenv(DATA_VARIABLE, str(real_places(SHAKESPEARE).data))
    return fanin_in_process(capsys, monkeypatch)


def bigram_entropy(tokens: list[int]) -> float:
    """Return the nats per character of the best possible model of pairs: it knows how often each pair occurs here."""
    pairs = Counter(pairwise(tokens))
    first = Counter(tokens[:-1])
    return -sum(num * math.log(num / first[pair[0]]) for pair, num in pairs.items()) / pairs.total()


def test_the_bigram_entropy_matches_known_values() -> None:
    assert bigram_entropy([0, 1] * 5) == 0.0
    # 0 is followed by 0 or 1, equally often. 1 is followed by 0.
    assert bigram_entropy([0, 0, 1] * 20 + [0]) == pytest.approx(math.log(2) * 40 / 60)


def bound(config: Path) -> float:
    """Return the bigram entropy of the part that the example holds out."""
    data = read_train_config(config).data
    return bigram_entropy(split_text(read_characters(data.text), data.held_fraction)[1].tolist())


def check_eight_processes(
    fanin: Fanin, folder: Path, num_steps: int, config: Path = EXAMPLE, tolerance: float = 1e-5
) -> None:
    """Compare the losses of the document's command on eight processes with those of one."""
    out = folder / "out.json"
    completed = fanin(
        "train", config, "--mesh", "pp=2,dp_shard=2,tp=2", "--nproc", "8", "--steps", num_steps, "--json", out
    )
    assert (completed.status, completed.err) == (0, "")
    tables = {"parallel": {"mesh": "none"}, "stop": {"steps": num_steps}}
    one = train_rank(read_train_config(config, tables)).metrics.trained
    report = json.loads(out.read_text())
    assert len(report["loss"]) == num_steps
    assert report["loss"] == pytest.approx(one.losses, rel=0, abs=tolerance)
    evaluated = one.evaluated[-1].validation_loss
    assert report["evaluations"][-1]["validation_loss"] == pytest.approx(evaluated, rel=0, abs=tolerance)


@pytest.mark.usefixtures("forked_agents")
def test_eight_ranks_have_the_losses_of_one_process(fanin: Fanin, tmp_path: Path) -> None:
    # An evaluation of 512 samples takes longer than the steps. In double precision every wrong factor is detected.
    config = tmp_path / "train.toml"
    text = EXAMPLE.read_text().replace("num_samples = 512", "num_samples = 32")
    config.write_text(text.replace("[parallel]", '[parallel]\nprecision = "double"'))
    assert "double" in config.read_text()
    check_eight_processes(fanin, tmp_path, 2, config, 1e-10)


@pytest.mark.nightly
def test_eight_processes_have_the_losses_of_one(fanin: Fanin, tmp_path: Path) -> None:
    check_eight_processes(fanin, tmp_path, 3)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        pytest.param(("--mesh", "none", "--nproc", "1"), 100, marks=pytest.mark.nightly),
        pytest.param(("--mesh", "pp=2,dp_shard=2,tp=2", "--nproc", "8"), 120, marks=pytest.mark.nightly),
        pytest.param((), 400, marks=pytest.mark.nightly),
    ],
    ids=["alone", "pp-dp_shard-tp", "whole"],
)
def test_held_out_nats_are_below_the_bigram_entropy(
    fanin: Fanin, tmp_path: Path, options: tuple[str, ...], steps: int
) -> None:
    out = tmp_path / "out.json"
    completed = fanin("train", EXAMPLE, *options, "--steps", steps, "--json", out)
    assert (completed.status, completed.err) == (0, "")
    report = json.loads(out.read_text())
    assert (len(report["loss"]), report["nproc"]) == (steps, 8 if "8" in options else 1)
    assert report["loss"][0] == pytest.approx(math.log(65), abs=0.05), "at first it knows nothing"
    held_out = report["evaluations"][-1]["validation_loss"]
    assert 1.5 < held_out < bound(EXAMPLE)
    assert f"held out {held_out:.4f}" in completed.out
