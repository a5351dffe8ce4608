"""``fanin bench secagg``: its report, and its check of the sum."""

import json
from pathlib import Path

import pytest

from fanin.commands.bench import secagg
from fanin.protos.errors import InvalidPlan


@pytest.mark.parametrize("threat", secagg.THREATS)
def test_a_report_has_the_seconds_of_each_phase(threat: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    words = ["--clients", "6", "--parameters", "100", "--drop", "0.2", "--adversarial", "0.2"]
    assert secagg.main([*words, "--threat", threat, "--json", str(file)]) == 0
    row = json.loads(file.read_text())
    phases = {"advertise", "share", "mask", "hash", "unmask", *(["confirm"] if threat == "active" else [])}
    assert set(row["client_seconds_by_phase"]) == phases
    assert set(row["server_seconds_by_phase"]) == phases - {"hash"}
    assert (row["clients"], row["dropped"], row["ring_bits"]) == (6, 1, 16)


@pytest.mark.parametrize(
    "words", [["--threat", "other"], ["--drop", "1"], ["--adversarial", "-0.1"], ["--clients", "2"]], ids=" ".join
)
def test_an_option_out_of_range_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert secagg.main(words) == 2
    assert words[0] in capsys.readouterr().err


def test_fractions_that_no_threshold_satisfies_are_refused() -> None:
    with pytest.raises(InvalidPlan) as caught:
        secagg.main(["--clients", "10", "--adversarial", "0.5", "--drop", "0.5"])
    assert caught.value.code == "FN-1626"
