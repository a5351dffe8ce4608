"""Updates of two blocks, folded by a rule in any order and in parts of any length."""

from collections.abc import Sequence

import numpy as np

from fanin.edge.tensors import TensorTable
from fanin.server.aggregation.fold import Contribution
from fanin.server.aggregation.rules import ColumnRule, Rule
from fanin.server.aggregation.sets import COLUMN_BYTES, Aggregate, SetFold

TABLE = TensorTable.of({"first": (3, 4), "second": (5,)})
GRID = (-10, -7)
NUM_VALUES = TABLE.num_values
STEPS = tuple(2.0**exponent for exponent, size in zip(GRID, (12, 5), strict=True) for _ in range(size))
"""The step of each value."""
Drawn = Sequence[tuple[Sequence[int], tuple[int, int]]]
"""The values and the shifts of each Update."""


def contributions(drawn: Drawn) -> dict[str, Contribution]:
    """Return the Updates by device."""
    outcome = {}
    for index, (values, shifts) in enumerate(drawn):
        encoded = np.array(values, np.int32)
        outcome[f"device-{index}"] = Contribution(
            weights=(256, 256),
            fresh_weights=(256, 256),
            shifts=shifts,
            bits=32,
            max_shift=6,
            counts={"n": index},
            pieces=[encoded],
            read=lambda a, b, encoded=encoded: encoded[a:b],
        )
    return outcome


def folded(
    rule: Rule | ColumnRule, drawn: Drawn, order: Sequence[str] = (), column_bytes: int = COLUMN_BYTES
) -> Aggregate:
    """Return the aggregate of Updates that arrive in an order."""
    sources = contributions(drawn)
    return SetFold(rule, TABLE, GRID, lambda device, _scale: sources[device], column_bytes).complete(
        order or tuple(sources)
    )
