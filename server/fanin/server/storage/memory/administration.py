"""Tokens by their digests, and the audit log."""

from collections.abc import Collection
from dataclasses import replace
from itertools import islice

from fanin.protos.messages import (
    MAX_PAGE_AUDIT,
    MAX_PAGE_TOKENS,
    NO_DIGEST,
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
    token_of,
)
from fanin.server.storage.records import AuditFact, by_name


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


class MemoryTokens:
    """``TokenStore`` in memory."""

    def __init__(self, audit: MemoryAudit) -> None:
        self._audit = audit
        self._tokens: dict[str, TokenInfo] = {}
        # By digest: the name.
        self._names: dict[str, str] = {}

    def find(self, sha256: str) -> TokenInfo | None:
        """See ``DeviceDirectory.find_token``."""
        name = self._names.get(sha256)
        return None if name is None else self._tokens[name]

    async def named(self, name: str) -> TokenInfo:
        """See ``TokenStore.named``."""
        return check_token_change(name, self._tokens.get(name))

    async def token_page(self, after: str, roles: Collection[Role]) -> TokenPage:
        """See ``TokenStore.token_page``."""
        names = (name for name, token in sorted(self._tokens.items()) if name > after and token.role in roles)
        tokens = tuple(self._tokens[name] for name in islice(names, MAX_PAGE_TOKENS))
        return TokenPage(tokens=tokens, next=tokens[-1].name if len(tokens) == MAX_PAGE_TOKENS else "")

    async def create(self, new: NewToken, by: Principal | None, now_s: float) -> TokenInfo:
        """See ``TokenStore.create``."""
        return self.add(new, by, now_s)

    def add(self, new: NewToken, by: Principal | None, now_s: float) -> TokenInfo:
        """Record a token at once."""
        if check_new_token(new, self._tokens.get(new.name), self.find(new.sha256)):
            self._tokens[new.name] = token_of(new, by, now_s)
            self._names[new.sha256] = new.name
            self._record("CreateToken", f"token {new.name}: {new.role.value}", by, now_s)
        return self._tokens[new.name]

    async def rotate(self, rotation: TokenRotation, by: Principal | None, now_s: float) -> TokenInfo:
        """See ``TokenStore.rotate``."""
        name, sha256 = rotation.name, rotation.sha256
        token = check_token_change(name, self._tokens.get(name))
        after = rotated(token, rotation, self.find(sha256), now_s)
        if after is not None:
            self._names = {digest: each for digest, each in self._names.items() if each != name} | {sha256: name}
            self._tokens[name] = after
            self._record("RotateToken", f"token {name}", by, now_s)
        return self._tokens[name]

    async def revoke(self, name: str, by: Principal | None, now_s: float) -> TokenInfo:
        """See ``TokenStore.revoke``."""
        token = check_token_change(name, self._tokens.get(name))
        others = (each for each in self._tokens.values() if each.name != name)
        if check_revocation(token, others, now_s):
            self._tokens[name] = replace(token, revoked_at=now_s)
            self._record("RevokeToken", f"token {name}", by, now_s)
        return self._tokens[name]

    def use(self, sha256: str, num_devices: int, now_s: float) -> TokenInfo | None:
        """Count the uses of an enrollment token, all or none of them. Raises Unauthenticated."""
        token = self.find(sha256)
        for _ in range(num_devices):
            token = check_use(token, now_s)
            token = replace(token, num_uses=token.num_uses + 1)
        if token is not None:
            self._tokens[token.name] = token
        return token

    def _record(self, call: str, subject: str, by: Principal | None, now_s: float) -> None:
        self._audit.add(AuditFact(principal=by_name(by), call=call, subject=subject), now_s)
