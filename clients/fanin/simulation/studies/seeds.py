"""Several seeds: the mean and the spread of each column over them."""

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from fanin.simulation.rows import RoundRow, cells

NAMES: Final = ("seed", "round")
"""The columns that name a row. They have no mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadRow:
    """One Round over several seeds.

    Attributes:
        round: The Round.
        num_seeds: Seeds whose simulations have this Round.
        mean: The mean of each column of ``RoundRow``, by name.
        std: Its sample standard deviation; NaN for a single seed.
    """

    round: int
    num_seeds: int
    mean: dict[str, float]
    std: dict[str, float]


def spread_of(tables: Sequence[Sequence[RoundRow]]) -> tuple[SpreadRow, ...]:
    """Return a row for each Round that a seed has, from the Rounds of each seed.

    A seed lacks the Rounds that failed, and those after its end.
    """
    by_round: defaultdict[int, list[RoundRow]] = defaultdict(list)
    for row in chain(*tables):
        by_round[row.round].append(row)
    rows = []
    for number, rounds in sorted(by_round.items()):
        columns = [{name: value for name, value in cells(row).items() if name not in NAMES} for row in rounds]
        values = {name: [column.get(name, math.nan) for column in columns] for name in columns[0]}
        rows.append(
            SpreadRow(
                round=number,
                num_seeds=len(rounds),
                mean={name: math.fsum(each) / len(each) for name, each in values.items()},
                std={name: _deviation(each) for name, each in values.items()},
            )
        )
    return tuple(rows)


def write_spread(path: Path | str, rows: Sequence[SpreadRow]) -> None:
    """Write the rows as a CSV file with the columns ``NAME.mean`` and ``NAME.std``."""
    names = list(rows[0].mean)  # Version 0 is always evaluated
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["round", "num_seeds", *(f"{name}.{kind}" for name in names for kind in ("mean", "std"))])
        for row in rows:
            pairs = [each.get(name, math.nan) for name in names for each in (row.mean, row.std)]
            writer.writerow([row.round, row.num_seeds, *pairs])


def _deviation(values: Sequence[float]) -> float:
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values)
