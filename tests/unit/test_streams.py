"""Standard output and standard error of commands: text of others cannot control the terminal."""

import sys
from pathlib import Path

import pytest

from fanin.commands.console.streams import escaped_output, printable
from fanin.commands.console.tables import print_tables
from fanin.commands.main import main

HOSTILE = "\x1b]0;owned\a\x9b2J\u202e\u2066\x7f\0"
NAME = HOSTILE[:-1]
"""An argument of a process cannot have NUL."""
SHOWN = r"\x1b]0;owned\x07\x9b2J\u202e\u2066\x7f\x00"


def test_what_controls_a_terminal_is_escaped_and_what_lays_out_text_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with escaped_output():
        sys.stdout.write(f"  name\t{HOSTILE}\n")
        sys.stdout.writelines([f"{HOSTILE}\n", "plain \u00e9 \u4e2d\n"])
        print(HOSTILE, file=sys.stderr)
        sys.stderr.write("\r10 % \r20 %")
        assert not sys.stdout.isatty()
    written = capsys.readouterr()
    assert written.out == f"  name\t{SHOWN}\n{SHOWN}\nplain \u00e9 \u4e2d\n"
    # A progress line begins with a carriage return. A later one may be of a peer, which would overwrite the line.
    assert written.err == f"{SHOWN}\n\r10 % \\r20 %"
    sys.stdout.write(HOSTILE)
    assert capsys.readouterr().out == HOSTILE


def test_a_line_feed_of_a_peer_is_escaped_where_text_has_one_line() -> None:
    assert printable(f"a\nb{HOSTILE}") == rf"a\nb{SHOWN}"


@pytest.mark.parametrize("words", [(NAME,), ("inspect", NAME), ("fetch", NAME, "--out", "x"), ("run", NAME)])
def test_every_command_escapes_the_text_of_its_errors(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) != 0
    written = capsys.readouterr()
    assert (written.out + written.err).replace("\n", "").isprintable()


def test_tables_have_no_control_sequences(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with escaped_output():
        print_tables(f"[red]{HOSTILE}")
    assert "[red]" in (out := capsys.readouterr().out) and out.replace("\n", "").isprintable()
