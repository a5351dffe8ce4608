"""Queries that are refused, cells that are withheld, and liars."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from support.queries import contribution, versions_of

from fanin.clients.statistics import plan_of
from fanin.edge.bundles.manifest_json import dump_manifest, parse_manifest
from fanin.edge.queries import (
    FeatureGroup,
    StatisticsQuery,
    cells_of,
    parse_query,
    query_row,
    read_query,
    statistics_of,
)
from fanin.edge.tensors import Int64s
from fanin.protos.errors import FaninError
from fanin.server.aggregation.checked import rule_of
from fanin.server.aggregation.exact_sums import ExactSums, withheld
from fanin.server.aggregation.fold import PartialSum

X = FeatureGroup(input="x", names=("x",), low=0.0, high=9.0, step=1.0, bins=10)
QUERY = StatisticsQuery(groups=(X,), min_devices=3, num_devices=6)
FILE = """
min_devices = 3
[[features]]
input = "x"
by = "element"
count = 4
low = 0
high = 16
quantiles = [0.5]
[[features]]
input = "y"
classes = 10
"""


@contextmanager
def refused(code: str) -> Iterator[None]:
    """Check that the block raises an error with a code."""
    with pytest.raises(FaninError) as raised:
        yield
    assert raised.value.code == code, str(raised.value)


def test_a_file_becomes_a_query(tmp_path: Path) -> None:
    (tmp_path / "query.toml").write_text(FILE)
    query = read_query(tmp_path / "query.toml", 20)
    x, y = query.groups
    assert (x.names, x.step, x.bins, x.quantiles) == (("0", "1", "2", "3"), 16 / 65536, 32, (0.5,))
    assert (y.low, y.high, y.step, y.bins, y.by) == (0.0, 9.0, 1.0, 10, "all")
    assert parse_query(query_row(query), "query") == query
    assert query.num_versions == 4


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ("min_devices = 3", "min_devices = 1", "FN-1860"),
        ("min_devices = 3", "min_devices = 21", "FN-1860"),
        ("min_devices = 3", "max_values = 0", "FN-1860"),
        ("min_devices = 3", "min_device = 3", "FN-1860"),
        ("count = 4", "count = 0", "FN-1860"),
        ("count = 4", "count = 4\nnames = ['a']", "FN-1860"),
        ("count = 4", "names = ['a', 'a']", "FN-1860"),
        ("high = 16", "high = 0", "FN-1860"),
        ("high = 16", "high = nan", "FN-1860"),
        ("high = 16", "high = 16\nstep = 3", "FN-1860"),
        ("high = 16", "", "FN-1860"),
        ("high = 16", "high = 16\nbins = 5000", "FN-1860"),
        ("high = 16", "high = 2147483647\nstep = 1", "FN-1861"),
        ("quantiles = [0.5]", "quantiles = [1.0]", "FN-1860"),
        ("quantiles = [0.5]", "quantiles = [0.5, 0.2]", "FN-1860"),
        ("quantiles = [0.5]", "quantiles = ['a']", "FN-1860"),
        ('input = "y"', 'input = "x"', "FN-1860"),
        ("classes = 10", "classes = 10\nbins = 10", "FN-1860"),
        ("classes = 10", "classes = 1", "FN-1860"),
        ('by = "element"', 'by = "row"', "FN-1860"),
        ('by = "element"', 'by = "all"', "FN-1860"),
        ("[[features]]", "[[features]", "FN-1862"),
    ],
)
def test_a_wrong_query_is_refused(tmp_path: Path, before: str, after: str, code: str) -> None:
    assert before in FILE
    (tmp_path / "query.toml").write_text(FILE.replace(before, after, 1))
    with refused(code):
        read_query(tmp_path / "query.toml", 20)


@pytest.mark.parametrize(
    "override",
    [
        "codec.name=int8",
        "aggregation.max_examples=0",
        "aggregation.outer_optimizer=fedavgm",
        "aggregation.max_staleness=2",
        "cohort.quorum=2",
        "aggregation.rule_options.min_devices=7",
        "stages=[{name='error_feedback'}]",
        "statistics=[{name='words', bound=3}]",
    ],
)
def test_a_plan_whose_sums_would_not_be_exact_is_refused(override: str) -> None:
    rule_of(plan_of(QUERY))
    with refused("FN-1864"):
        rule_of(plan_of(QUERY, [override]))


def test_noise_is_refused() -> None:
    private = [
        "privacy.mechanism=central",
        "privacy.clip_norm=1.0",
        "privacy.noise_multiplier=1.0",
        "privacy.delta=1e-3",
        "privacy.population_size=100",
        "privacy.population=fleet",
        "privacy.epsilon=8.0",
    ]
    with refused("FN-1682"):
        plan_of(QUERY, private)


@given(arrays(np.int64, (4, 6), elements=st.integers(0, 9)), st.integers(2, 6))
def test_what_follows_from_the_total_of_a_row_covers_enough_devices(devices: Int64s, k: int) -> None:
    """The sum of the withheld cells follows. It has a cell of k devices, or it is the total of the row itself."""
    hidden = withheld(devices, k)
    assert (hidden | (devices == 0) | (devices >= k)).all()
    for row, ours in zip(devices, hidden, strict=True):
        small = (row > 0) & (row < k)
        assert ours.any() == small.any()
        if ours.any():
            assert row[ours].max() >= k or not (row[~ours] > 0).any()
        assert (ours & ~small).sum() <= 1


def test_bins_do_not_tell_a_withheld_count() -> None:
    """One value out of range: its cell, the count inside and all bins are withheld, for their sum is that count."""
    fleet = [{"x": np.array([1.0, 5.0])} for _ in range(6)]
    fleet[2] = {"x": np.array([1.0, 5.0, 99.0])}
    (feature,) = statistics_of(QUERY, versions_of(QUERY, fleet)[-1])
    assert (feature.above, feature.count, feature.mean, {*feature.histogram}) == (None, None, None, {None})
    assert (feature.below, feature.missing) == (0, 0)


def lie(values: np.ndarray) -> np.ndarray:
    """Return the largest integers that an Update can have, in the cells in which the device has values."""
    return np.where(values > 0, (1 << 31) - 128, values)


def negate(values: np.ndarray) -> np.ndarray:
    """Return integers below 0."""
    return -np.abs(values) - 5


@pytest.mark.parametrize("change", [lie, negate])
def test_a_liar_moves_a_cell_by_at_most_the_values_of_a_device(
    change: Callable[[np.ndarray], np.ndarray],
) -> None:
    query = replace(QUERY, max_values=100)
    rule, table = ExactSums(3, 6), query.table
    zeros, honest = np.zeros(table.num_values, np.float32), {"x": np.arange(10)}
    state = rule.begin(table)
    for device in range(5):
        values = cells_of(query, zeros, honest)
        values = change(values) if device == 4 else values
        state = rule.accept(state, table, contribution(values.astype(np.float32), len(table.specs)))
    after = rule.finish(state, table, (), (0, table.num_values)).astype(np.float32)
    (feature,) = statistics_of(query, after)
    most = (1 << query.bits * query.widths(X)[0]) - 1
    assert all(count is not None and 4 <= count <= 4 + most for count in feature.histogram)
    assert feature.count is not None and 40 <= feature.count <= 40 + most


def test_wide_bins_leave_the_mean_of_a_feature_with_a_rare_value() -> None:
    query = replace(QUERY, groups=(replace(X, bins=5),))
    fleet = [{"x": np.array([1.0, 3.0, 5.0] if device else [1.0, 3.0, 5.0, 9.0])} for device in range(6)]
    (feature,) = statistics_of(query, versions_of(query, fleet)[-1])
    assert (feature.sum_points, feature.histogram[4]) == (63, None)


def test_a_manifest_keeps_its_query(tmp_path: Path) -> None:
    from fanin.edge.bundles.arrays import write_query
    from fanin.edge.bundles.keys import SigningKey

    manifest = write_query(QUERY, tmp_path / "bundle", SigningKey(bytes(32)), "ages").manifest
    assert manifest.query == QUERY and manifest.graph_formats == ("statistics",)
    data = dump_manifest(manifest)
    assert parse_manifest(data) == manifest
    for before, after, code in (
        (b'"bins": 10', b'"bins": 9', "FN-1863"),
        (b'"max_values"', b'"most_values"', "FN-1860"),
        (b'"role": "sum"', b'"role": "counter"', "FN-1863"),
    ):
        with refused("FN-0308" if code == "FN-1860" else code):
            parse_manifest(data.replace(before, after, 1))


@pytest.mark.parametrize(
    ("examples", "text"),
    [
        ({"z": np.zeros(3)}, "got the inputs"),
        ({"x": np.zeros((3, 2))}, None),
        ({"x": np.array(["a"])}, "expected numbers"),
    ],
)
def test_examples_without_the_features_are_refused(examples: dict[str, np.ndarray], text: str | None) -> None:
    zeros = np.zeros(QUERY.table.num_values, np.float32)
    if text is None:
        columns = replace(QUERY, groups=(replace(X, by="column"),))
        with pytest.raises(ValueError, match="got 2 features by column"):
            cells_of(columns, zeros, examples)
        with pytest.raises(ValueError, match="got 6 values of a feature"):
            cells_of(few := replace(QUERY, max_values=5), np.zeros(few.table.num_values, np.float32), examples)
    else:
        with pytest.raises(ValueError, match=text):
            cells_of(QUERY, zeros, examples)


def test_sums_do_not_tell_a_withheld_label() -> None:
    """Two hidden labels and three equations (number, sum, squares) would have one solution."""
    query = StatisticsQuery(
        groups=(FeatureGroup(input="y", names=("y",), low=0.0, high=3.0, step=1.0, bins=4),),
        min_devices=3,
        num_devices=6,
    )
    fleet = [{"y": np.array([0, 1, 2] if device else [0, 1, 2, 3, 3])} for device in range(6)]
    (feature,) = statistics_of(query, versions_of(query, fleet)[-1])
    assert (feature.count, feature.sum_points, feature.sum_squares, feature.mean) == (20, None, None, None)
    assert sorted(feature.histogram, key=str) == [6, 6, None, None] and feature.histogram[3] is None
    without = [{"y": each["y"][:3]} for each in fleet]
    (feature,) = statistics_of(query, versions_of(query, without)[-1])
    assert (feature.mean, feature.histogram) == (1.0, (6, 6, 6, 0))


def test_the_order_of_updates_and_partial_sums_change_nothing() -> None:
    rule, table = ExactSums(3, 6), QUERY.table
    zeros = np.zeros(table.num_values, np.float32)
    rng = np.random.default_rng(2)
    values = [cells_of(QUERY, zeros, {"x": rng.integers(-1, 11, 9)}) for _ in range(6)]

    def partial(some: list[np.ndarray]) -> PartialSum:
        state = rule.begin(table)
        for each in some:
            state = rule.accept(state, table, contribution(each, len(table.specs)))
        return state

    whole = (0, table.num_values)
    expected = rule.finish(partial(values), table, (), whole)
    assert np.array_equal(rule.finish(partial(values[::-1]), table, (), whole), expected)
    for left, right in ((values[:2], values[2:]), (values[3:], values[:3]), ([], values)):
        merged = rule.merge(partial(left), partial(right))
        assert np.array_equal(rule.finish(merged, table, (), whole), expected)
