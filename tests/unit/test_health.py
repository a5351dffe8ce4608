"""The health of a coordinator: it is reported at each change of whether the state can be written."""

import asyncio
import errno
from contextlib import suppress

import pytest

from fanin.protos.errors import StorageFull, StorageUnavailable
from fanin.server.health import Readiness, watch_storage

LOCKED = StorageUnavailable("fanin.db: another process holds the database")


@pytest.mark.parametrize(
    ("errors", "reports", "lines"),
    [
        ([None, None], [], []),
        ([LOCKED, None], [False, True], ["another process holds", "can write its state again"]),
        ([LOCKED, LOCKED, None], [False, True], ["another process holds", "can write its state again"]),
        # Another cause is logged, and is no change of health.
        ([LOCKED, StorageFull("full")], [False], ["another process holds", "NOT_SERVING: full"]),
        ([OSError(errno.EIO, "Input/output error")], [False], ["Input/output error"]),
        ([ZeroDivisionError(), None], [False, True], ["unexpected error", "ZeroDivisionError", "again"]),
    ],
)
def test_each_change_is_reported_once(
    caplog: pytest.LogCaptureFixture, errors: list[Exception | None], reports: list[bool], lines: list[str]
) -> None:
    received: list[bool] = []
    left = list(errors)

    async def check() -> None:
        if not left:
            raise asyncio.CancelledError
        error = left.pop(0)
        if error is not None:
            raise error

    async def report(*, is_serving: bool) -> None:
        received.append(is_serving)

    caplog.set_level("INFO")
    with suppress(asyncio.CancelledError):
        asyncio.run(watch_storage(check, report, Readiness(), check_s=0.0))
    assert received == reports
    assert len(caplog.records) == len(lines)
    assert all(part in record.getMessage() for part, record in zip(lines, caplog.records, strict=True))
