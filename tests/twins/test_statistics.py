"""The statistics of a fleet against plain numbers, and quantiles against numpy's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.queries import Fleet, plain, versions_of

from fanin.edge.queries import FeatureGroup, StatisticsQuery, statistics_of

QUANTILES = (0.01, 0.25, 0.5, 0.9, 0.999)


def fleet_of(seed: int, num_devices: int, scale: float = 1.0, num_examples: int = 30) -> Fleet:
    """Return devices with values on and between the points of a lattice, some of them out of range or no numbers."""
    rng = np.random.default_rng(seed)
    devices = []
    for device in range(num_devices):
        values = np.rint(rng.normal(device / num_devices, scale, (num_examples + device, 2)) * 64) / 64
        if device % 3 == 0:
            values[0, 0] = np.nan
            values[1, 1] = np.inf
        devices.append({"x": values, "y": rng.integers(0, 5, num_examples + device)})
    return devices


@given(st.integers(0, 1 << 32), st.integers(3, 12), st.integers(2, 6), st.integers(2, 40), st.floats(0.1, 4.0))
@settings(max_examples=30, deadline=None)
def test_the_statistics_equal_plain_numbers(seed: int, num_devices: int, k: int, bins: int, scale: float) -> None:
    k = min(k, num_devices)
    x = FeatureGroup(input="x", names=("a", "b"), by="column", low=-3.0, high=3.0, step=1 / 16, bins=bins)
    y = FeatureGroup(input="y", names=("label",), low=0.0, high=4.0, step=1.0, bins=5)
    query = StatisticsQuery(groups=(x, y), min_devices=k, num_devices=num_devices)
    fleet = fleet_of(seed, num_devices, scale)
    features = statistics_of(query, versions_of(query, fleet)[-1])
    columns = [[device["x"][:, column] for device in fleet] for column in range(2)]
    columns.append([device["y"].astype(np.float64) for device in fleet])
    for feature, group, ours in zip(features, (x, x, y), columns, strict=True):
        expected = plain(group, ours, k)
        assert {name: getattr(feature, name) for name in expected} == expected


@given(st.integers(0, 1 << 32), st.integers(2, 6), st.integers(2, 30), st.floats(0.05, 1.0))
@settings(max_examples=40, deadline=None)
def test_a_quantile_is_always_in_its_interval(seed: int, k: int, bins: int, scale: float) -> None:
    group = FeatureGroup(
        input="x", names=("a", "b"), by="column", low=-4.0, high=4.0, step=1 / 64, bins=bins, quantiles=QUANTILES
    )
    query = StatisticsQuery(groups=(group,), min_devices=k, num_devices=8)
    fleet = fleet_of(seed, 8, scale)
    values = np.concatenate([device["x"] for device in fleet])
    versions = versions_of(query, fleet)
    before = None
    for version in versions[1:]:
        features = statistics_of(query, version)
        widths = []
        for column, feature in enumerate(features):
            inside = values[:, column][np.abs(values[:, column]) <= 4.0]
            exact = np.quantile(inside, QUANTILES, method="inverted_cdf")
            for quantile, expected in zip(feature.quantiles, exact, strict=True):
                assert not quantile.has_changed
                if quantile.low is not None and quantile.high is not None:
                    assert quantile.low <= expected <= quantile.high
                    widths.append(quantile.high - quantile.low)
        assert before is None or all(now <= then for now, then in zip(widths, before, strict=True))
        before = widths


def test_quantiles_of_many_values_are_exact() -> None:
    rng = np.random.default_rng(3)
    fleet = [{"x": rng.integers(0, 20, (4000,))} for _ in range(20)]
    group = FeatureGroup(input="x", names=("x",), low=0.0, high=1000.0, step=1.0, bins=8, quantiles=QUANTILES)
    query = StatisticsQuery(groups=(group,), num_devices=20)
    assert query.num_versions == 4
    (feature,) = statistics_of(query, versions_of(query, fleet)[-1])
    expected = np.quantile(np.concatenate([each["x"] for each in fleet]), QUANTILES, method="inverted_cdf")
    assert [(each.low, each.high) for each in feature.quantiles] == [(value, value) for value in expected.tolist()]


def test_sums_beyond_float64_are_exact() -> None:
    """60-bit sums of squares of a device, summed over the fleet: Python's integers are the oracle."""
    group = FeatureGroup(input="x", names=("x",), low=0.0, high=float((1 << 30) - 1), step=1.0, bins=2)
    query = StatisticsQuery(groups=(group,), min_devices=2, num_devices=50, max_values=4)
    fleet = [{"x": np.full(4, (1 << 30) - 1 - device, np.int64)} for device in range(50)]
    (feature,) = statistics_of(query, versions_of(query, fleet)[-1])
    points = [int(value) for device in fleet for value in device["x"]]
    assert (feature.sum_points, feature.sum_squares) == (sum(points), sum(point * point for point in points))
    assert sum(point * point for point in points) > 1 << 64


@pytest.mark.parametrize(("by", "num"), [("element", 12), ("channel", 3), ("column", 4), ("all", 1)])
def test_features_are_elements_channels_columns_or_all(by: str, num: int) -> None:
    values = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    names = tuple(f"f{index}" for index in range(num))
    group = FeatureGroup(input="x", names=names, by=by, low=0.0, high=23.0, step=1.0, bins=24)
    query = StatisticsQuery(groups=(group,), min_devices=2, num_devices=2)
    features = statistics_of(query, versions_of(query, [{"x": values}, {"x": values}])[-1])
    axes: dict[str, tuple[int, ...]] = {"element": (0,), "channel": (0, 2), "column": (0, 1), "all": (0, 1, 2)}
    assert [each.mean for each in features] == values.mean(axes[by], dtype=np.float64).reshape(-1).tolist()
