"""The audit log of a coordinator that serves: entries around a change, and its head in the log of the process.

A change that the store makes in one transaction with its entry needs nothing here: tokens, devices, enrollments. Any
other change gets two entries: ``begun`` before it and ``done`` or ``refused CODE`` after it. So a coordinator that is
killed in between loses no change without a record.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from fanin.protos.errors import FaninError
from fanin.protos.messages import COORDINATOR, NO_DIGEST, STOP_CALL, Principal
from fanin.server.storage.records import AuditFact
from fanin.server.storage.stores import Stores

LOG: Final = logging.getLogger("fanin.server.audit")
DAY_S: Final = 86_400.0


class AuditLog:
    """The audit log of a coordinator."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def around(self, by: Principal, call: str, subject: str) -> AsyncIterator[None]:
        """Record a change that is made within this context.

        Args:
            by: Who makes it.
            call: The name of the call.
            subject: What it is about.
        """
        await self.append(by, call, subject, "begun")
        try:
            yield
        except FaninError as exc:
            await self.append(by, call, subject, f"refused {exc.code}")
            raise
        except BaseException:
            # Whether the change was made is in the state of its subject.
            with suppress(FaninError, OSError):
                await asyncio.shield(self.append(by, call, subject, "interrupted"))
            raise
        await self.append(by, call, subject, "done")

    async def append(self, by: Principal, call: str, subject: str, outcome: str) -> None:
        """Append an entry. Raises the errors of a store."""
        fact = AuditFact(principal=str(by), call=call, subject=subject, outcome=outcome)
        await self._stores.audit.append(fact, self._stores.wall())

    async def start(self) -> None:
        """Record the start of the process, and print the head now and each day."""
        await self._mark("Start")
        self._task = asyncio.create_task(self._repeat(), name="audit")

    async def stop(self) -> None:
        """Record the end of the process, and print the head."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            await self._mark(STOP_CALL)

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(DAY_S)
            await self._print()

    async def _mark(self, call: str) -> None:
        try:
            fact = AuditFact(principal=COORDINATOR, call=call, subject=self._stores.holder)
            await self._stores.audit.append(fact, self._stores.wall())
        except (FaninError, OSError) as exc:
            LOG.warning("audit log: %s was not recorded: %s", call, exc)
        await self._print()

    async def _print(self) -> None:
        try:
            page = await self._stores.audit.audit_page(1)
        except (FaninError, OSError) as exc:
            LOG.warning("audit log: its head cannot be read: %s", exc)
            return
        if page.head != NO_DIGEST:
            LOG.info(
                "audit log: %d entries, head %s; keep it elsewhere for: fanin audit verify --head %s",
                *(page.num_entries, page.head, page.head),
            )
