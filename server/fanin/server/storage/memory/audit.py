"""The audit log in memory."""

from fanin.protos.messages import MAX_PAGE_AUDIT, NO_DIGEST, AuditEntry, AuditPage
from fanin.server.storage.access import next_entry
from fanin.server.storage.records import AuditFact


class MemoryAudit:
    """``AuditStore`` in memory."""

    def __init__(self) -> None:
        self._entries: list[AuditEntry] = []

    def add(self, fact: AuditFact, now_s: float) -> None:
        """Append an entry, in the transaction of a change."""
        self._entries.append(next_entry(self._entries[-1] if self._entries else None, fact, now_s))

    async def append(self, fact: AuditFact, now_s: float) -> None:
        """See ``AuditStore.append``."""
        self.add(fact, now_s)

    async def audit_page(self, from_sequence: int) -> AuditPage:
        """See ``AuditStore.audit_page``."""
        start = max(from_sequence - 1, 0)
        page = tuple(self._entries[start : start + MAX_PAGE_AUDIT])
        head = self._entries[-1].digest if self._entries else NO_DIGEST
        return AuditPage(entries=page, num_entries=len(self._entries), head=head)
