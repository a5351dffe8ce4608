"""Every registered protocol: each (phase, event) pair of its table, and its diagram."""

from dataclasses import replace
from itertools import product
from typing import get_args

import pytest
from house.tree import ROOT
from support.protocols import protocols
from support.virtual import plan

from fanin.protos.errors import InvalidPlan
from fanin.protos.plans import RoundPlan
from fanin.protos.plans.named import installed
from fanin.server.protocols import events as e
from fanin.server.protocols import machine as r
from fanin.server.protocols.exchanging import exchanging
from fanin.server.protocols.known import GROUP, PROTOCOLS, protocol_of
from fanin.server.protocols.machine import Round, RoundProtocol, Rules, diagram
from fanin.server.protocols.phases import TRAINING, Phase, PhaseExchange

__all__ = ["protocols"]
PAGE = ROOT / "docs" / "explanation" / "rounds.md"
RULES = (
    Rules(concurrency=2, buffer=2, quorum=1, deadline_s=60.0, min_report_s=1.0, report_factor=2.0),
    Rules(concurrency=2, buffer=2, quorum=2, deadline_s=60.0),
)
EVENT_KINDS: tuple[type[e.Event], ...] = get_args(e.Event)
EVENTS: tuple[e.Event, ...] = (
    e.CheckedIn(device="a"),
    e.CheckedIn(device="b"),
    e.GaveUp(device="a"),
    e.Gone(devices=("a",)),
    e.UpdateCommitted(device="a"),
    e.UpdateCommitted(device="b"),
    e.MessageCommitted(device="a"),
    e.MessageCommitted(device="b"),
    e.RosterFrozen(devices=("a",)),
    e.RosterFrozen(devices=("a", "b")),
    e.TimePassed(),
    e.Closed(accepted=("a", "b")),
    e.ParametersStored(),
    e.Published(),
    e.Paused(),
    e.Resumed(),
    e.Broken(reason="damaged"),
    e.Failed(),
)
MAX_ROUNDS_OF_A_PHASE = 250


def registered() -> list[RoundProtocol]:
    """Return fanin's protocols and those of the installed packages."""
    names = [*PROTOCOLS, *installed(GROUP)]
    bounded = plan()
    bounded = replace(bounded, aggregation=replace(bounded.aggregation, max_examples=4096))
    return [protocol_of(replace(bounded, round=RoundPlan(protocol=name))) for name in names]


@pytest.mark.usefixtures("protocols")
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"round": RoundPlan(protocol="plian")}, "did you mean plain"),
        ({"round": RoundPlan(protocol="plain", options={"deadline_s": 1.0})}, "unknown option"),
        ({"round": RoundPlan(protocol="commit_reveal", options={"deadlin_s": 1.0})}, "did you mean deadline_s"),
        ({"cohort": replace(plan().cohort, buffer=3, quorum=3)}, "a buffer that equals the concurrency"),
        ({"aggregation": replace(plan().aggregation, max_staleness=1)}, "aggregation.max_staleness 1"),
        ({"round": RoundPlan(protocol="masked")}, "the masked sum of a Round could overflow"),
        (
            {
                "round": RoundPlan(protocol="masked"),
                "aggregation": replace(plan().aggregation, max_examples=4096),
                "codec": replace(plan().codec, max_shift=2),
            },
            "codec.max_shift: got 2",
        ),
    ],
)
def test_a_plan_that_the_protocol_cannot_serve_is_refused(changes: dict[str, object], text: str) -> None:
    whole = replace(plan(), **{"round": RoundPlan(protocol="commit_reveal")} | changes)
    with pytest.raises(InvalidPlan, match=text):
        protocol_of(whole)


def reachable(protocol: RoundProtocol) -> dict[Phase, set[Round]]:
    """Return Rounds in each phase that sequences of events reach: at most some of each phase."""
    begun = [protocol.begin(Round(protocol=protocol, rules=rules, phase=protocol.first), 0.0)[0] for rules in RULES]
    found: dict[Phase, set[Round]] = {}
    edge = begun
    while edge:
        fresh: list[Round] = []
        for state in edge:
            known = found.setdefault(state.phase, set())
            if len(known) < MAX_ROUNDS_OF_A_PHASE and state not in known:
                known.add(state)
                fresh.append(state)
        edge = [
            state.step(event, now)[0]
            for state, event, now in product(fresh, EVENTS, (0.0, 60.0))
            if (state.phase, type(event)) in protocol.rows and _is_possible(state, event)
        ]
    return found


def _is_possible(state: Round, event: e.Event) -> bool:
    """Return whether the record can have this fact: a set has the devices that the machine knows."""
    if isinstance(event, e.MessageCommitted | e.RosterFrozen) and state.working.accepts_updates:
        return False
    if isinstance(event, e.Closed):
        return all(device in event.accepted for device in state.cohort.accepted)
    if isinstance(event, e.MessageCommitted):
        return state.holds(event.device)
    return not isinstance(event, e.RosterFrozen) or all(device in event.devices for device in state.sent)


def _is_illegal(state: Round, event: e.Event, now: float) -> bool:
    # Not pytest.raises: it would take most of the time of this test.
    try:
        state.step(event, now)
    except r.IllegalEvent:
        return True
    return False


@pytest.mark.usefixtures("protocols")
@pytest.mark.parametrize("name", ["plain", "secagg", "commit_reveal", "witnessed", "masked"])
def test_each_pair_leads_to_a_target_of_the_table_or_is_illegal(name: str) -> None:
    by_name = {protocol.name: protocol for protocol in registered()}
    assert set(by_name) == {"plain", "secagg", "commit_reveal", "witnessed", "masked"}
    protocol = by_name[name]
    states = reachable(protocol)
    assert set(states) == set(protocol.phases.values())
    assert {type(event) for event in EVENTS} == set(EVENT_KINDS)
    targets: dict[tuple[Phase, type[e.Event]], set[Phase]] = {key: set() for key in protocol.rows}
    for phase, event, now in product(protocol.phases.values(), EVENTS, (0.0, 60.0)):
        for state in states[phase]:
            before, row = replace(state), protocol.rows.get((phase, type(event)))
            if row is None:
                assert _is_illegal(state, event, now)
            elif _is_possible(state, event):
                after, effects = state.step(event, now)
                targets[phase, type(event)].add(after.phase)
                assert after.phase in row.targets
                assert all(isinstance(effect, get_args(e.Effect)) for effect in effects)
                assert after.wake_at is None or not after.is_freezing
            assert state == before
    # An unreachable target would be a wrong arrow in the diagram.
    assert {key: row.targets for key, row in protocol.rows.items()} == targets


@pytest.mark.usefixtures("protocols")
def test_the_page_in_docs_has_the_diagrams() -> None:
    by_name = {protocol.name: protocol for protocol in registered()}
    for name in ("plain", "commit_reveal"):
        assert f"```mermaid\n{diagram(by_name[name])}```" in PAGE.read_text(), f"put the diagram of {name} into {PAGE}"


def gathering(name: str = "first", **flags: object) -> Phase:
    exchange = PhaseExchange(respond=lambda _facts, _device: b"")
    return Phase(**{"name": name, "assigns": True, "exchange": exchange} | flags)


def test_phases_in_a_wrong_place_are_no_protocol() -> None:
    first = gathering(gives_places=True)
    for before, after, training in (
        ((), (), TRAINING),
        ((gathering(),), (), TRAINING),
        ((first,), (gathering("later", gives_places=True),), TRAINING),
        ((first,), (), Phase(name="training", assigns=True)),
        ((first, gathering(exchange=None)), (), TRAINING),
        ((first, gathering("training")), (), TRAINING),
    ):
        with pytest.raises(ValueError, match="protocol wrong: "):
            exchanging("wrong", before, after, training=training)
