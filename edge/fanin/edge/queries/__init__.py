"""Statistics of the examples of a fleet, without training: what is asked, what a device sends, what a result says.

    StatisticsQuery --cells_of(examples)--> integers of a device --sum of the fleet, withheld cells--> statistics_of

Modules, in reading order:

    query.py    the query of a manifest: features, their lattices, and the tensors of integers that it needs
    digits.py   counts as digits that float32 holds exactly, and as sums of a fleet
    cells.py    the integers of one device
    brackets.py the intervals that quantiles are known to be in, narrowed by each Version
    results.py  the statistics in the parameters of a Version
    files.py    the query as TOML and JSON
"""

from fanin.edge.queries.cells import cells_of
from fanin.edge.queries.files import parse_query, query_row, read_query
from fanin.edge.queries.query import FeatureGroup, StatisticsQuery
from fanin.edge.queries.results import FeatureStatistics, statistics_of

__all__ = [
    "FeatureGroup",
    "FeatureStatistics",
    "StatisticsQuery",
    "cells_of",
    "parse_query",
    "query_row",
    "read_query",
    "statistics_of",
]
