"""The audit log: rows that are only appended, in the transaction of the change that they record where there is one."""

from collections.abc import Iterable
from typing import Final

from sqlalchemy import Connection, Engine, Row, func, insert, select

from fanin.protos.messages import MAX_PAGE_AUDIT, NO_DIGEST, AuditEntry, AuditPage
from fanin.server.storage.access import next_entry
from fanin.server.storage.records import AuditFact
from fanin.server.storage.sqlite import schema
from fanin.server.storage.sqlite.engine import writing

_COLUMNS: Final = tuple(column.name for column in schema.audit.columns)


class SqliteAudit:
    """The audit log."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def append(self, fact: AuditFact, now_s: float) -> None:
        """See ``AuditStore.append``."""
        with writing(self._engine) as connection:
            append_audit(connection, [fact], now_s)

    def audit_page(self, from_sequence: int) -> AuditPage:
        """See ``AuditStore.audit_page``."""
        table = schema.audit
        query = select(table).where(table.c.sequence >= from_sequence).order_by(table.c.sequence).limit(MAX_PAGE_AUDIT)
        with self._engine.begin() as connection:
            newest = _newest(connection)
            # Counted, not taken from the newest row: of a log that was cut, the count is what is there.
            num_entries = connection.execute(select(func.count()).select_from(table)).scalar_one()
            entries = tuple(map(_entry, connection.execute(query)))
        head = NO_DIGEST if newest is None else newest.digest
        return AuditPage(entries=entries, num_entries=num_entries, head=head)


def append_audit(connection: Connection, facts: Iterable[AuditFact], now_s: float) -> None:
    """Append entries in the transaction of a change."""
    newest, rows = _newest(connection), []
    for fact in facts:
        newest = next_entry(newest, fact, now_s)
        # Not asdict, which takes longer than the digest: many devices may enroll at once.
        rows.append({name: getattr(newest, name) for name in _COLUMNS})
    if rows:
        connection.execute(insert(schema.audit), rows)


def _newest(connection: Connection) -> AuditEntry | None:
    table = schema.audit
    row = connection.execute(select(table).order_by(table.c.sequence.desc()).limit(1)).first()
    return None if row is None else _entry(row)


def _entry(row: Row[tuple[object, ...]]) -> AuditEntry:
    return AuditEntry(**row._mapping)
