"""Statistics Runs for operators: the Plan of a query, its start, and its result.

    query.toml --read_query--> StatisticsQuery --start_statistics--> Run --read_statistics--> FeatureStatistics

    run --start_evaluation--> a Version on some devices --read_evaluation--> CanaryResult

``runs`` has the Plan, the start and the result of statistics, ``canary`` those of an evaluation. Devices answer in
``fanin.clients.device.training``.
"""

from fanin.clients.statistics.canary import CanaryResult, evaluation_plan, read_evaluation, start_evaluation
from fanin.clients.statistics.runs import StatisticsResult, plan_of, read_statistics, start_statistics

__all__ = [
    "CanaryResult",
    "StatisticsResult",
    "evaluation_plan",
    "plan_of",
    "read_evaluation",
    "read_statistics",
    "start_evaluation",
    "start_statistics",
]
