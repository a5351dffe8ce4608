"""Statistics of simulated clients: the coordinator of production, on a virtual clock."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fanin.clients.data.examples import Examples
from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.training.statistics import QueryTrainer
from fanin.clients.device.updates import Change
from fanin.clients.statistics import plan_of
from fanin.edge.bundles.arrays import write_query
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.queries import FeatureGroup, StatisticsQuery
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput, InvalidPlan
from fanin.simulation import Iid, Partition, partition, simulate_statistics
from fanin.simulation.devices.habits import Habits
from fanin.simulation.federation.member import Member
from fanin.simulation.federation.scenario import Outcome, Scenario, play

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


class Leaver(QueryTrainer):
    """A device that answers once, and gives up in each later Round."""

    has_answered = False

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        """See Trainer."""
        if self.has_answered:
            raise InvalidInput("the examples are gone")
        self.has_answered = True
        return super().train(model, assignment, should_continue)


def members_of(trainers: Sequence[QueryTrainer], slowest_s: float = 100.0) -> tuple[Member, ...]:
    """Return devices of which the first one needs up to ``slowest_s``."""
    habits = [Habits(work_s=(slowest_s / 2, slowest_s)), *[Habits()] * (len(trainers) - 1)]
    return tuple(
        Member(device=f"device-{index}", trainer=trainer, habits=each)
        for index, (trainer, each) in enumerate(zip(trainers, habits, strict=True))
    )


def play_query(folder: Path, members: tuple[Member, ...], quorum: int = 4, stops_s: tuple[float, ...] = ()) -> Outcome:
    """Play a query for four devices."""
    publisher, query = SigningKey(bytes(32)), query_of(4)
    bundle = write_query(query, folder / "bundle", publisher, "statistics")
    plan = plan_of(query, [f"cohort.quorum={quorum}"])
    return play(
        Scenario(plan=plan, bundle=bundle, publisher=publisher, members=members, seed=1, stops_s=stops_s),
        folder / "state",
    )


def trainers_of(num_clients: int) -> list[QueryTrainer]:
    """Return the trainers of clients with 20 examples each."""
    clients = clients_of(num_clients)
    return [QueryTrainer(clients.store(index, 0.0)) for index in range(num_clients)]


def sets_of(outcome: Outcome) -> list[frozenset[str]]:
    """Return the devices of each Version."""
    folds = [line.what for line in outcome.log if line.what.startswith("run: Fold(")]
    return [frozenset(f"device-{index}" for index in range(9) if f"'device-{index}'" in fold) for fold in folds]


@pytest.mark.parametrize("stop_s", [60.0, 100.0, 130.0, 160.0])
def test_a_restarted_coordinator_keeps_the_devices_of_the_first_round(tmp_path: Path, stop_s: float) -> None:
    outcome = play_query(tmp_path, members_of(trainers_of(7)), stops_s=(stop_s,))
    assert len(outcome.versions) == 2
    sets = sets_of(outcome)
    assert len(set(sets)) == 1 and len(sets[0]) == 4


def test_a_first_round_with_a_quorum_fixes_its_devices(tmp_path: Path) -> None:
    outcome = play_query(tmp_path, members_of(trainers_of(4), slowest_s=5000.0), quorum=3)
    assert len(outcome.versions) == 2
    assert set(sets_of(outcome)) == {frozenset({"device-1", "device-2", "device-3"})}


def test_without_a_device_of_the_first_round_nothing_is_published(tmp_path: Path) -> None:
    """A quorum of the others answers, and the difference to the first Version would be the leaver's counts."""
    trainers = trainers_of(4)
    trainers[2] = Leaver(clients_of(4).store(2, 0.0))
    outcome = play_query(tmp_path, members_of(trainers), quorum=3)
    assert [len(each) for each in sets_of(outcome)] == [4]
    rested = outcome.events[-1].event
    assert isinstance(rested, m.RunRested) and rested.state is m.RunState.FAILED
    assert "expected at least 4" in rested.reason and "the examples are gone" in rested.reason
