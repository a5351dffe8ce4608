"""How much one Update counts: its integer weight.

It is a pure function of the Update's header, so that ``fanin verify`` computes the same.
"""

import math

from fanin.protos.messages import EXAMPLES, UpdateHeader
from fanin.protos.plans import WEIGHT_UNIT


def weight_of(header: UpdateHeader, max_examples: int, staleness: int = 0) -> int:
    """Return the integer weight of an Update: its examples, times round(256 / sqrt(1 + staleness)).

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
