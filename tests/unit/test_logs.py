"""The log on standard error: text from a peer can neither forge a record nor control the terminal."""

import json
import logging
import sys

import pytest

from fanin.commands.console.streams import JsonFormatter, OneLineFormatter, printable
from fanin.edge.scopes import LogScope, about_run, note_scope
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


def fields_of(line: logging.LogRecord) -> dict[str, object]:
    """Return the fields of a record in JSON, which is one line of ASCII."""
    text = JsonFormatter().format(line)
    assert text.isascii() and text.isprintable()
    fields = json.loads(text)
    assert isinstance(fields, dict)
    return fields


def test_a_json_line_has_the_subject_of_the_record_and_its_code() -> None:
    note_scope(LogScope())
    line = record("run %s: %s", "r", InvalidPlan("got 0", code="FN-0201"))
    line.created = 1_790_000_000.25
    assert fields_of(line) == {
        "time": "2026-09-21T14:13:20.250000Z",
        "level": "info",
        "logger": "peer",
        "message": "run r: got 0",
        "code": "FN-0201",
    }
    with ScopedRecords("peer") as lines:
        note_scope(LogScope(run="r", round=3, device="d"))
        logging.getLogger("peer").warning("about a device")
        about_run(logging.getLogger("peer"), "other").warning("about a run: %s", "x")
        note_scope(LogScope())
    assert [one.get("message") for one in lines] == ["about a device", "run other: about a run: x"]
    assert [(one.get("run"), one.get("round"), one.get("device")) for one in lines] == [
        *(("r", 3, "d"), ("other", None, None)),
    ]


class ScopedRecords:
    """The records of a logger as JSON fields."""

    def __init__(self, name: str) -> None:
        self._log, self._lines = logging.getLogger(name), list[dict[str, object]]()
        self._handler = logging.Handler()

    def __enter__(self) -> list[dict[str, object]]:
        self._handler.emit = lambda line: self._lines.append(fields_of(line))  # type: ignore[method-assign]
        self._log.addHandler(self._handler)
        return self._lines

    def __exit__(self, *_: object) -> None:
        self._log.removeHandler(self._handler)


def test_text_of_a_peer_is_escaped_in_json_too() -> None:
    message = fields_of(record("call: %s", FORGED))["message"]
    assert message == r"call: bad\n2026-01-01 INFO fanin.server: all is well\r\x1b[2J\u202e\x00"
    try:
        raise ValueError(FORGED)
    except ValueError:
        text = str(fields_of(record("unexpected", traceback=True))["exception"])
    assert text.startswith("Traceback (most recent call last):\n")
    assert "\x1b" not in text
