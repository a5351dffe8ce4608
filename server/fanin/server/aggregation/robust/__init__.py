"""The robust rules of fanin: functions of the Updates of a Round, side by side.

Modules, in reading order:

    columns.py       the Updates side by side, and the exact distances between them
    middle.py        rules of single values: the median and the mean around it
    nearest.py       rules that choose Updates by their distances: Krum, Multi-Krum and Bulyan
    centre.py        rules that weigh Updates by their distance from a centre: RFA and clipping
    named.py         the rules by name, with their options and their demands on the Plan

Each rule is a ``ColumnRule`` or a ``DistanceRule`` of ``rules.py`` by its members alone, so this room does
not import that module.
"""

from fanin.server.aggregation.robust.columns import Columns
from fanin.server.aggregation.robust.named import ROBUST_RULES

__all__ = ["ROBUST_RULES", "Columns"]
