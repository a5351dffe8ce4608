"""A statistics Run of simulated clients: the production coordinator, rule and verification, on a virtual clock.

The clients answer as devices do, so the result is that of a fleet with the same examples, to the last bit.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from fanin.clients.device.training.statistics import QueryTrainer
from fanin.clients.statistics import StatisticsResult, plan_of
from fanin.edge.bundles.arrays import write_query
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.queries.query import StatisticsQuery
from fanin.edge.queries.results import statistics_of
from fanin.simulation.data.partitioning import Partition
from fanin.simulation.federation.member import Member
from fanin.simulation.federation.scenario import RUN, Scenario, play


def simulate_statistics(
    query: StatisticsQuery, clients: Partition, overrides: Sequence[str] = (), seed: int = 0
) -> StatisticsResult:
    """Return the statistics of simulated clients, whose Versions were recomputed.

    Args:
        query: The query. Its ``num_devices`` is the number of clients that a Round has, at most those of ``clients``.
        clients: The examples of each client.
        overrides: Keys of the Plan, such as ``round.protocol=secagg``.
        seed: Seed of the order in which clients arrive.

    Raises:
        InvalidPlan: A key is unknown or has a wrong value.
        TimeoutError: Fewer clients answer than a Round needs.
    """
    publisher = SigningKey.generate()
    members = tuple(
        Member(device=f"client-{index}", trainer=QueryTrainer(clients.store(index, 0.0)))
        for index in range(len(clients.indices))
    )
    with tempfile.TemporaryDirectory(prefix="fanin-query-") as scratch:
        bundle = write_query(query, Path(scratch) / "bundle", publisher, "statistics")
        scenario = Scenario(
            plan=plan_of(query, overrides), bundle=bundle, publisher=publisher, members=members, seed=seed
        )
        outcome = play(scenario)
    assert not any(verdict.problem for verdict in outcome.verdicts), "each Version equals its recomputation"
    return StatisticsResult(
        run_id=RUN,
        version=len(outcome.versions),
        num_versions=query.num_versions,
        query=query,
        features=statistics_of(query, outcome.parameters),
    )
