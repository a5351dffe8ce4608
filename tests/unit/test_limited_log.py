"""``LimitedLog``: the first lines of each kind in a minute, then the number of suppressed lines."""

import asyncio
import logging

import pytest

from fanin.clients.testing import run_virtual
from fanin.server.access.limited_log import MAX_LINES, WINDOW_S, LimitedLog

LOG = logging.getLogger("test.refused")


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the logged messages."""
    return [record.getMessage() for record in caplog.records]


def test_a_flood_of_refused_calls_is_a_few_lines_and_a_number(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def main() -> None:
        refused = LimitedLog(LOG)
        for number in range(1000):
            refused.log("Unauthenticated", f"call {number}")
        refused.log("NotFound", "another kind")
        await asyncio.sleep(WINDOW_S + 1.0)

    run_virtual(main())
    assert messages(caplog) == [
        *(f"call {number}" for number in range(MAX_LINES)),
        "another kind",
        f"Unauthenticated: {1000 - MAX_LINES} more refused calls within 60 s",
    ]


def test_each_window_begins_anew_and_is_silent_if_nothing_was_hidden(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def main() -> None:
        refused = LimitedLog(LOG)
        for number in range(3):
            refused.log("NotFound", f"call {number}")
            await asyncio.sleep(WINDOW_S + 1.0)

    run_virtual(main())
    assert messages(caplog) == ["call 0", "call 1", "call 2"]
