"""The standing of devices: growing pauses, who is selected last, and the size of the table."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanin.server.selection.standing import FIRST_LAST_S, MAX_LAST_S, Standing


@pytest.mark.parametrize(("deadline_s", "longest_s"), [(60.0, 60.0), (1e6, 300.0)])
def test_a_device_that_gives_up_again_and_again_pauses_longer(deadline_s: float, longest_s: float) -> None:
    """If its data do not fit, it would otherwise take and give up a place every few seconds."""
    standing, now, pauses = Standing(deadline_s), 0.0, []
    for _ in range(9):
        standing.give_up("a", now)
        pauses.append(standing.returns_at("a") - now)
        now += pauses[-1]
    assert pauses == [min(pause_s, longest_s) for pause_s in (0, 0, 10, 20, 40, 80, 160, 320, 640)]


def test_the_first_refused_update_costs_a_pause_and_the_next_ones_more() -> None:
    standing = Standing(600.0)
    for pause_s in (10.0, 20.0, 40.0):
        standing.refuse("a", 100.0)
        assert standing.returns_at("a") == 100.0 + pause_s
    assert (standing.returns_at("b"), standing.is_last("b", 100.0)) == (-math.inf, False)


def test_a_device_that_missed_a_deadline_is_last_for_a_while_and_does_not_pause() -> None:
    standing = Standing(600.0)
    standing.miss("a", 0.0)
    assert standing.returns_at("a") <= 0.0
    assert standing.is_last("a", FIRST_LAST_S - 1.0) and not standing.is_last("a", FIRST_LAST_S)
    standing.miss("a", 1000.0)
    assert standing.is_last("a", 1000.0 + 2 * FIRST_LAST_S - 1.0)
    for _ in range(50):
        standing.miss("a", 0.0)
    assert not standing.is_last("a", MAX_LAST_S)


def test_a_slow_device_is_last_only_after_it_was_late_three_times_in_a_row() -> None:
    standing = Standing(600.0)
    for expected in (False, False, True):
        standing.be_late("a", 0.0)
        assert standing.is_last("a", 1.0) == expected


def test_an_accepted_update_clears_a_device() -> None:
    standing = Standing(600.0)
    for _ in range(5):
        standing.refuse("a", 0.0)
    standing.clear("a")
    assert (standing.returns_at("a"), standing.is_last("a", 0.0)) == (-math.inf, False)
    standing.refuse("a", 0.0)
    assert standing.returns_at("a") == 10.0


@given(st.lists(st.integers(0, 9), max_size=40))
def test_the_table_forgets_the_device_whose_last_fault_is_longest_ago(faulty: list[int]) -> None:
    standing = Standing(600.0, max_devices=3)
    for device in faulty:
        standing.refuse(str(device), 0.0)
    newest = list(dict.fromkeys(reversed(faulty)))[:3]
    assert [device for device in range(10) if standing.is_last(str(device), 1.0)] == sorted(newest)
