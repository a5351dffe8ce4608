"""The number of entries of the audit log by their kind, followed entry by entry when it is read."""

from collections import Counter
from types import MappingProxyType
from typing import Final

from fanin.protos.errors import Corrupted
from fanin.server.storage.protocols.tokens import AuditStore

KINDS: Final = MappingProxyType(
    {
        **dict.fromkeys(("Command", "PrepareRun", "StartRun", "ReclaimRun", "Prune"), "run"),
        **dict.fromkeys(("PublishBundle", "PublishVersion"), "publication"),
        **dict.fromkeys(("CreateToken", "RotateToken", "RevokeToken"), "token"),
        "ChangeDevice": "device",
        "Enroll": "enrollment",
        "Start": "process",
        "Stop": "process",
    }
)
"""The kind of each call that is recorded. Others are of the kind ``other``."""
MAX_PAGES: Final = 20
"""Pages of a scrape. Ten thousand devices may enroll between two; the rest is counted by the next one."""


class AuditCounts:
    """Counts the entries since the first scrape. A change with two entries counts once, by its outcome."""

    def __init__(self, store: AuditStore) -> None:
        self._store = store
        self._next = 0
        self.entries: Counter[str] = Counter(dict.fromkeys((*KINDS.values(), "other"), 0))

    async def read(self) -> None:
        """Add the entries since the last scrape. A damaged log is no news here: ``fanin audit verify`` reports it."""
        try:
            if not self._next:
                self._next = (await self._store.audit_page(1)).num_entries + 1
            for _ in range(MAX_PAGES):
                entries = (await self._store.audit_page(self._next)).entries
                if not entries:
                    break
                self._next = entries[-1].sequence + 1
                self.entries.update(KINDS.get(entry.call, "other") for entry in entries if entry.outcome != "begun")
        except Corrupted:
            pass
