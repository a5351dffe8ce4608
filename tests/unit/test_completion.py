"""``fanin completion``: the scripts have all subcommands and their options, and bash completes with them."""

import subprocess
from pathlib import Path

import pytest

from fanin.commands.main import SUBCOMMANDS, main
from fanin.commands.shell.scripts import SCRIPTS, Completed, options_of

ASK = """
source "$0"
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _fanin; printf '%s\\n' "${COMPREPLY[@]}"
"""
TABLE = {"run": Completed(summary="start a peer's [run]: now", options={"--set": "KEY=VALUE: it's a \\ key [str]"})}


@pytest.mark.heavy
def test_bash_completes_subcommands_and_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "fanin.bash"
    script.write_text(capsys.readouterr().out)

    def completed(*words: str) -> list[str]:
        command = ["bash", "--norc", "-c", ASK, str(script), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    assert completed("fanin", "") == [*SUBCOMMANDS]
    assert completed("fanin", "re") == [name for name in SUBCOMMANDS if name.startswith("re")]
    assert completed("fanin", "serve", "--li") == ["--listen"]
    assert completed("fanin", "join", "--pu") == ["--publisher"]
    assert completed("fanin", "serve", "fi") == []
    assert [name for name in SUBCOMMANDS if completed("fanin", name, "--he") != ["--help"]] == []


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_script_quotes_the_texts_of_the_help(shell: str) -> None:
    script = SCRIPTS[shell](TABLE)
    assert "run" in script and "set" in script
    quotes = script.replace("'\\''", "").replace("\\'", "")
    assert all(line.count("'") % 2 == 0 for line in quotes.splitlines() if not line.strip().startswith("#")), script


def test_the_options_of_a_help_are_read_with_their_texts() -> None:
    lines = [
        "Options:",
        "  --verbose / --no-verbose  Log every effect.",
        "  --a-very-long-name-of-an-option TEXT",
        "                                  Where the text",
        "                                  --with may begin.",
        "  -h, --help                      show this",
    ]
    assert options_of(lines) == {
        "--verbose": "Log every effect.",
        "--no-verbose": "Log every effect.",
        "--a-very-long-name-of-an-option": "Where the text",
        "--help": "show the options",
    }
