"""Which role each call of people needs: one table for both services, Control and Access.

Roles are nested: an operator may do what a viewer may, and an admin may do everything. docs/howto/access.md shows this
table, and a test compares the two. A call that is not in it is refused.
"""

from types import MappingProxyType
from typing import Final

from fanin.protos.errors import PermissionDenied
from fanin.protos.messages import Principal, PrincipalKind, Role

VIEWER: Final = Role.VIEWER
OPERATOR: Final = Role.OPERATOR
ADMIN: Final = Role.ADMIN
ROLE_OF: Final = MappingProxyType(
    {
        "Control/MissingChunks": OPERATOR,
        "Control/PutChunks": OPERATOR,
        "Control/GetChunk": VIEWER,
        "Control/CheckPlan": OPERATOR,
        "Control/PublishBundle": OPERATOR,
        "Control/PrepareRun": OPERATOR,
        "Control/StartRun": OPERATOR,
        "Control/PublishVersion": OPERATOR,
        "Control/ReclaimRun": OPERATOR,
        "Control/Command": OPERATOR,
        "Control/Prune": OPERATOR,
        "Control/ListRuns": VIEWER,
        "Control/GetRun": VIEWER,
        "Control/DescribeRun": VIEWER,
        "Control/GetVersion": VIEWER,
        "Control/AcceptedDevices": VIEWER,
        "Control/Evaluations": VIEWER,
        "Control/Watch": VIEWER,
        # For enrollment tokens. ``check_token_role`` refuses an operator who manages tokens of people.
        "Access/CreateToken": OPERATOR,
        "Access/ListTokens": OPERATOR,
        "Access/RotateToken": OPERATOR,
        "Access/RevokeToken": OPERATOR,
        "Access/ListDevices": VIEWER,
        "Access/GetDevice": VIEWER,
        "Access/ChangeDevice": OPERATOR,
        "Access/ListAudit": ADMIN,
        "Access/ListPopulations": VIEWER,
        "Access/ListLedger": VIEWER,
        "Access/ChargePopulation": ADMIN,
    }
)
"""The least role of each call."""
_RANK: Final = MappingProxyType({PrincipalKind.VIEWER: 1, PrincipalKind.OPERATOR: 2, PrincipalKind.ADMIN: 3})
_NEEDED: Final = MappingProxyType({Role.VIEWER: 1, Role.OPERATOR: 2, Role.ADMIN: 3})


def check_permission(principal: Principal, call: str) -> None:
    """Raise PermissionDenied unless a person may make a call, such as "Control/Command"."""
    least = ROLE_OF.get(call)
    if least is None or not has_role(principal, least):
        needed = "a role that this coordinator does not know" if least is None else f"the role {least.value}"
        raise _denied(principal, call.rpartition("/")[2], needed)


def check_token_role(principal: Principal, call: str, role: Role) -> None:
    """Raise PermissionDenied unless a person may manage tokens of a role."""
    if role is not Role.DEVICE and not has_role(principal, Role.ADMIN):
        raise _denied(principal, f"{call} of a token with the role {role.value}", "the role admin")


def has_role(principal: Principal, role: Role) -> bool:
    """Return whether a person has a role, or one above it."""
    return _RANK.get(principal.kind, 0) >= _NEEDED[role]


def _denied(principal: Principal, call: str, needed: str) -> PermissionDenied:
    return PermissionDenied(
        f"{call}: the token {principal.id} has the role {principal.kind.value}, expected {needed}; use another token "
        "(--token-file)",
        code="FN-1416",
    )
