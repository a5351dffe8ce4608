"""Laws of the fold: an exact integer sum for any order, any cuts and any tree."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.folds import fresh
from support.laws import plans, tables

from fanin.edge.codecs.fixed import CODECS, Integers, decoded, largest_value, payload_bytes
from fanin.edge.codecs.grid import reach_column
from fanin.edge.tensors import TensorTable
from fanin.protos.messages import SATURATED
from fanin.protos.plans import CODEC_BITS, HEADROOM_BITS, LEAST_STEPS, Plan
from fanin.server.aggregation.fold import Contribution, PartialSum, accept, begin, finish, merge

INT64_MAX = (1 << 63) - 1
LIMIT = largest_value(32)


def contribution(table: TensorTable, rng: random.Random) -> Contribution:
    """Return any Update of a Plan with max_shift 8, in one piece. Some Updates are for an earlier grid."""
    values = np.array([rng.choice((rng.randint(-LIMIT, LIMIT), LIMIT, -LIMIT, 0)) for _ in range(table.num_values)])
    # Each group of a vector has its own weighting, so the weights of blocks may differ.
    fresh_weights = tuple(rng.randint(1, 1 << 20) for _ in table.specs)
    return Contribution(
        weights=tuple(rng.randint(1, weight) for weight in fresh_weights),
        fresh_weights=fresh_weights,
        shifts=tuple(rng.randint(*rng.choice(((0, 8), (-70, 70)))) for _ in table.specs),
        bits=32,
        max_shift=8,
        counts={"examples": rng.randint(1, 100), "loss": rng.randint(-100, 100)},
        pieces=(values.astype(np.int32),),
    )


def recut(update: Contribution, rng: random.Random) -> Contribution:
    """Return the same Update as a stream of other pieces, some of them empty."""
    (values,) = update.pieces
    cuts = sorted(rng.randint(0, values.size) for _ in range(rng.randint(0, 5)))
    pieces: Iterator[Integers] = iter(np.split(values, cuts))
    return replace(update, pieces=pieces)


def fold(table: TensorTable, updates: list[Contribution]) -> PartialSum:
    total = begin(table)
    for update in updates:
        total = accept(total, table, update)
    return total


def facts(total: PartialSum) -> tuple[bytes, bytes, bytes, str, int, Counter[str]]:
    values, reaches, weights = total.values.tobytes(), total.reaches.tobytes(), total.total_weights.tobytes()
    return values, reaches, weights, str(total.values.dtype), total.num_updates, total.counts


@given(tables(), st.integers(0, 6), st.randoms(use_true_random=False))
def test_any_order_cutting_and_tree_give_the_same_bits(
    table: TensorTable, num_updates: int, rng: random.Random
) -> None:
    updates = [contribution(table, rng) for _ in range(num_updates)]
    expected = facts(fold(table, updates))

    shuffled = rng.sample(updates, len(updates))
    assert facts(fold(table, [recut(update, rng) for update in shuffled])) == expected

    partials = [fold(table, [update]) for update in shuffled] + [begin(table)]
    while len(partials) > 1:
        right = partials.pop(rng.randrange(len(partials)))
        left = partials.pop(rng.randrange(len(partials)))
        partials.insert(rng.randint(0, len(partials)), merge(left, right))
    assert facts(partials[0]) == expected


@given(tables(), st.randoms(use_true_random=False))
def test_begin_is_the_zero_of_merge(table: TensorTable, rng: random.Random) -> None:
    update = contribution(table, rng)
    expected = facts(fold(table, [update]))
    assert facts(merge(fold(table, [update]), begin(table))) == expected
    assert facts(merge(begin(table), fold(table, [update]))) == expected
    assert not begin(table).values.any()
    assert begin(table).num_updates == 0
    assert not begin(table).total_weights.any()


FAULTS = ("shift", "weight", "heavy", "weights", "longer", "shorter")


@given(tables(), st.randoms(use_true_random=False), st.sampled_from(FAULTS))
def test_accept_raises_before_it_changes_anything(table: TensorTable, rng: random.Random, fault: str) -> None:
    total = fold(table, [contribution(table, rng)])
    before = facts(total)
    good = contribution(table, rng)
    (values,) = good.pieces
    if (fault == "shorter" and not values.size) or (fault in ("weight", "heavy") and not table.specs):
        fault = "longer"
    # The shorter Update lacks only its last value. The values before it must not be added either.
    pieces = {"longer": (values, np.ones(1, np.int32)), "shorter": (values[:-1],)}.get(fault, (values,))
    # Only the weight of the last block is wrong. The blocks before it must not be added either.
    last = {"weight": (0,), "heavy": tuple(weight + 1 for weight in good.fresh_weights[-1:])}
    bad = replace(
        good,
        weights=(*good.weights[:-1], *last.get(fault, good.weights[-1:]), *([1] if fault == "weights" else ())),
        shifts=(*good.shifts, 0) if fault == "shift" else good.shifts,
        pieces=pieces,
    )
    with pytest.raises(ValueError, match=r"got -?\d+.*, expected"):
        accept(total, table, bad)
    assert facts(total) == before


def test_merge_refuses_another_shape_and_changes_nothing() -> None:
    small, large = begin(TensorTable.of({"a": (2,)})), begin(TensorTable.of({"a": (3,)}))
    with pytest.raises(ValueError, match=r"merge: got \(3,\) values, expected \(2,\)"):
        merge(small, large)
    assert facts(small) == facts(begin(TensorTable.of({"a": (2,)})))


def test_finish_of_nothing_is_refused() -> None:
    table = TensorTable.of({"a": (1,)})
    with pytest.raises(ValueError, match="finish: got no updates, expected at least one"):
        finish(begin(table), table, (0,))


@given(plans())
def test_no_admitted_plan_can_overflow(plan: Plan) -> None:
    largest_value = (1 << (CODEC_BITS[plan.codec.name] - 1)) << plan.codec.max_shift
    largest_sum = plan.max_total_examples * plan.weight_unit * largest_value
    assert largest_sum <= 1 << HEADROOM_BITS <= INT64_MAX
    # Equal Updates of one Round have enough steps for weights of 8 bits, or for all examples that count.
    assert plan.max_total_examples >= plan.cohort.buffer * min(LEAST_STEPS, plan.max_examples)


@given(plans(), st.sampled_from((1, -1)))
def test_the_extreme_update_of_an_admitted_plan_folds_exactly(plan: Plan, sign: int) -> None:
    table = TensorTable.of({"a": (1,)})
    codec = CODECS[plan.codec.name]
    # A peer may also send the lowest value, which no encoder produces.
    value = largest_value(codec.bits) if sign > 0 else -(1 << (codec.bits - 1))
    payload = (value % (1 << codec.bits)).to_bytes(payload_bytes(codec.bits, 1), "little")
    weight, shift = plan.max_total_examples // plan.cohort.buffer * plan.weight_unit, plan.codec.max_shift
    pieces = (decoded(codec, payload, 1),)
    update = fresh(weight, (shift,), plan.codec, pieces)
    one = accept(begin(table), table, update)
    assert int(one.values[0]) == weight * (value << shift)
    # The sum of all the Round's Updates: an overflow would occur in the last addition.
    half = replace(begin(table), values=one.values * (plan.cohort.buffer - 1))
    total = merge(half, one)
    assert int(total.values[0]) == plan.cohort.buffer * weight * (value << shift)


@given(plans(), st.integers(-80, 80), st.sampled_from((1, -1)))
def test_no_update_from_an_earlier_grid_leaves_the_headroom(plan: Plan, shift: int, sign: int) -> None:
    table, codec = TensorTable.of({"a": (1,)}), CODECS[plan.codec.name]
    value = largest_value(codec.bits) if sign > 0 else -(1 << (codec.bits - 1))
    payload = (value % (1 << codec.bits)).to_bytes(payload_bytes(codec.bits, 1), "little")
    update = fresh(1, (shift,), plan.codec, (decoded(codec, payload, 1),))
    total = accept(begin(table), table, update)
    limit = 1 << (codec.bits - 1 + plan.codec.max_shift)
    assert abs(int(total.values[0])) <= limit
    exact = value * 2.0**shift
    assert total.counts[SATURATED] == (abs(exact) > limit)
    if abs(exact) <= limit:
        assert abs(int(total.values[0]) - exact) <= 0.5


@pytest.mark.parametrize("shift", [-3, 0, 5])
def test_an_update_reaches_as_far_as_its_shifted_values(shift: int) -> None:
    table = TensorTable.of({"a": (3,)})
    values = np.array([1, -40, 7], np.int32)
    update = Contribution(
        weights=(1,),
        fresh_weights=(1,),
        shifts=(shift,),
        bits=32,
        max_shift=8,
        counts={"examples": 1},
        pieces=(values,),
    )
    reaches = accept(begin(table), table, update).reaches
    assert reaches.sum() == 1
    assert reaches[0, reach_column(40, shift)] == 1
    assert reach_column(40, -3) < reach_column(40, 0) < reach_column(40, 5)
