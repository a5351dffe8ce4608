"""The protocol that a Plan names.

``round.protocol`` is ``plain``, or the entry point of another distribution in the group ``fanin.round_protocols``. An
entry is a factory: a function of the Plan, whose other parameters are the options. It raises InvalidPlan for a Plan
that the protocol cannot serve, so that no Run begins with it.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from fanin.edge.rings import Ring, smallest_ring
from fanin.protos.errors import InvalidPlan
from fanin.protos.plans import DEVICES, PLAIN_PROTOCOL, Plan
from fanin.protos.plans.named import Choice, created, wrong_object
from fanin.server.protocols.machine import RoundProtocol
from fanin.server.protocols.plain import PLAIN

GROUP: Final = "fanin.round_protocols"
"""The entry point group of protocols in other distributions. An entry is a factory of a ``RoundProtocol``."""
PROTOCOLS: Final[Mapping[str, Callable[..., RoundProtocol]]] = MappingProxyType({PLAIN_PROTOCOL: lambda _plan: PLAIN})
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
        _check_rosters(plan)
    if protocol.tail:
        _check_masks(plan)
    return protocol


def ring_of(plan: Plan) -> Ring:
    """Return the smallest ring that is proven to hold the sum of each Round of a Plan, if devices apply the weights.

    A Round has at most ``cohort.buffer`` Updates, whose weights are at most ``aggregation.max_examples`` each.

    Raises:
        InvalidPlan: No ring of 64 bits holds it.
    """
    try:
        return smallest_ring(plan.codec.bits, plan.cohort.buffer * plan.max_examples)
    except ValueError as exc:
        raise InvalidPlan(
            f"plan: the masked sum of a Round could overflow ({exc}): {plan.codec.bits} bits of {plan.codec.name}, "
            f"cohort.buffer {plan.cohort.buffer} and a weight of at most {plan.max_examples}; set or lower "
            "aggregation.max_examples",
            code="FN-1601",
        ) from exc


def _check_rosters(plan: Plan) -> None:
    cohort, staleness = plan.cohort, plan.aggregation.max_staleness
    if cohort.buffer < cohort.concurrency or staleness:
        raise InvalidPlan(
            f"plan: round.protocol: got {plan.round.protocol!r} with cohort.buffer {cohort.buffer}, cohort.concurrency "
            f"{cohort.concurrency} and aggregation.max_staleness {staleness}, expected a buffer that equals the "
            "concurrency, and 0: its Rounds know their devices before the training; change these keys",
            code="FN-1601",
        )


def _check_masks(plan: Plan) -> None:
    """Raise InvalidPlan if a key needs to see an Update that is masked."""
    clear = {
        "codec.max_shift": plan.codec.max_shift,
        "int8.ranges": plan.int8.ranges if plan.int8.ranges == DEVICES else "",
        "participants.min_examples": plan.participants.min_examples,
    }
    for key, value in clear.items():
        if value:
            raise InvalidPlan(
                f"plan: {key}: got {value!r} with round.protocol {plan.round.protocol!r}, expected none: the "
                "coordinator sees the sum of the Updates alone; remove the key",
                code="FN-1601",
            )
