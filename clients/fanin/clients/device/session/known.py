"""The device's side of the protocol that an Assignment names: fanin's own, or one of another distribution.

An entry point in the group ``fanin.device_protocols`` adds one, under the name of the coordinator's protocol.
"""

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Final

from fanin.clients.device.session.protocols import DeviceProtocol
from fanin.clients.device.session.secagg import secagg
from fanin.edge.codecs.known import announced, installed_names
from fanin.edge.floors.floor import POLICY_CODES
from fanin.protos.errors import CODE, InvalidPlan
from fanin.protos.messages import MAX_CAPABILITIES, MAX_FAILURE_CHARS, Assignment
from fanin.protos.plans import PLAIN_PROTOCOL, SECAGG_PROTOCOL, RoundPlan
from fanin.protos.plans.named import Choice, created, wrong_object

GROUP: Final = "fanin.device_protocols"
"""The entry point group of protocols in other distributions. An entry is a factory of a ``DeviceProtocol``, whose
parameters are the options of the Plan."""
PROTOCOL_CODES: Final = "FN-16"
"""The codes of round protocols begin with these. Their texts are about messages and not about data."""
PLAIN: Final = DeviceProtocol(name=PLAIN_PROTOCOL)
PROTOCOLS: Final[Mapping[str, Callable[..., DeviceProtocol]]] = MappingProxyType(
    {PLAIN_PROTOCOL: lambda: PLAIN, SECAGG_PROTOCOL: secagg}
)
"""The factories of fanin, by name."""


def protocol_of(spec: RoundPlan) -> DeviceProtocol:
    """Return the protocol that an Assignment names.

    Raises:
        InvalidPlan: Nothing has this name here, or an option is wrong.
    """
    choice = Choice(key="round.protocol", name=spec.protocol, options_key="round.options", options=spec.options)

    def checked(protocol: DeviceProtocol, where: str) -> DeviceProtocol:
        if not isinstance(protocol, DeviceProtocol):
            raise wrong_object(where, protocol, "a DeviceProtocol")
        return protocol

    return created(choice, PROTOCOLS, GROUP, checked=checked)


@cache
def known_protocols() -> tuple[str, ...]:
    """Return the names of fanin's protocols without ``plain``, and of those that were installed at the first call."""
    return announced("round protocols", (SECAGG_PROTOCOL,), installed_names(GROUP), MAX_CAPABILITIES)


def reported_failure(assignment: Assignment, reason: str) -> str:
    """Return why a device gives an Assignment up, as it reports it.

    With masks or privacy, that is the code alone: the text of a training may depend on its data.
    """
    codes = CODE.findall(reason)
    code = codes[-1] if codes else "no code"
    if code in POLICY_CODES or code.startswith(PROTOCOL_CODES):
        return reason[:MAX_FAILURE_CHARS]
    try:
        return f"the device gave up [{code}]" if is_hidden(assignment) else reason[:MAX_FAILURE_CHARS]
    except InvalidPlan:
        # Nothing has the name of its protocol here.
        return reason[:MAX_FAILURE_CHARS]


def is_hidden(assignment: Assignment) -> bool:
    """Return whether nothing but an Update may show facts about the data: it is private, or masked."""
    return assignment.privacy is not None or protocol_of(assignment.round_protocol).mask is not None
