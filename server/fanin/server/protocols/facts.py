"""The facts about the messages of a Round, from its record."""

from collections import defaultdict
from collections.abc import Iterable

from fanin.edge.basis import RoundBasis
from fanin.edge.rings import Adjustment
from fanin.protos.messages import Assignment, BundleRef, StageState, Version
from fanin.protos.plans import Plan
from fanin.server.protocols.machine import RoundProtocol
from fanin.server.protocols.phases import RoundFacts
from fanin.server.storage.records import Roster, RoundMessage, RoundRecord


def common_work(plan: Plan, record: RoundRecord, base: Version, bundle: BundleRef, lineage: int) -> Assignment:
    """Return what the Assignments of a Round with messages have in common, without statistics and privacy terms.

    Under masks, no device measures ranges.

    Args:
        plan: The Plan of the Run.
        record: The Round.
        base: The Version that devices train from.
        bundle: The Bundle of the Run.
        lineage: The Version with which the Round's lineage starts.
    """
    return Assignment(
        assignment_id="common",
        run_id=record.run_id,
        round=record.round,
        bundle=bundle,
        version=base,
        grid=record.grid,
        codec=plan.codec,
        training=plan.training_in(record.round),
        stages=plan.stages,
        flower=plan.flower_in(record.round),
        round_protocol=plan.round,
        state=StageState(lineage=lineage),
        max_devices=plan.cohort.concurrency,
    )


def facts_of(
    protocol: RoundProtocol,
    basis: RoundBasis,
    record: RoundRecord,
    rosters: Iterable[Roster],
    messages: Iterable[RoundMessage],
) -> RoundFacts:
    """Return the facts of a Round. Messages without a roster are left out: more of them may come.

    Args:
        protocol: The protocol of the Round.
        basis: The facts on which coordinator and devices agreed before.
        record: The Round. Its closed set is the roster of the phase that accepts Updates.
        rosters: The recorded rosters.
        messages: The recorded messages.
    """
    named = {roster.phase: roster.devices for roster in rosters}
    by_phase: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
    for message in messages:
        if message.phase in named:
            by_phase[message.phase][message.device_id] = message.payload
    if record.accepted:
        named |= {name: record.accepted for name, phase in protocol.phases.items() if phase.accepts_updates}
    return RoundFacts(basis=basis, rosters=named, messages=dict(by_phase))


def adjustment_of(protocol: RoundProtocol, facts: RoundFacts, denominator: int | None = None) -> Adjustment | None:
    """Return what a protocol adds to the sum of the closed set; None for the sum as it is.

    Args:
        protocol: The protocol of the Round.
        facts: Its facts.
        denominator: The number by which the mean divides; None: by the weights.
    """
    if protocol.ring is None and protocol.correct is None:
        return None
    correction = None if protocol.correct is None else protocol.correct(facts)
    tail = tuple(statistic.name for statistic in facts.basis.statistics) if protocol.is_masked else ()
    return Adjustment(ring=protocol.ring, correction=correction, tail=tail, denominator=denominator)
