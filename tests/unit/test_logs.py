"""The log on standard error: text from a peer can neither forge a record nor control the terminal."""

import logging
import sys

import pytest

from fanin.commands.console.streams import OneLineFormatter, printable
from fanin.protos.errors import InvalidPlan

FORMATTER = OneLineFormatter("%(levelname)s %(name)s: %(message)s")
FORGED = "bad\n2026-01-01 INFO fanin.server: all is well\r\x1b[2J\u202e\x00"


def record(message: str, *arguments: object, traceback: bool = False) -> logging.LogRecord:
    """Return a log record with this message."""
    info = sys.exc_info() if traceback else None
    return logging.LogRecord("peer", logging.INFO, "file.py", 1, message, arguments, info)


def test_a_record_is_one_line_for_any_text_of_a_peer() -> None:
    text = FORMATTER.format(record("call: %s", FORGED))
    assert text == r"INFO peer: call: bad\n2026-01-01 INFO fanin.server: all is well\r\x1b[2J\u202e\x00"


def test_a_record_ends_with_the_code_of_its_error() -> None:
    error = InvalidPlan("got 0", code="FN-0201")
    assert FORMATTER.format(record("run %s: %s", "r", error)) == "INFO peer: run r: got 0 [FN-0201]"
    try:
        raise error
    except InvalidPlan:
        assert FORMATTER.format(record("run", traceback=True)).startswith("INFO peer: run [FN-0201]\n    Traceback")


def test_printable_text_of_any_language_stays() -> None:
    text = "a round: 3 Geräte, 三台设备 (ok) \\n"
    assert FORMATTER.format(record("%s", text)) == f"INFO peer: {text}"


def test_a_traceback_is_indented_so_that_no_line_of_it_passes_for_a_record() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        first, *lines = FORMATTER.format(record("unexpected", traceback=True)).split("\n")
    assert first == "INFO peer: unexpected"
    assert lines[0] == "    Traceback (most recent call last):"
    assert lines[-1] == r"    2026-01-01 INFO fanin.server: all is well\r\x1b[2J\u202e\x00"
    assert all(line.startswith("    ") and line.isprintable() for line in lines)


@pytest.mark.parametrize("text", ["", "plain", FORGED, "\ud800", "\u2028"])
def test_printable_text_stays_and_other_characters_are_escaped(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
