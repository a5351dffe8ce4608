"""``fanin explain``, and the codes that commands print with their errors: as text, and as JSON."""

import json
import subprocess
import sys

import pytest

from fanin.commands.main import main
from fanin.protos.codes import entries


@pytest.mark.parametrize("word", ["FN-0023", "fn-0023", "FN0023", "23"])
def test_explain_shows_meaning_cause_and_remedy(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", word]) == 0
    entry = entries()["FN-0023"]
    assert capsys.readouterr().out == f"{entry.meaning}\n\nCause: {entry.cause}\n\nRemedy: {entry.remedy}\n"


def test_explain_runs_on_the_core_install_of_a_device() -> None:
    """Errors of ``fanin join`` and the fixes of ``fanin doctor`` name it."""
    code = "import sys; sys.modules |= dict.fromkeys(('typer', 'click', 'rich')); from fanin.commands.main import main"
    command = [sys.executable, "-c", f"{code}; sys.exit(main(['explain', 'FN-0816']))"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert completed.stdout.startswith(entries()["FN-0816"].meaning)


@pytest.mark.parametrize("word", ["FN-9999", "FN-00231", "E0023", "", "٢٣", "FN-" + "9" * 5000])
def test_an_unknown_code_is_an_error_that_names_a_known_one(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", word]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("fanin explain: got the code") and error.endswith(" [FN-0027]\n")
    assert len(error) < 300


def test_a_code_with_a_wrong_digit_names_a_near_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "FN-9023"]) == 1
    assert "; did you mean FN-" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "code", "kind"),
    [
        (["inspect", "absent", "--json"], 1, "FN-0303", "InvalidBundle"),
        (["inspect", "--json", "-", "absent"], 1, "FN-0303", "InvalidBundle"),
        (["inspect", "--json=-", "absent"], 1, "FN-0303", "InvalidBundle"),
        (["explain", "FN-9999", "--json"], 1, "FN-0027", "InvalidInput"),
        (["explain", "--unknown", "--json"], 2, "FN-0023", "WrongUsage"),
        (["expain", "--json"], 2, "FN-0023", "WrongUsage"),
    ],
)
def test_an_error_is_a_line_of_json_where_the_result_would_be(
    words: list[str], status: int, code: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == status
    out, error = capsys.readouterr()
    row = json.loads(out)["error"]
    assert (row["code"], row["kind"]) == (code, kind)
    assert error.rstrip().endswith(f"{row['message']} [{code}]")


def test_an_error_is_text_alone_where_the_result_would_be_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "FN-9999"]) == 1
    assert capsys.readouterr().out == ""
