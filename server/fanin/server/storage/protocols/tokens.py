"""Tokens of people and enrollment tokens, as administrators manage them, and the audit log.

``DeviceDirectory`` checks the tokens of calls.
"""

from collections.abc import Collection
from typing import Protocol

from fanin.protos.messages import AuditPage, NewToken, Principal, Role, TokenInfo, TokenPage, TokenRotation
from fanin.server.storage.records import AuditFact


class TokenStore(Protocol):
    """Tokens. Each change and its entry in the audit log are one transaction. A repeated change changes nothing."""

    async def named(self, name: str) -> TokenInfo:
        """Return the token of a name. Raises NotFound."""
        ...

    async def token_page(self, after: str, roles: Collection[Role]) -> TokenPage:
        """Return tokens of these roles whose names follow ``after``, in the order of their names."""
        ...

    async def create(self, new: NewToken, by: Principal | None, now_s: float) -> TokenInfo:
        """Record a token. Raises Conflict if another token has its name or its digest."""
        ...

    async def rotate(self, rotation: TokenRotation, by: Principal | None, now_s: float) -> TokenInfo:
        """Replace the digest of a token, and its lifetime if the rotation has one.

        Raises:
            NotFound: No token has the name.
            Conflict: It is revoked, or expired and gets no other lifetime. Or another token has the digest.
        """
        ...

    async def revoke(self, name: str, by: Principal | None, now_s: float) -> TokenInfo:
        """Revoke a token.

        Raises:
            NotFound: No token has the name.
            Conflict: It is the last valid one with the role admin.
        """
        ...


class AuditStore(Protocol):
    """The audit log. Entries are only appended."""

    async def append(self, fact: AuditFact, now_s: float) -> None:
        """Append an entry, chained to the newest one."""
        ...

    async def audit_page(self, from_sequence: int) -> AuditPage:
        """Return entries from a number on, at most ``MAX_PAGE_AUDIT``, with the number of all and the head."""
        ...
