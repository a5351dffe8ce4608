"""The Plan, the start and the result of a statistics Run.

A statistics Run is a Run like any other: its Rounds are committed, folded, verified, killed and resumed by the same
code. Only its Bundle has a query instead of graphs, and its rule adds integers up (docs/decisions/0070).
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fanin.clients.operator import Operator
from fanin.clients.planfile import Override, parse_plan
from fanin.clients.versions import fetch_version
from fanin.edge.bundles.arrays import write_query
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.queries.query import StatisticsQuery
from fanin.edge.queries.results import FeatureStatistics, statistics_of
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import RunInfo
from fanin.protos.plans import Plan

PLAN: Final = """\
name = "statistics"
bundle = "the query"

[cohort]
concurrency = {num_devices}
quorum = {num_devices}

[codec]
name = "fixed32"

[aggregation]
rule = "statistics"
rule_options = {{ min_devices = {min_devices} }}
max_examples = 1

[stop]
max_rounds = {num_versions}
"""
"""The Plan of a query. Each Round needs all devices: other ones would give another fleet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsResult:
    """The statistics of a Run.

    Attributes:
        run_id: The Run.
        version: The number of the Version that has them. Quantiles become narrower with each Version.
        num_versions: Versions until they are exact.
        query: What the devices were asked.
        features: The statistics of each feature.
    """

    run_id: str
    version: int
    num_versions: int
    query: StatisticsQuery
    features: tuple[FeatureStatistics, ...]

    def row(self) -> dict[str, object]:
        """Return the result as an object of JSON."""
        return {
            "run_id": self.run_id,
            "version": self.version,
            "num_versions": self.num_versions,
            "min_devices": self.query.min_devices,
            "num_devices": self.query.num_devices,
            "features": [feature.row() for feature in self.features],
        }


def plan_of(query: StatisticsQuery, overrides: Sequence[str | Override] = ()) -> Plan:
    """Return the Plan of a query.

    Args:
        query: The query.
        overrides: Keys that replace those of ``PLAN``, such as ``round.protocol=secagg``.

    Raises:
        InvalidPlan: A key is unknown or has a wrong value.
    """
    text = PLAN.format(num_devices=query.num_devices, min_devices=query.min_devices, num_versions=query.num_versions)
    return parse_plan(text, "the plan of the query", overrides).plan


def start_statistics(
    operator: Operator, run_id: str, query: StatisticsQuery, plan: Plan, publisher: SigningKey
) -> RunInfo:
    """Publish a query and start its Run. A repeated call with the same arguments starts no second Run.

    Args:
        operator: The connection.
        run_id: The id of the Run.
        query: The query.
        plan: Its Plan (``plan_of``).
        publisher: The key that devices trust.
    """
    with tempfile.TemporaryDirectory(prefix="fanin-query-") as scratch:
        bundle = write_query(query, Path(scratch) / "bundle", publisher, plan.name)
        operator.publish_bundle(bundle)
        return operator.start_run(run_id, plan, bundle, publisher)


def read_statistics(operator: Operator, run_id: str, publisher: str = "") -> StatisticsResult:
    """Return the statistics in the newest Version of a Run, verified.

    Args:
        operator: The connection.
        run_id: The Run.
        publisher: The public key that must have signed the query; empty to accept any signer.

    Raises:
        InvalidInput: The Run is no statistics Run, or has no Version yet.
        NotFound: There is no such Run.
    """
    fetched = fetch_version(operator, run_id, None, publisher)
    query, number = fetched.bundle.manifest.query, fetched.version.number
    if query is None or not number:
        lack = "no statistics run" if query is None else "a run without statistics yet"
        raise InvalidInput(
            f"run {run_id}: got {lack}, expected one of fanin stats with a closed round; see fanin runs, or wait for "
            "its devices",
            code="FN-1866",
        )
    features = statistics_of(query, fetched.parameters)
    return StatisticsResult(
        run_id=run_id, version=number, num_versions=query.num_versions, query=query, features=features
    )
