"""How much one Update counts: its integer weight, and its statistics capped like the weight.

Both are pure functions of the Update's header and the Plan, so that ``fanin verify`` computes the same.
"""

import math
from collections.abc import Mapping
from typing import Final

from fanin.edge.runtimes.evaluations import REST, REST_UNIT, SQUARES_FLOAT, SQUARES_INT8, SQUARES_WANTED
from fanin.protos.messages import (
    EVAL_AGREE,
    EVAL_CORRECT_FLOAT,
    EVAL_CORRECT_INT8,
    EVAL_EXAMPLES,
    EVAL_LOSS,
    EVAL_PREDICTIONS,
    EXAMPLES,
    TRAIN_LOSS,
    UpdateHeader,
)
from fanin.protos.plans import WEIGHT_UNIT

SQUARES: Final = (SQUARES_FLOAT, SQUARES_INT8, SQUARES_WANTED)
"""Statistics of a model of values: sums of squares."""
CLASS_COUNTS: Final = frozenset({EVAL_PREDICTIONS, EVAL_CORRECT_FLOAT, EVAL_CORRECT_INT8, EVAL_AGREE})
"""Statistics of a classifier: counts of predictions."""


def weight_of(header: UpdateHeader, max_examples: int, staleness: int = 0) -> int:
    """Return the integer weight of an Update: its examples, capped, times round(256 / sqrt(1 + staleness)).

    A fresh Update weighs 256 for each example, which is exactly FedAvg's weighting. The square root and the division
    follow IEEE 754, so every machine computes the same integer.

    Args:
        header: The Update's header.
        max_examples: The largest number of examples that counts.
        staleness: Versions between the Update's base Version and the one of the Round that folds it.

    Reference:
        Nguyen et al. 2022, Federated Learning with Buffered Asynchronous Aggregation (FedBuff), arXiv 2106.06639,
        section 5.2.
    """
    examples = min(header.statistics.counts[EXAMPLES], max_examples)
    return examples * round(WEIGHT_UNIT / math.sqrt(1 + staleness))


def capped_counts(header: UpdateHeader, max_examples: int) -> Mapping[str, int]:
    """Return the statistics of an Update as they are summed, for at most ``max_examples`` examples, like its weight.

    Sums over more training or validation examples are scaled down to that many and rounded down.
    """
    counts = dict(header.statistics.counts)
    num_examples, num_evaluated = counts.get(EXAMPLES, 0), counts.get(EVAL_EXAMPLES, 0)
    if num_examples > max_examples:
        for name in (EXAMPLES, TRAIN_LOSS):
            counts[name] = counts.get(name, 0) * max_examples // num_examples
    if num_evaluated > max_examples:
        for name in {EVAL_EXAMPLES, EVAL_LOSS, *CLASS_COUNTS} & set(counts):
            counts[name] = counts[name] * max_examples // num_evaluated
        for name in set(SQUARES) & set(counts):
            squares = counts[name] * REST_UNIT + counts.get(name + REST, 0)
            counts[name], counts[name + REST] = divmod(squares * max_examples // num_evaluated, REST_UNIT)
    return counts
