"""Robust rules compared with plain Python, for any Updates, order and lengths of the parts."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import robust
from support.columns import NUM_VALUES, STEPS, Drawn, folded
from support.folds import fresh
from support.virtual import plan

from fanin.edge.tensors import TensorTable
from fanin.protos.errors import InvalidPlan
from fanin.protos.messages import CodecSpec
from fanin.server.aggregation.checked import rule_of
from fanin.server.aggregation.contract import check_rule
from fanin.server.aggregation.robust import Columns
from fanin.server.aggregation.robust.centre import CentredClipping, GeometricMedian
from fanin.server.aggregation.robust.middle import MeanAroundMedian, Median
from fanin.server.aggregation.robust.nearest import Bulyan, Krum
from fanin.server.aggregation.rules import ColumnRule

FIXED = CodecSpec(name="fixed32", max_shift=20)
VALUES = st.lists(st.integers(-(2**31) + 1, 2**31 - 1), min_size=NUM_VALUES, max_size=NUM_VALUES)
UPDATE = st.tuples(VALUES, st.tuples(st.integers(0, 6), st.integers(0, 6)))
UPDATES = st.lists(UPDATE, min_size=7, max_size=11)
Twin = Callable[[Sequence[robust.Row]], list[float]]
RULES: dict[str, tuple[ColumnRule, Twin]] = {
    "median": (Median(), robust.median),
    "meamed": (MeanAroundMedian(3), lambda rows: robust.meamed(rows, len(rows) - 3)),
    "krum": (Krum(2, 1), lambda rows: robust.krum(rows, 2, 1)),
    "multi_krum": (Krum(1, None), lambda rows: robust.krum(rows, 1, len(rows) - 1)),
    "bulyan": (Bulyan(1), lambda rows: robust.bulyan(rows, 1)),
    "geometric_median": (GeometricMedian(3, 1e3), lambda rows: robust.geometric_median(rows, 3, 1e3)),
    "centred_clipping": (CentredClipping(3, 1e6), lambda rows: robust.centred_clipping(rows, 3, 1e6)),
    "norm_bounding": (CentredClipping(1, 1e7), lambda rows: robust.norm_bounding(rows, 1e7)),
}
"""Rules and their twins, for at least 7 Updates."""


def rows_of(drawn: Drawn) -> list[list[float]]:
    """Return the changes that the Updates stand for, in the order of the devices' ids."""
    rows = {
        f"device-{index}": [float((values[at] << shifts[at >= 12]) * STEPS[at]) for at in range(NUM_VALUES)]
        for index, (values, shifts) in enumerate(drawn)
    }
    return [rows[name] for name in sorted(rows)]


@pytest.mark.parametrize("name", RULES)
@given(drawn=UPDATES, rng=st.randoms(use_true_random=False), column_bytes=st.integers(8, 400))
def test_a_rule_equals_its_twin_in_any_order_and_parts(
    name: str, drawn: Drawn, rng: random.Random, column_bytes: int
) -> None:
    rule, twin = RULES[name]
    names = sorted(f"device-{index}" for index in range(len(drawn)))
    expected = folded(rule, drawn).part(0, NUM_VALUES)
    aggregate = folded(rule, drawn, rng.sample(names, len(names)), column_bytes)
    cut = rng.randint(0, NUM_VALUES)
    outcome = np.concatenate([aggregate.part(0, cut), aggregate.part(cut, NUM_VALUES)])
    assert outcome.tobytes() == expected.tobytes()
    rows = rows_of(drawn)
    np.testing.assert_allclose(outcome, twin(rows), rtol=1e-9, atol=1e-9 * np.abs(rows).max())


@pytest.mark.parametrize("name", RULES)
def test_a_rule_keeps_the_contract(name: str) -> None:
    rule, _ = RULES[name]
    for num_updates in (7, 16):
        check_rule(rule, num_updates=num_updates, seed=num_updates)


@pytest.mark.parametrize("column_bytes", [8, 5000, 1 << 20])
@pytest.mark.parametrize("bits", [8, 31])
def test_squared_distances_are_those_of_fractions(bits: int, column_bytes: int) -> None:
    """More values than the products of one sum, of one to three parts of 20 bits."""
    table, rng = TensorTable.of({"few": (3,), "many": (2500,)}), np.random.default_rng(bits)
    updates = [rng.integers(-(2**bits) + 1, 2**bits, table.num_values) for _ in range(4)]
    updates[1] = updates[0] + (np.arange(table.num_values) == 7)
    shifts = [(0, 0), (0, 0), (6, 1), (2, 20)]
    contributions = [
        replace(fresh(256, each, FIXED, ()), read=lambda first, last, values=values: values[first:last])
        for values, each in zip(updates, shifts, strict=True)
    ]
    squares = Columns(contributions, table, column_bytes).squared_distances((-3, 5))
    steps = [Fraction(1, 8)] * 3 + [Fraction(32)] * 2500
    for one, two in product(range(4), repeat=2):
        left, right = (
            [(int(value) << shift[at >= 3]) * steps[at] for at, value in enumerate(values)]
            for values, shift in ((updates[one], shifts[one]), (updates[two], shifts[two]))
        )
        exact = sum((a - b * (one != two)) ** 2 for a, b in zip(left, right, strict=True))
        assert abs(Fraction(float(squares[one, two])) - exact) <= exact / 2**48
    assert squares[0, 1] == 1024.0


@pytest.mark.parametrize(
    ("name", "quorum", "options"),
    [("krum", 6, {"f": 2}), ("multi_krum", 4, {"f": 1}), ("meamed", 4, {"f": 2}), ("bulyan", 6, {"f": 1})],
)
def test_a_rule_that_needs_more_updates_than_the_quorum_is_refused(
    name: str, quorum: int, options: dict[str, int]
) -> None:
    sizes = {"concurrency": quorum + 1, "buffer": quorum + 1}
    rule_of(plan(**sizes, quorum=quorum + 1, rule=name, rule_options=options))
    with pytest.raises(InvalidPlan) as excinfo:
        rule_of(plan(**sizes, quorum=quorum, rule=name, rule_options=options))
    assert excinfo.value.code == "FN-1800"


def test_a_mean_of_more_updates_than_are_honest_is_refused() -> None:
    sizes = {"concurrency": 7, "buffer": 7, "quorum": 7, "rule": "multi_krum"}
    rule_of(plan(**sizes, rule_options={"f": 2, "m": 5}))
    with pytest.raises(InvalidPlan) as excinfo:
        rule_of(plan(**sizes, rule_options={"f": 2, "m": 6}))
    assert excinfo.value.code == "FN-1801"


@pytest.mark.parametrize("num_liars", [1, 2, 3])
def test_a_geometric_median_with_its_default_is_near_the_honest_updates_whatever_the_lie(num_liars: int) -> None:
    """Each step divides the part of a far lie by (n - f) / f, so a few steps are too few for the largest values."""
    rng, largest = np.random.default_rng(num_liars), (1 << 31) - 1
    honest = [(rng.integers(-(1 << 10), 1 << 10, NUM_VALUES).tolist(), (0, 0)) for _ in range(10 - num_liars)]
    drawn = [*honest, *[([largest] * NUM_VALUES, (0, 0))] * num_liars]
    rule = rule_of(plan(concurrency=10, buffer=10, quorum=10, rule="geometric_median"))
    aggregate = folded(rule, drawn).part(0, NUM_VALUES)
    # The bound of Minsker 2015 for the exact point: 2 (n - f) / (n - 2f) times the largest honest norm.
    bound = 2 * (10 - num_liars) / (10 - 2 * num_liars) * np.linalg.norm(np.multiply(1 << 10, STEPS))
    assert np.linalg.norm(aggregate) < bound


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_staleness": 1}, "expected 0: this rule compares updates of one round"),
        ({"concurrency": 1025, "buffer": 1025, "quorum": 1025}, "expected at most 1024"),
    ],
)
@pytest.mark.parametrize(("name", "options"), [("median", {}), ("krum", {"f": 1}), ("geometric_median", {})])
def test_a_robust_rule_refuses_staleness_and_more_updates_than_it_can_compare(
    name: str, options: dict[str, object], changes: dict[str, int], text: str
) -> None:
    whole = {"concurrency": 10, "buffer": 10, "quorum": 10, **changes}
    with pytest.raises(InvalidPlan, match=text) as excinfo:
        rule_of(plan(**whole, rule=name, rule_options=options))
    assert excinfo.value.code == "FN-0246"
