"""The contracts of the stores of tokens and of the audit log."""

from collections.abc import Awaitable
from dataclasses import replace
from typing import Final

from fanin.protos.errors import Conflict, FaninError, NotFound
from fanin.protos.messages import AuditChain, NewToken, Role, TokenRotation
from fanin.server.storage.contracts.values import OPERATOR
from fanin.server.storage.protocols.tokens import AuditStore
from fanin.server.storage.records import AuditFact
from fanin.server.storage.stores import Stores

FIRST: Final = NewToken(name="anna", role=Role.ADMIN, sha256="a" * 64)
SECOND: Final = NewToken(name="ben", role=Role.VIEWER, sha256="b" * 64, lifetime_s=10.0)


async def check_tokens(stores: Stores) -> None:
    """Check the stores of tokens and of the audit log.

    Args:
        stores: Stores of one database without tokens of people.

    Raises:
        AssertionError: A store breaks the contract. The text says how.
    """
    tokens, find = stores.tokens, stores.devices.find_token
    before = (await stores.audit.audit_page(1)).num_entries
    await tokens.create(FIRST, None, 1.0)
    token = await tokens.create(SECOND, OPERATOR, 2.0)
    assert (token.expires_at, token.created_by) == (12.0, str(OPERATOR)), f"create: got {token}"
    assert await tokens.create(SECOND, OPERATOR, 3.0) == token, "create: a repeated call changes the token"
    for other in (
        NewToken(name="ben", role=Role.VIEWER, sha256="c" * 64),
        NewToken(name="carl", role=Role.VIEWER, sha256=SECOND.sha256),
    ):
        assert await _error(tokens.create(other, None, 4.0)) is Conflict, f"create: accepts {other.name} twice"
    page = await tokens.token_page("", (Role.ADMIN, Role.VIEWER))
    assert [each.name for each in page.tokens] == ["anna", "ben"], f"token_page: got {page.tokens}"
    assert (await tokens.token_page("anna", (Role.VIEWER,))).tokens == (token,), "token_page: ignores its arguments"
    await tokens.rotate(TokenRotation(name="ben", sha256="e" * 64), None, 5.0)
    assert (await tokens.rotate(TokenRotation(name="ben", sha256="e" * 64), None, 5.0)).token_id == "e" * 12, (
        "rotate: keeps the old secret"
    )
    assert find(SECOND.sha256) is None, "rotate: the old secret is still known"
    rotated = find("e" * 64)
    assert rotated is not None and rotated.name == "ben", "rotate: the new secret is unknown"
    assert await _error(tokens.rotate(TokenRotation(name="ben", sha256=FIRST.sha256), None, 6.0)) is Conflict, (
        "rotate: accepts a known secret"
    )
    expired = TokenRotation(name="ben", sha256="7" * 64)
    assert await _error(tokens.rotate(expired, None, 13.0)) is Conflict, (
        "rotate: replaces the secret of an expired token"
    )
    renewed = await tokens.rotate(replace(expired, lifetime_s=20.0), None, 13.0)
    again = find("7" * 64)
    assert renewed == again and again.expires_at == 33.0, f"rotate: got {again}, expected a longer lifetime"
    await tokens.revoke("ben", None, 7.0)
    revoked = find("7" * 64)
    assert revoked is not None and revoked.fault(7.0) == "revoked", "revoke: the token is valid"
    assert await _error(tokens.rotate(TokenRotation(name="ben", sha256="f" * 64), None, 8.0)) is Conflict, (
        "rotate: accepts a revoked token"
    )
    assert await _error(tokens.revoke("anna", None, 8.0)) is Conflict, "revoke: revokes the last admin"
    assert await _error(tokens.revoke("carl", None, 8.0)) is NotFound, "revoke: revokes an unknown token"
    await _check_audit(stores.audit, before)


async def _error(call: Awaitable[object]) -> type[FaninError] | None:
    try:
        await call
    except FaninError as exc:
        return type(exc)
    return None


async def _check_audit(audit: AuditStore, before: int) -> None:
    entries = (await audit.audit_page(before + 1)).entries
    calls = [entry.call for entry in entries]
    expected = ["CreateToken", "CreateToken", "RotateToken", "RotateToken", "RevokeToken"]
    assert calls == expected, f"audit_page: got {calls}, expected {expected}: each change once, and no refused one"
    await audit.append(AuditFact(principal="coordinator", call="Start", subject="\u00e4 <b>"), 9.0)
    chain = AuditChain()
    while len((page := await audit.audit_page(chain.num_entries + 1)).entries):
        chain.add(page.entries)
    newest = (chain.num_entries, chain.digest)
    assert newest == (page.num_entries, page.head), f"audit_page: got {page.num_entries} entries, expected {newest[0]}"
    assert chain.num_entries == before + len(expected) + 1, "append: the entry is missing"
