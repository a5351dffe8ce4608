"""Devices whose answers to a query do not fit: they are left out, and the Round closes with the others."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import MemoryStore
from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.training.statistics import QueryTrainer
from fanin.clients.device.updates import Change, Trainer
from fanin.clients.statistics import plan_of
from fanin.edge.bundles.arrays import write_query
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.queries import FeatureGroup, StatisticsQuery, cells_of, statistics_of
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.messages import RoundFailed
from fanin.simulation import Member, Scenario, play

PUBLISHER = SigningKey(bytes(range(32)))
GROUP = FeatureGroup(input="x", names=("x",), low=0.0, high=9.0, step=1.0, bins=10)
QUERY = StatisticsQuery(groups=(GROUP,), min_devices=2, num_devices=4)
X = np.arange(10, dtype=np.float32).reshape(10, 1)


def store(x: Float32s, partition: int) -> MemoryStore:
    """Return examples with these values."""
    train = Examples(inputs={"x": x}, y=np.zeros(len(x), np.int32))
    return MemoryStore(partition=partition, train=train, validation=None)


@dataclass(frozen=True, kw_only=True)
class OtherBins:
    """A Trainer that answers a query of its own."""

    query: StatisticsQuery
    runtime: str = "counts"
    graph_format: str = "statistics"

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        """Return the integers of the other query."""
        zeros = np.zeros(self.query.table.num_values, np.float32)
        return Change(values=cells_of(self.query, zeros, {"x": X}), counts={m.EXAMPLES: 1})


def outcome_of(tmp_path: Path, *others: Trainer) -> None:
    """Play a Run of four honest devices and others, and check that only the honest ones count."""
    honest: list[Trainer] = [QueryTrainer(store(X, number)) for number in range(4)]
    trainers = [*others, *honest]
    bundle = write_query(QUERY, tmp_path / "bundle", PUBLISHER, "query")
    members = tuple(Member(device=f"d{number}", trainer=each) for number, each in enumerate(trainers))
    plan = plan_of(QUERY, ["cohort.deadline_s=100.0"])
    outcome = play(Scenario(plan=plan, bundle=bundle, publisher=PUBLISHER, members=members))
    assert any(isinstance(entry.event, RoundFailed) for entry in outcome.events), "d0 has an assignment and gives up"
    (feature,) = statistics_of(QUERY, outcome.parameters)
    assert (feature.devices, feature.count, {*feature.histogram}) == (4, 40, {4})
    assert [verdict.problem for verdict in outcome.verdicts if verdict.problem] == []


def test_a_histogram_of_other_bins_is_refused(tmp_path: Path) -> None:
    other = replace(QUERY, groups=(replace(GROUP, bins=5),))
    assert other.table.num_values != QUERY.table.num_values
    outcome_of(tmp_path, OtherBins(query=other))


def test_examples_without_the_input_are_refused(tmp_path: Path) -> None:
    columns = QueryTrainer(store(np.zeros((3, 2), np.float32), 9))
    by_column = replace(GROUP, by="column")
    query = replace(QUERY, groups=(by_column,))
    bundle = write_query(query, tmp_path / "bundle", PUBLISHER, "query")
    trainers = [columns, *(QueryTrainer(store(X, number)) for number in range(4))]
    members = tuple(Member(device=f"d{number}", trainer=each) for number, each in enumerate(trainers))
    outcome = play(Scenario(plan=plan_of(query), bundle=bundle, publisher=PUBLISHER, members=members))
    (feature,) = statistics_of(query, outcome.parameters)
    assert (feature.devices, feature.count) == (4, 40)
