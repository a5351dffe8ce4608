"""``LimitedLog``: the first lines of each kind in a minute, then the number of suppressed lines."""

import asyncio
import logging

import pytest

from fanin.server.access.limited_log import MAX_LINES, WINDOW_S, LimitedLog, limit_loop_errors
from fanin.simulation import run_virtual

LOG = logging.getLogger("test.refused")


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the logged messages."""
    return [record.getMessage() for record in caplog.records]


def test_a_flood_of_refused_calls_is_a_few_lines_and_a_number(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def main() -> None:
        limited_log = LimitedLog(LOG)
        for number in range(1000):
            limited_log.log("Unauthenticated", f"call {number}")
        limited_log.log("NotFound", "another kind")
        await asyncio.sleep(WINDOW_S + 1.0)

    run_virtual(main())
    assert messages(caplog) == [
        *(f"call {number}" for number in range(MAX_LINES)),
        "another kind",
        f"Unauthenticated: {1000 - MAX_LINES} more refused calls within 60 s",
    ]


def test_each_window_starts_a_new_count_and_is_silent_if_nothing_was_hidden(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def main() -> None:
        limited_log = LimitedLog(LOG)
        for number in range(3):
            limited_log.log("NotFound", f"call {number}")
            await asyncio.sleep(WINDOW_S + 1.0)

    run_virtual(main())
    assert messages(caplog) == ["call 0", "call 1", "call 2"]


def test_a_failure_is_one_traceback_for_each_cause(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    def read() -> None:
        raise IsADirectoryError(21, "Is a directory", "/srv/blobs/39")

    def divide() -> None:
        raise ZeroDivisionError

    async def main() -> None:
        limited_log = LimitedLog(LOG, max_lines=1, what="failed calls")
        for number in range(1000):
            for fail in (read, divide):
                try:
                    fail()
                except (OSError, ZeroDivisionError):
                    limited_log.exception(f"call {number}")
        await asyncio.sleep(WINDOW_S + 1.0)

    run_virtual(main())
    traces = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert traces == [IsADirectoryError, ZeroDivisionError]
    assert len(caplog.records) == 4
    assert all("999 more failed calls within 60 s" in text for text in messages(caplog)[2:])


def test_an_error_of_the_event_loop_is_logged_once_a_minute_for_each_kind(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        limit_loop_errors(loop)
        for _ in range(50):
            for error in (OSError(24, "Too many open files"), ValueError("other")):
                loop.call_exception_handler({"message": "socket.accept() out of system resource", "exception": error})

    asyncio.run(run())
    assert caplog.text.count("out of system resource") == 2
