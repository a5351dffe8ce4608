"""Tokens of people and enrollment tokens, for those who manage them. A revocation ends the calls of the token."""

from dataclasses import dataclass
from functools import partial

from fanin.protos.messages import (
    NewToken,
    Principal,
    PrincipalKind,
    Role,
    TokenInfo,
    TokenPage,
    TokenRotation,
    check_token_name,
)
from fanin.server.access.permissions import check_token_role, has_role
from fanin.server.access.registry import Registry
from fanin.server.storage.access import refused_token
from fanin.server.storage.stores import Stores


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens. Every method raises PermissionDenied if ``by`` may not manage the token."""

    stores: Stores
    registry: Registry

    async def create(self, new: NewToken, by: Principal) -> TokenInfo:
        """Create a token. Raises Conflict if another one has the name or the secret."""
        check_token_role(by, "CreateToken", new.role)
        return await self.stores.tokens.create(new, by, self.stores.wall())

    async def page(self, after: str, by: Principal) -> TokenPage:
        """Return a page of the tokens that ``by`` may manage."""
        roles = tuple(Role) if has_role(by, Role.ADMIN) else (Role.DEVICE,)
        return await self.stores.tokens.token_page(after, roles)

    async def rotate(self, rotation: TokenRotation, by: Principal) -> TokenInfo:
        """Replace the secret of a token. Raises NotFound, Conflict."""
        await self._check(rotation.name, "RotateToken", by)
        token = await self.stores.tokens.rotate(rotation, by, self.stores.wall())
        self._end(token, "replaced")
        return token

    async def revoke(self, name: str, by: Principal) -> TokenInfo:
        """Revoke a token. Raises NotFound, Conflict."""
        await self._check(name, "RevokeToken", by)
        token = await self.stores.tokens.revoke(name, by, self.stores.wall())
        self._end(token, "revoked")
        return token

    async def _check(self, name: str, call: str, by: Principal) -> None:
        check_token_name(name)
        token = await self.stores.tokens.named(name)
        check_token_role(by, call, token.role)

    def _end(self, token: TokenInfo, fault: str) -> None:
        """End the calls of a person's token, except the one that changed it."""
        if token.role is not Role.DEVICE:
            person = Principal(kind=PrincipalKind(token.role.value), id=token.name)
            self.registry.calls.end(person, partial(refused_token, f"control: the token {token.name}", fault))
