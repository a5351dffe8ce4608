"""Tokens of people and enrollment tokens, as administrators manage them. ``DeviceDirectory`` checks those of calls."""

from collections.abc import Collection
from typing import Protocol

from fanin.protos.messages import NewToken, Principal, Role, TokenInfo, TokenPage, TokenRotation


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
