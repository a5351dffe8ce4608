"""``fanin completion``: the scripts have all subcommands and their options, and bash completes with them."""

import os
import shutil
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


FISH = 'source $argv[1]; complete -C "$argv[2]"'
ZSH = r"""
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "PROMPT=; fpath=($1 \$fpath); autoload -Uz compinit; compinit -u -D; print READ''Y"
read_until() {
    local all= part=
    repeat 200 { while zpty -rt shell part; do all+=$part; done; [[ $all == *$1* ]] && break; sleep 0.05 }
    print -r -- "$all"
}
read_until READY > /dev/null
zpty -wn shell "$2"$'\t'
read_until "$3"
"""


def shell_script(shell: str, path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Write the script of a shell. The shell must be installed."""
    assert shutil.which(shell), f"{shell} is missing: apt-get install {shell}"
    assert main(["completion", shell]) == 0
    path.write_text(capsys.readouterr().out)
    return path


@pytest.mark.nightly
def test_fish_completes_subcommands_and_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = shell_script("fish", tmp_path / "fanin.fish", capsys)

    def completed(line: str) -> list[str]:
        command = ["fish", "--no-config", "-c", FISH, str(script), line]
        environment = os.environ | {"HOME": str(tmp_path)}
        text = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        return [each.partition("\t")[0] for each in text.splitlines()]

    assert completed("fanin re") == sorted(name for name in SUBCOMMANDS if name.startswith("re"))
    assert completed("fanin serve --li") == ["--listen"]
    # A Run with the name of a subcommand.
    assert completed("fanin describe run --se") == ["--server"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("line", "whole"), [("fanin rec", "fanin reclaim"), ("fanin describe run --ser", "fanin describe run --server")]
)
def test_zsh_completes_subcommands_and_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, whole: str
) -> None:
    shell_script("zsh", tmp_path / "_fanin", capsys)
    command = ["zsh", "-f", "-c", ZSH, "zsh", str(tmp_path), line, whole]
    environment = os.environ | {"HOME": str(tmp_path), "TERM": "dumb"}
    text = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert whole in text


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
