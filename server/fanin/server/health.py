"""The health of a coordinator: it serves while its state can be written.

A write is tried every few seconds, because health must also return when a load balancer sends no calls any more. An
error of a call changes nothing here: the next try finds its cause, or finds that it is gone.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from fanin.protos.errors import FaninError

LOG = logging.getLogger("fanin.server.health")
CHECK_S: Final = 5.0
"""Seconds between two tries: less than load balancers usually wait, and one synced write costs some milliseconds."""
RECHECK_S: Final = 1.0
"""Seconds until the next try after a failed one."""


class Readiness:
    """Why a coordinator cannot serve now; an empty text if it can.

    It is read without a try to write: a peer without a credential may ask for it as often as it likes.
    """

    def __init__(self) -> None:
        self.problem = "the coordinator starts: its Runs are being recovered"


class HealthReport(Protocol):
    """Publishes whether a coordinator serves."""

    async def __call__(self, *, is_serving: bool) -> None:
        """Publish it."""
        ...


async def watch_storage(
    check: Callable[[], Awaitable[None]], report: HealthReport, readiness: Readiness, check_s: float = CHECK_S
) -> None:
    """Report at each change whether the state can be written, until cancelled. It could be when this begins.

    Args:
        check: Tries a write and raises its error.
        report: Publishes the result.
        readiness: Receives the problem of the last try.
        check_s: Seconds between two tries.
    """
    problem = readiness.problem = ""
    while True:
        await asyncio.sleep(min(check_s, RECHECK_S) if problem else check_s)
        before, problem = problem, await _problem(check)
        readiness.problem = problem
        if problem and problem != before:
            LOG.error("the coordinator cannot write its state, and reports NOT_SERVING: %s", problem)
        elif before and not problem:
            LOG.info("the coordinator can write its state again, and reports SERVING")
        if bool(problem) != bool(before):
            await report(is_serving=not problem)


async def _problem(check: Callable[[], Awaitable[None]]) -> str:
    try:
        await check()
    except (FaninError, OSError) as exc:
        return str(exc)
    except Exception as exc:  # Any error: without the next try, the last report would stay for ever.
        LOG.exception("the try to write failed with an unexpected error")
        return f"unexpected error ({type(exc).__name__})"
    return ""
