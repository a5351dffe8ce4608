"""The audit log."""

from typing import Protocol

from fanin.protos.messages import AuditPage
from fanin.server.storage.records import AuditFact


class AuditStore(Protocol):
    """The audit log. Entries are only appended."""

    async def append(self, fact: AuditFact, now_s: float) -> None:
        """Append an entry, chained to the newest one."""
        ...

    async def audit_page(self, from_sequence: int) -> AuditPage:
        """Return entries from a number on, at most ``MAX_PAGE_AUDIT``, with the number of all and the head."""
        ...
