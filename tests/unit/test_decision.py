"""The decision about an Update, for all combinations of the facts."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from support.stored import OPEN, committed_update
from support.values import version

from fanin.protos.messages import RunState
from fanin.server.rounds.decision import Accepted, Discarded, Facts, Later, Receive, Undecided, decide
from fanin.server.rounds.recent import OpenedRound

ORIGIN = OpenedRound(record=replace(OPEN, round=3, base_version=2), base=version())
CURRENT = (None, ORIGIN.record, *(replace(OPEN, round=round_, base_version=base) for round_, base in ((4, 3), (6, 5))))
FLAGS = (False, True)


def all_facts() -> Iterator[Facts]:
    for state, max_staleness, lineage, current in product(RunState, (0, 1, 3), (0, 3), CURRENT):
        for origin, is_over, is_leaving, is_full in product((None, ORIGIN), FLAGS, FLAGS, FLAGS):
            if origin is None and current is ORIGIN.record:
                # The current Round is always remembered.
                continue
            yield Facts(
                state=state,
                max_staleness=max_staleness,
                lineage=lineage,
                current=current,
                origin=origin,
                is_over=is_over,
                is_leaving=is_leaving,
                is_full=is_full,
            )


def lag(facts: Facts) -> int:
    """Return the Versions between the bases of the two Rounds."""
    return 0 if facts.current is None else facts.current.base_version - ORIGIN.record.base_version


def is_fresh_enough(facts: Facts) -> bool:
    """Return whether the current Round, if there is one, counts Updates that were trained from the origin's base."""
    if facts.current is None or facts.current.round == ORIGIN.record.round:
        return True
    return 0 < lag(facts) <= facts.max_staleness and ORIGIN.record.base_version >= facts.lineage


def test_an_update_is_received_exactly_if_the_current_round_counts_it_and_has_a_place() -> None:
    for facts in all_facts():
        counts = facts.origin is not None and not facts.is_over and is_fresh_enough(facts)
        expected = counts and facts.current is not None and not facts.is_full
        assert isinstance(decide(facts), Receive) is expected, facts


def test_an_update_waits_only_if_a_later_round_may_count_it() -> None:
    for facts in all_facts():
        if isinstance(decision := decide(facts), Later | Undecided):
            assert facts.max_staleness and facts.origin is not None and not facts.is_over and is_fresh_enough(facts)
            assert facts.is_full if facts.current is not None else facts.state.is_live
            assert isinstance(decision, Undecided) is (facts.state is RunState.PAUSED or facts.is_leaving), facts


def test_every_other_update_is_discarded() -> None:
    decisions = [decide(facts) for facts in all_facts()]
    assert {type(decision) for decision in decisions} == {Receive, Later, Undecided, Discarded}
    assert all(decision == Discarded() for decision in decisions if isinstance(decision, Discarded))


@pytest.mark.parametrize("is_over", FLAGS)
def test_a_recorded_update_stays_accepted_whatever_happens_to_its_round(is_over: bool) -> None:
    recorded = committed_update("device")
    for facts in all_facts():
        facts = replace(facts, is_over=is_over)
        assert decide(replace(facts, recorded=recorded)) == Accepted(is_open=isinstance(decide(facts), Receive | Later))
