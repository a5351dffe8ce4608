"""Principals: the authenticated callers of the coordinator."""

from dataclasses import dataclass
from enum import Enum

from fanin.protos.errors import InvalidInput
from fanin.protos.names import check_name


class PrincipalKind(Enum):
    """The role of a principal."""

    DEVICE = "device"
    OPERATOR = "operator"
    RELAY = "relay"


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """An authenticated caller. ``str`` returns its text form, such as "operator 3fa9c01b2d4e".

    Attributes:
        kind: Its role.
        id: A device's or relay's id; for an operator the first characters of the digest of its token.
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
