"""Principals: the authenticated callers of the coordinator, and the tokens by which people and new devices call it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final

from fanin.protos.errors import InvalidInput
from fanin.protos.names import check_name, check_secret, check_tags, check_text_line

TOKEN_ID_CHARS: Final = 12
"""Characters of a token's digest that name it in lists. 48 bits distinguish the tokens of a coordinator."""
MAX_TOKEN_NAME_CHARS: Final = 64
MAX_DEVICE_LABEL_CHARS: Final = 128
MAX_USES: Final = (1 << 31) - 1
MAX_LIFETIME_S: Final = 10 * 366 * 86_400.0
MAX_PAGE_TOKENS: Final = 200


class Role(Enum):
    """The calls that a token permits. Each role of a person permits those of the roles above it in this list."""

    DEVICE = "device"
    """Enrolling devices, and no other call."""
    VIEWER = "viewer"
    """Reading."""
    OPERATOR = "operator"
    """Commands, publications, devices and enrollment tokens."""
    ADMIN = "admin"
    """Tokens of people, and the audit log."""


class PrincipalKind(Enum):
    """What a principal is: a machine, or a person by the role of its token."""

    DEVICE = "device"
    OPERATOR = "operator"
    RELAY = "relay"
    VIEWER = "viewer"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """An authenticated caller. ``str`` returns its text form, such as "operator anna".

    Attributes:
        kind: What it is.
        id: A device's or relay's id; for a person the name of the token.
    """

    kind: PrincipalKind
    id: str

    def __post_init__(self) -> None:
        check_name("principal", self.id)

    def __str__(self) -> str:
        return f"{self.kind.value} {self.id}"

    @classmethod
    def parse(cls, text: str) -> "Principal":
        """Return the principal of a text form. Raises InvalidInput."""
        kind, _, name = text.partition(" ")
        for known in PrincipalKind:
            if known.value == kind:
                return cls(kind=known, id=name)
        raise InvalidInput(
            f"principal: got {text[:128]!r}, expected a kind such as operator, and an id", code="FN-0157"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """A request for a token, without its secret.

    Attributes:
        name: Names its bearer in the record.
        role: The calls that it permits.
        sha256: The digest of its secret.
        lifetime_s: Seconds until it expires; None: never.
        max_uses: Of an enrollment token: the number of devices that it enrolls; None: any number.
        label: Of an enrollment token: the label of these devices.
        tags: Of an enrollment token: the tags of these devices.
    """

    name: str
    role: Role
    sha256: str
    lifetime_s: float | None = None
    max_uses: int | None = None
    label: str = ""
    tags: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        check_token_name(self.name)
        check_secret("token", self.sha256)
        _check_lifetime(self.name, self.lifetime_s)
        if self.max_uses is not None and not 1 <= self.max_uses <= MAX_USES:
            raise InvalidInput(f"token {self.name}: got {self.max_uses} uses, expected 1 to {MAX_USES}", code="FN-1401")
        if self.role is not Role.DEVICE and (self.max_uses is not None or self.label or self.tags):
            raise InvalidInput(
                f"token {self.name}: got uses, a label or tags for the role {self.role.value}, expected them for "
                "enrollment tokens alone",
                code="FN-1401",
            )
        check_label_text("token", self.label)
        check_tags("token", self.tags)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRotation:
    """Another secret for a token.

    Attributes:
        name: The name of the token.
        sha256: The digest of the new secret.
        lifetime_s: Seconds until the token expires; None: as before.
    """

    name: str
    sha256: str
    lifetime_s: float | None = None

    def __post_init__(self) -> None:
        check_token_name(self.name)
        check_secret("token", self.sha256)
        _check_lifetime(self.name, self.lifetime_s)


def _check_lifetime(name: str, lifetime_s: float | None) -> None:
    if lifetime_s is not None and not 0.0 < lifetime_s <= MAX_LIFETIME_S:
        raise InvalidInput(
            f"token {name}: got a lifetime of {lifetime_s} s, expected more than 0 s and at most ten years",
            code="FN-1401",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInfo:
    """A token as its coordinator has recorded it, without its secret.

    Attributes:
        token_id: The beginning of the secret's digest.
        created_by: The principal that created it; "" for the first tokens.
        expires_at: When it expires, in seconds since the Unix epoch; None: never.
        revoked_at: When it was revoked; None: it was not.
        num_uses: The devices that enrolled with it.
    """

    name: str
    role: Role
    token_id: str
    created_at: float
    created_by: str = ""
    expires_at: float | None = None
    revoked_at: float | None = None
    max_uses: int | None = None
    num_uses: int = 0
    label: str = ""
    tags: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def fault(self, now_s: float) -> str:
        """Return why the token is refused now, for the log; "" if it is valid. The uses are not considered."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if now_s >= (math.inf if self.expires_at is None else self.expires_at) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPage:
    """A page of tokens. ``next`` is the name after which the next page begins; "": this is the last one."""

    tokens: tuple[TokenInfo, ...]
    next: str = ""


def check_token_name(name: str) -> None:
    """Raise InvalidInput unless ``name`` can name a token."""
    check_name("token", name)
    if len(name) > MAX_TOKEN_NAME_CHARS:
        raise InvalidInput(
            f"token: got a name of {len(name)} characters, expected at most {MAX_TOKEN_NAME_CHARS}", code="FN-0105"
        )


def check_label_text(what: str, label: str) -> None:
    """Raise InvalidInput unless ``label`` is "" or a short line of printable characters."""
    if label:
        check_text_line(f"{what}: label", label, MAX_DEVICE_LABEL_CHARS)
