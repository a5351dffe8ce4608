"""Tokens by their digests, and the audit log. The record decides; reads of callers are answered from memory.

Rows of the audit log are only appended, in the transaction of the change that they record where there is one.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

from sqlalchemy import ColumnElement, Connection, Engine, Row, func, insert, select, update
from sqlalchemy.exc import DatabaseError

from fanin.protos.errors import Corrupted
from fanin.protos.messages import (
    MAX_PAGE_AUDIT,
    MAX_PAGE_TOKENS,
    NO_DIGEST,
    TOKEN_ID_CHARS,
    AuditEntry,
    AuditPage,
    NewToken,
    Principal,
    Role,
    TokenInfo,
    TokenPage,
    TokenRotation,
)
from fanin.server.storage.access import (
    check_new_token,
    check_revocation,
    check_token_change,
    check_use,
    next_entry,
    rotated,
    tags_of,
    tags_text,
    token_of,
)
from fanin.server.storage.records import AuditFact, by_name
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
        try:
            with self._engine.begin() as connection:
                newest = _newest(connection)
                # Counted, not taken from the newest row: of a log that was cut, the count is what is there.
                num_entries = connection.execute(select(func.count()).select_from(table)).scalar_one()
                entries = tuple(map(_entry, connection.execute(query)))
        except DatabaseError as exc:
            # A table that was dropped, or a text that is no UTF-8.
            raise _changed(f"cannot be read ({exc.orig})") from exc
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
    fields = dict(row._mapping)
    # SQLite keeps a value of any type in any column.
    for name, value in fields.items():
        if type(value) is not (int if name in ("sequence", "time_us") else str):
            raise _changed(f"{name} of entry {row.sequence} has a value of another type")
    return AuditEntry(**fields)


def _changed(problem: str) -> Corrupted:
    return Corrupted(f"audit log: {problem}; compare with a backup of fanin.db", code="FN-1410")


_TABLE = schema.tokens


class SqliteTokens:
    """Tokens. Writes go to the database first, then to memory."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        with engine.connect() as connection:
            rows = connection.execute(select(_TABLE)).all()
        self._by_sha256 = {row.sha256: _token(row) for row in rows}

    def find(self, sha256: str) -> TokenInfo | None:
        """See ``DeviceDirectory.find_token``."""
        return self._by_sha256.get(sha256)

    def named(self, name: str) -> TokenInfo:
        """See ``TokenStore.named``."""
        with self._engine.connect() as connection:
            return check_token_change(name, _find(connection, _TABLE.c.name == name))

    def token_page(self, after: str, roles: Collection[Role]) -> TokenPage:
        """See ``TokenStore.token_page``."""
        query = (
            select(_TABLE)
            .where(_TABLE.c.name > after, _TABLE.c.role.in_([role.value for role in roles]))
            .order_by(_TABLE.c.name)
            .limit(MAX_PAGE_TOKENS)
        )
        with self._engine.connect() as connection:
            tokens = tuple(map(_token, connection.execute(query)))
        return TokenPage(tokens=tokens, next=tokens[-1].name if len(tokens) == MAX_PAGE_TOKENS else "")

    def create(self, new: NewToken, by: Principal | None, now_s: float) -> TokenInfo:
        """See ``TokenStore.create``."""
        token = token_of(new, by, now_s)
        with writing(self._engine) as connection:
            same_name = _find(connection, _TABLE.c.name == new.name)
            if not check_new_token(new, same_name, _find(connection, _TABLE.c.sha256 == new.sha256)):
                assert same_name is not None, "a repeated request has created it"
                return same_name
            connection.execute(insert(_TABLE).values(_row(token, new.sha256)))
            _record(connection, "CreateToken", f"token {new.name}: {new.role.value}", by, now_s)
        self._by_sha256[new.sha256] = token
        return token

    def rotate(self, rotation: TokenRotation, by: Principal | None, now_s: float) -> TokenInfo:
        """See ``TokenStore.rotate``."""
        name, sha256 = rotation.name, rotation.sha256
        with writing(self._engine) as connection:
            token = check_token_change(name, _find(connection, _TABLE.c.name == name))
            after = rotated(token, rotation, _find(connection, _TABLE.c.sha256 == sha256), now_s)
            if after is None:
                return token
            before = _sha256(connection, name)
            connection.execute(
                update(_TABLE).where(_TABLE.c.name == name).values(sha256=sha256, expires_at=after.expires_at)
            )
            _record(connection, "RotateToken", f"token {name}", by, now_s)
        self._by_sha256[sha256] = after
        self._by_sha256.pop(before, None)
        return after

    def revoke(self, name: str, by: Principal | None, now_s: float) -> TokenInfo:
        """See ``TokenStore.revoke``."""
        with writing(self._engine) as connection:
            token = check_token_change(name, _find(connection, _TABLE.c.name == name))
            admins = connection.execute(select(_TABLE).where(_TABLE.c.role == Role.ADMIN.value, _TABLE.c.name != name))
            if not check_revocation(token, map(_token, admins), now_s):
                return token
            sha256 = _sha256(connection, name)
            connection.execute(update(_TABLE).where(_TABLE.c.name == name).values(revoked_at=now_s))
            _record(connection, "RevokeToken", f"token {name}", by, now_s)
        self._by_sha256[sha256] = revoked = replace(token, revoked_at=now_s)
        return revoked

    def use(self, connection: Connection, sha256: str, num_devices: int, now_s: float) -> TokenInfo:
        """Count the uses of an enrollment token in a transaction. ``refresh`` it after that. Raises Unauthenticated."""
        token = _find(connection, _TABLE.c.sha256 == sha256)
        for _ in range(num_devices):
            token = check_use(token, now_s)
            token = replace(token, num_uses=token.num_uses + 1)
        assert token is not None, "num_devices is at least 1"
        connection.execute(update(_TABLE).where(_TABLE.c.sha256 == sha256).values(num_uses=token.num_uses))
        return token

    def refresh(self, sha256: str, token: TokenInfo) -> None:
        """Take over a token whose uses were recorded."""
        self._by_sha256[sha256] = token


def _find(connection: Connection, condition: ColumnElement[bool]) -> TokenInfo | None:
    row = connection.execute(select(_TABLE).where(condition)).first()
    return None if row is None else _token(row)


def _sha256(connection: Connection, name: str) -> str:
    digest: str = connection.execute(select(_TABLE.c.sha256).where(_TABLE.c.name == name)).scalar_one()
    return digest


def _record(connection: Connection, call: str, subject: str, by: Principal | None, now_s: float) -> None:
    append_audit(connection, [AuditFact(principal=by_name(by), call=call, subject=subject)], now_s)


def _token(row: Row[tuple[object, ...]]) -> TokenInfo:
    fields = dict(row._mapping)
    digest = str(fields.pop("sha256"))
    tags = tags_of(fields.pop("tags"))
    return TokenInfo(**fields | {"role": Role(row.role), "token_id": digest[:TOKEN_ID_CHARS], "tags": tags})


def _row(token: TokenInfo, sha256: str) -> Mapping[str, object]:
    names = ("name", "created_at", "created_by", "expires_at", "revoked_at", "max_uses", "num_uses", "label")
    fields = {name: getattr(token, name) for name in names}
    return fields | {"sha256": sha256, "role": token.role.value, "tags": tags_text(token.tags)}
