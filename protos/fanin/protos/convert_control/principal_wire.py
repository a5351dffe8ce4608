"""Wire form of principals."""

from types import MappingProxyType
from typing import Final

from fanin.protos.errors import InvalidInput
from fanin.protos.messages import Principal, PrincipalKind
from fanin.v1 import control_pb2 as pb

_KINDS: Final = MappingProxyType(
    {
        PrincipalKind.DEVICE: pb.PRINCIPAL_KIND_DEVICE,
        PrincipalKind.OPERATOR: pb.PRINCIPAL_KIND_OPERATOR,
        PrincipalKind.RELAY: pb.PRINCIPAL_KIND_RELAY,
    }
)


def principal_to_proto(principal: Principal | None) -> pb.Principal | None:
    return None if principal is None else pb.Principal(kind=_KINDS[principal.kind], id=principal.id)


def principal_from_proto(message: pb.Principal) -> Principal:
    for kind, known in _KINDS.items():
        if known == message.kind:
            return Principal(kind=kind, id=message.id)
    raise InvalidInput(f"principal kind: got {message.kind}, expected one of {sorted(_KINDS.values())}")
