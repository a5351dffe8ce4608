"""``examples/masked_encoder``: an encoder that sees both sides of a gap beats a model of pairs of letters."""

import json
import math
from pathlib import Path

import pytest
from parallel.test_char_decoder import bound
from support.commands import fanin_in_process
from support.data import real_places

from fanin.clients.data.files import DATA_VARIABLE
from fanin.datacenter.config.settings import SHAKESPEARE

EXAMPLE = Path(__file__).parents[2] / "examples/masked_encoder/train.toml"


@pytest.mark.nightly
def test_nats_of_a_hidden_letter_are_below_the_bigram_entropy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(real_places(SHAKESPEARE).data))
    out = tmp_path / "out.json"
    completed = fanin_in_process(capsys, monkeypatch)("train", EXAMPLE, "--mesh", "none", "--nproc", "1", "--json", out)
    assert (completed.status, completed.err) == (0, "")
    report = json.loads(out.read_text())
    assert report["loss"][0] == pytest.approx(math.log(66), abs=0.1), "at first it knows nothing"
    evaluation = report["evaluations"][-1]
    assert 1.5 < evaluation["validation_loss"] < bound(EXAMPLE)
    assert (
        f"held out {evaluation['validation_loss']:.4f} (right: {evaluation['validation_accuracy']:.4f})"
        in completed.out
    )
