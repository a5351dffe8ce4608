"""What a device tells of a Version that it measured, and what the sums over devices say.

All of it is integers, so that devices are folded in any order. A squared error has the scale of the model's values,
which nobody knows beforehand, so it is told as two counts: its whole part, and the rest on a grid of 2^-40.
"""

import math
from collections.abc import Mapping
from typing import Final

from fanin.edge.runtimes.measure import Measured
from fanin.protos import messages as m

SQUARES_FLOAT: Final = "eval_squares_float"
SQUARES_INT8: Final = "eval_squares_int8"
SQUARES_WANTED: Final = "eval_squares_wanted"
REST: Final = "_q40"
"""Ends the name of the count for what the whole part leaves."""
REST_UNIT: Final = m.MAX_COUNT
"""As fine as a count has room for: sums of squares from 1e-12 to 1e12 are told apart."""


def counts_of(measured: Measured, num_classes: int) -> dict[str, int]:
    """What a device tells of a model with so many classes; 0: of values."""
    counts = {m.EVAL_EXAMPLES: measured.num_examples, m.EVAL_LOSS: loss_count(measured.loss_sum)}
    if num_classes:
        return counts | {
            m.EVAL_PREDICTIONS: measured.num_predictions,
            m.EVAL_CORRECT_FLOAT: measured.num_correct_float,
            m.EVAL_CORRECT_INT8: measured.num_correct_int8,
            m.EVAL_AGREE: measured.num_agreeing,
        }
    counts |= _split(SQUARES_FLOAT, measured.squares_float) | _split(SQUARES_INT8, measured.squares_int8)
    return counts | _split(SQUARES_WANTED, measured.squares_wanted)


def measured_of(counts: Mapping[str, int]) -> Measured:
    """What the sums over devices say, as one would have measured it who had all their examples."""
    return Measured(
        num_examples=counts.get(m.EVAL_EXAMPLES, 0),
        loss_sum=counts.get(m.EVAL_LOSS, 0) / m.LOSS_UNIT,
        num_predictions=counts.get(m.EVAL_PREDICTIONS, 0),
        num_correct_float=counts.get(m.EVAL_CORRECT_FLOAT, 0),
        num_correct_int8=counts.get(m.EVAL_CORRECT_INT8, 0),
        num_agreeing=counts.get(m.EVAL_AGREE, 0),
        squares_float=_joined(SQUARES_FLOAT, counts),
        squares_int8=_joined(SQUARES_INT8, counts),
        squares_wanted=_joined(SQUARES_WANTED, counts),
    )


def loss_count(loss_sum: float) -> int:
    """A finite sum of losses as a count. One past what a count holds is told as that: the values of a model may have
    any scale, and a device whose loss is large must not be left out for it."""
    return round(max(-m.MAX_COUNT, min(loss_sum * m.LOSS_UNIT, m.MAX_COUNT)))


def _split(name: str, squares: float) -> dict[str, int]:
    if not squares < m.MAX_COUNT:
        # Also what is no number: int8 that says nothing sensible errs without bound.
        return {name: m.MAX_COUNT, name + REST: 0}
    whole = math.floor(squares)
    return {name: whole, name + REST: round((squares - whole) * REST_UNIT)}


def _joined(name: str, counts: Mapping[str, int]) -> float:
    return counts.get(name, 0) + counts.get(name + REST, 0) / REST_UNIT
