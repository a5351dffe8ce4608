"""Statistics of simulated clients: the coordinator of production, on a virtual clock."""

import numpy as np
import pytest

from fanin.clients.data.examples import Examples
from fanin.edge.queries import FeatureGroup, StatisticsQuery
from fanin.protos.errors import InvalidPlan
from fanin.simulation import Iid, Partition, partition, simulate_statistics

NUM_FEATURES = 16


def clients_of(num_clients: int) -> Partition:
    """Return clients with 20 examples each."""
    rng, num = np.random.default_rng(num_clients), num_clients * 20
    x = rng.integers(0, 17, (num, NUM_FEATURES)).astype(np.float32)
    return partition(Examples(inputs={"x": x}, y=rng.integers(0, 4, num).astype(np.int32)), num_clients, Iid(), seed=0)


def query_of(num_clients: int) -> StatisticsQuery:
    """Return a query for pixels and labels."""
    names = tuple(map(str, range(NUM_FEATURES)))
    x = FeatureGroup(input="x", names=names, by="element", low=0.0, high=16.0, step=1.0, bins=5, quantiles=(0.1, 0.5))
    y = FeatureGroup(input="y", names=("label",), low=0.0, high=3.0, step=1.0, bins=4)
    return StatisticsQuery(groups=(x, y), min_devices=3, num_devices=num_clients)


def check(num_clients: int, *overrides: str) -> None:
    """Compare the statistics with numpy's of all examples. The labels and bins are on all clients' sides of k."""
    clients = clients_of(num_clients)
    result = simulate_statistics(query_of(num_clients), clients, overrides)
    assert (result.version, result.num_versions) == (2, 2)
    *pixels, label = result.features
    assert list(label.histogram) == np.bincount(clients.examples.y).tolist()
    for number, feature in enumerate(pixels):
        values = clients.examples.inputs["x"][:, number].astype(np.float64)
        assert (feature.count, feature.mean) == (len(values), float(values.mean()))
        assert feature.variance == pytest.approx(values.var(), rel=1e-14)
        expected = np.quantile(values, (0.1, 0.5), method="inverted_cdf").tolist()
        assert [(each.low, each.high) for each in feature.quantiles] == [(value, value) for value in expected]


def test_twenty_clients_equal_numpy() -> None:
    check(20)


def test_clients_under_masks_equal_numpy() -> None:
    check(20, "round.protocol=secagg")


@pytest.mark.parametrize("overrides", [(), ("round.protocol=secagg",)])
@pytest.mark.parametrize("seed", range(4))
def test_later_rounds_have_the_devices_of_the_first_one(seed: int, overrides: tuple[str, ...]) -> None:
    """With other devices, the parts of a bin and the bin differ by the count of a device."""
    result = simulate_statistics(query_of(4), clients_of(5), overrides, seed)
    assert result.version == 2
    quantiles = [each for feature in result.features for each in feature.quantiles]
    assert quantiles and not any(each.has_changed for each in quantiles)


@pytest.mark.nightly
def test_a_thousand_clients_equal_numpy() -> None:
    check(1000)


def test_a_plan_of_other_devices_than_the_query_is_refused() -> None:
    with pytest.raises(InvalidPlan) as raised:
        simulate_statistics(
            query_of(20), clients_of(20), ("cohort.buffer=10", "cohort.concurrency=10", "cohort.quorum=10")
        )
    assert raised.value.code == "FN-1865"
