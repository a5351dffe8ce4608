"""The protocol that a Plan names.

``round.protocol`` is ``plain``, or the entry point of another distribution in the group ``fanin.round_protocols``. An
entry is a factory: a function of the Plan, whose other parameters are the options. It raises InvalidPlan for a Plan
that the protocol cannot serve, so that no Run begins with it.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from fanin.protos.errors import InvalidPlan
from fanin.protos.plans import PLAIN_PROTOCOL, SECAGG_PROTOCOL, Plan
from fanin.protos.plans.named import Choice, created, wrong_object
from fanin.server.protocols.machine import RoundProtocol
from fanin.server.protocols.plain import PLAIN
from fanin.server.protocols.requirements import check_masks, check_rosters
from fanin.server.protocols.secagg import secagg

GROUP: Final = "fanin.round_protocols"
"""The entry point group of protocols in other distributions. An entry is a factory of a ``RoundProtocol``."""
PROTOCOLS: Final[Mapping[str, Callable[..., RoundProtocol]]] = MappingProxyType(
    {PLAIN_PROTOCOL: lambda _plan: PLAIN, SECAGG_PROTOCOL: secagg}
)
"""The factories of fanin, by name."""


def protocol_of(plan: Plan, protocols: Mapping[str, Callable[..., RoundProtocol]] = PROTOCOLS) -> RoundProtocol:
    """Return the protocol that a Plan names: of one of ``protocols``, or an installed one.

    Raises:
        InvalidPlan: Nothing has this name, an option is wrong, or the protocol cannot serve the Plan.
    """
    spec = plan.round
    choice = Choice(key="round.protocol", name=spec.protocol, options_key="round.options", options=spec.options)

    def checked(protocol: RoundProtocol, where: str) -> RoundProtocol:
        if not isinstance(protocol, RoundProtocol):
            raise wrong_object(where, protocol, "a RoundProtocol")
        if protocol.name != spec.protocol:
            raise InvalidPlan(
                f"{where}: got a protocol with the name {protocol.name!r}, expected {spec.protocol!r}; correct that "
                "package",
                code="FN-0214",
            )
        return protocol

    protocol = created(choice, protocols, GROUP, plan, checked=checked)
    if not protocol.first.accepts_updates:
        check_rosters(plan)
    if protocol.is_masked:
        check_masks(plan)
    return protocol
