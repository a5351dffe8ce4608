"""A Round is one line of at most 100 characters: in a pipe as text, on a terminal as a row that fits its width."""

import io
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanin.commands.display.bars import bar
from fanin.commands.display.rounds import COLUMNS, MAX_LINE, RoundLine
from fanin.commands.display.screen import Screen
from fanin.commands.display.view import EventView
from fanin.protos import messages as m
from fanin.protos.texts import lasted, sized

EVALUATION = m.Evaluation(
    num_examples=232, loss=0.65, accuracy_float=0.944, accuracy_int8=0.9431, int8_agreement=0.99, num_labels=232
)
VERSION = m.VersionPublished(
    number=3,
    version_sha256="ab" * 32,
    parent=2,
    round=12,
    round_s=0.243,
    bytes_down=320_160,
    bytes_up=321_316,
    train_loss=0.0831,
    train_loss_examples=928,
    total_examples=928,
    evaluation=EVALUATION,
)
LINE = "round  12  8 devices  loss 0.08310  accuracy 0.9440 int8 0.9431  0.24 s  320 kB down 321 kB up"


SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
"""A control sequence of a terminal."""


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


def shown(stream: io.StringIO, *events: m.RunEvent, verbose: bool = False) -> list[str]:
    """Return the lines of a Run's events on a stream."""
    with EventView(Screen(stream), verbose=verbose) as view:
        for event in events:
            view.event(event)
    return stream.getvalue().splitlines()


def a_round(version: m.VersionPublished, num_devices: int = 8) -> tuple[m.RunEvent, ...]:
    """Return the events of a Round."""
    closed = m.RoundClosed(round=version.round, num_accepted=num_devices, accepted=())
    return m.RoundOpened(round=version.round, base_version=version.parent), closed, version


def test_a_round_is_one_line() -> None:
    assert shown(io.StringIO(), *a_round(VERSION)) == [LINE]


def test_verbose_has_a_line_for_each_event_with_the_digest() -> None:
    lines = shown(io.StringIO(), *a_round(VERSION), verbose=True)
    assert len(lines) == 3 and "abababab" in lines[2] and "validated on 232" in lines[2]


def test_a_regression_has_the_rise_of_int8_and_no_accuracy() -> None:
    evaluation = replace(EVALUATION, accuracy_float=0, accuracy_int8=0, int8_agreement=0, int8_rise_percent=0.314)
    (line,) = shown(io.StringIO(), *a_round(replace(VERSION, evaluation=evaluation)))
    assert "int8 +0.31 %" in line and "accuracy" not in line


def test_a_round_without_a_training_loss_has_the_validation_loss() -> None:
    (line,) = shown(io.StringIO(), *a_round(replace(VERSION, train_loss_examples=0)))
    assert "loss 0.6500" in line
    (line,) = shown(io.StringIO(), *a_round(replace(VERSION, train_loss_examples=0, evaluation=None)))
    assert "loss" not in line


def test_what_is_wrong_is_noted_once() -> None:
    bad = replace(VERSION, evaluation=replace(EVALUATION, accuracy_int8=0.1, int8_agreement=0.1))
    lines = shown(io.StringIO(), *a_round(bad), *a_round(bad))
    assert [line.partition(":")[0] for line in lines if line.startswith("note")] == ["note"]
    assert "int8.ranges = 'devices'" in lines[1]


@given(
    number=st.integers(1, 2**53),
    num_devices=st.integers(0, 2**40),
    seconds=st.floats(0, 1e12),
    num_bytes=st.integers(0, 2**63),
    loss=st.floats(0, 1e300),
)
def test_no_round_is_longer_than_a_line(
    number: int, num_devices: int, seconds: float, num_bytes: int, loss: float
) -> None:
    version = replace(VERSION, round=number, round_s=seconds, bytes_down=num_bytes, bytes_up=num_bytes, train_loss=loss)
    line = RoundLine(version=version, num_devices=num_devices).text()
    assert len(line) <= MAX_LINE and line.startswith(f"round {number:3d}")


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 120])
def test_a_terminal_gets_the_columns_that_fit(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    lines = [SEQUENCE.sub("", line) for line in shown(Terminal(), *a_round(VERSION))]
    header, row = (line for line in lines if line.strip() and "open" not in line)
    assert header.split() == [name for name, _ in COLUMNS][: len(header.split())] and header.split()[0] == "round"
    assert len(row) == len(header) <= columns
    assert ("0.9431" in row) is (columns >= 60)


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1m" in "".join(shown(Terminal(), *a_round(VERSION)))
    monkeypatch.setenv("NO_COLOR", "1")
    failed = m.RoundFailed(round=1, reason="\x1b[31mred\x07")
    text = "".join(shown(Terminal(), failed))
    assert "\x1b[33m" not in text and "\\x1b[31mred\\x07" in text
    assert "\x1b" not in "".join(shown(io.StringIO(), *a_round(VERSION)))


def test_a_bar_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    pipe, terminal = io.StringIO(), Terminal()
    for stream in (pipe, terminal):
        with bar("uploading \x07", 10, is_bytes=True, stream=stream) as advance:
            advance(10)
    assert pipe.getvalue() == "" and "uploading \\x07" in terminal.getvalue()


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_600, "1 MB"), (1_234_567, "1.23 MB"), (10**20, "100000 PB")],
)
def test_bytes_are_short(num_bytes: int, text: str) -> None:
    assert sized(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.00 s"), (9.996, "10.00 s"), (99.9, "99.9 s"), (150, "2.5 min"), (7200, "2.0 h"), (864_000, "10.0 d")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert lasted(seconds) == text
