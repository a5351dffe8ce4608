"""Statistics Runs for operators: the Plan of a query, its start, and its result.

    query.toml --read_query--> StatisticsQuery --start_statistics--> Run --read_statistics--> FeatureStatistics

``runs`` has the Plan, the start and the result. Devices answer in ``fanin.clients.device.training.statistics``.
"""

from fanin.clients.statistics.runs import StatisticsResult, plan_of, read_statistics, start_statistics

__all__ = ["StatisticsResult", "plan_of", "read_statistics", "start_statistics"]
