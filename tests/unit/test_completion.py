"""``fanin completion``: the scripts have all subcommands, verbs, options and values, and shells complete with them."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fanin.commands.main import SUBCOMMANDS, main
from fanin.commands.shell.scripts import SCRIPTS
from fanin.commands.shell.words import HELP, Completed, Option, completed, options_of, verbs_in

ASK = """
source "$0"
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _fanin; printf '%s\\n' "${COMPREPLY[@]}"
"""
QUOTED = {"--set": Option(text="KEY=VALUE: it's a \\ key [str]", has_value=True, values=("a", "b"))}
TABLE = {
    "run": Completed(summary="start a peer's [run]: now", options=QUOTED, names="runs"),
    "token": Completed(summary="of a peer's [token]", options={}),
    "token create": Completed(summary="create a peer's [token]: now", options=QUOTED),
}
STUB = """#!/bin/sh
[ "$1 $3" = "completion --state" ] && printf '%s\\n' "$2-one" "$2-two" "of:$4"
"""
"""A program in place of fanin, which knows names."""


@pytest.mark.heavy
def test_bash_completes_subcommands_and_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "fanin.bash"
    script.write_text(capsys.readouterr().out)

    def answer(*words: str) -> list[str]:
        command = ["bash", "--norc", "-c", ASK, str(script), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    stub = stub_in(tmp_path)
    assert answer("fanin", "") == [*SUBCOMMANDS]
    assert answer("fanin", "token", "") == ["create", "list", "rotate", "revoke"]
    assert answer("fanin", "config", "s") == ["show", "schema"]
    assert answer("fanin", "token", "rotate", "--ex") == ["--expires"]
    assert answer("fanin", "serve", "--log-format", "") == ["text", "json"]
    assert answer("fanin", "serve", "--log-format", "j") == ["json"]
    assert answer(stub, "describe", "runs") == ["runs-one", "runs-two"]
    assert answer(stub, "promote", "runs-one", "3", "of") == ["of:fanin-state"]
    assert answer(stub, "device", "ban", "--state", "elsewhere", "") == [
        "devices-one",
        "devices-two",
        "of:elsewhere",
    ]
    assert answer(stub, "describe", "--state", "") == answer(stub, "token", "revoke", "") == []
    assert answer("fanin", "re") == [name for name in SUBCOMMANDS if name.startswith("re")]
    assert answer("fanin", "serve", "--li") == ["--listen"]
    assert answer("fanin", "join", "--pu") == ["--publisher"]
    assert answer("fanin", "serve", "fi") == []
    assert [name for name in SUBCOMMANDS if answer("fanin", name, "--he") != ["--help"]] == []


def stub_in(folder: Path) -> str:
    """Write the program in place of fanin and return its path."""
    path = folder / "fanin"
    path.write_text(STUB)
    path.chmod(0o755)
    return str(path)


@pytest.mark.heavy
def test_without_a_coordinator_there_are_no_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "runs", "--state", str(tmp_path / "missing")]) == 0
    assert main(["completion", "devices", "--state", str(tmp_path)]) == 0
    assert capsys.readouterr() == ("", "")


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

    def answer(line: str) -> list[str]:
        command = ["fish", "--no-config", "-c", FISH, str(script), line]
        environment = os.environ | {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        text = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        return [each.partition("\t")[0] for each in text.splitlines()]

    stub_in(tmp_path)
    assert answer("fanin token ") == ["create", "list", "revoke", "rotate"]
    assert answer("fanin token rotate --ex") == ["--expires"]
    assert answer("fanin token rotate cre") == []
    assert answer("fanin serve --log-format ") == ["json", "text"]
    assert answer("fanin describe runs-") == ["runs-one", "runs-two"]
    assert answer("fanin device ban --state elsewhere ") == ["devices-one", "devices-two", "of:elsewhere"]
    assert answer("fanin re") == sorted(name for name in SUBCOMMANDS if name.startswith("re"))
    assert answer("fanin serve --li") == ["--listen"]
    # A Run with the name of a subcommand.
    assert answer("fanin describe run --se") == ["--server"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("line", "whole"),
    [
        ("fanin rec", "fanin reclaim"),
        ("fanin describe run --ser", "fanin describe run --server"),
        ("fanin token rot", "fanin token rotate"),
        ("fanin token rotate --ex", "fanin token rotate --expires"),
        ("fanin serve --log-format j", "fanin serve --log-format json"),
        ("fanin describe runs-t", "fanin describe runs-two"),
        ("fanin promote runs-one 3 runs-t", "fanin promote runs-one 3 runs-two"),
        ("fanin device ban --state elsewhere of", "fanin device ban --state elsewhere of:elsewhere"),
    ],
)
def test_zsh_completes_subcommands_and_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, whole: str
) -> None:
    shell_script("zsh", tmp_path / "_fanin", capsys)
    stub_in(tmp_path)
    command = ["zsh", "-f", "-c", ZSH, "zsh", str(tmp_path), line, whole]
    environment = os.environ | {"HOME": str(tmp_path), "TERM": "dumb", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
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
        "  --form [text|json]  Form.",
        "  -f, --kind {a,b_c}  Kind.",
        "  -h, --help                      show this",
    ]
    assert options_of(lines) == {
        "--verbose": Option(text="Log every effect."),
        "--no-verbose": Option(text="Log every effect."),
        "--a-very-long-name-of-an-option": Option(text="Where the text", has_value=True),
        "--form": Option(text="Form.", has_value=True, values=("text", "json")),
        "--kind": Option(text="Kind.", has_value=True, values=("a", "b_c")),
        "--help": HELP,
    }


def test_only_a_help_without_options_has_verbs() -> None:
    text = "usage: fanin token VERB [OPTIONS]\n\n  create  Create one,\n          and print it.\n  list    List.\n"
    assert verbs_in(text) == {"create": "Create one,", "list": "List."}
    assert verbs_in(text + "\noptions:\n  -h, --help  show this\n") == {}


@pytest.mark.parametrize(
    ("usage", "names"),
    [
        ("describe [OPTIONS] RUN", "runs"),
        ("verify [OPTIONS] RUN_ID", "runs"),
        ("promote [OPTIONS] FROM NUMBER RUN", "runs"),
        ("reclaim [OPTIONS] [RUN]...", "runs"),
        ("device tag [OPTIONS] [DEVICE]... [NAME=VALUE]...", "devices"),
        ("device ban [OPTIONS] [DEVICE]...", "devices"),
        ("run [OPTIONS] PLAN", ""),
        ("runs [OPTIONS]", ""),
    ],
)
def test_the_usage_of_a_command_has_the_kind_of_its_names(usage: str, names: str) -> None:
    assert completed("", f"Usage: fanin {usage}\n").names == names
