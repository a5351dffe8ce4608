"""The integer weight of one Update.

It is a pure function of the Update's header, so that ``fanin verify`` computes the same.
"""

import math
from collections.abc import Mapping

from fanin.edge.codecs.vector import Weighting
from fanin.protos.messages import EXAMPLES, UpdateHeader
from fanin.protos.plans import WEIGHT_UNIT


def weights_of(header: UpdateHeader, max_examples: int, staleness: int = 0) -> Mapping[Weighting, int]:
    """Return the integer weight of an Update in groups of each weighting.

    One example weighs round(256 / sqrt(1 + staleness)). In the group of the parameters an Update has the weight of its
    examples, capped: exactly FedAvg's weighting, if it is fresh. In groups with equal weights of all devices it has the
    weight of one example. So the headroom of the parameters is enough for all groups. The square root and the division
    follow IEEE 754, so every machine computes the same integers.

    Args:
        header: The Update's header.
        max_examples: The largest number of examples that counts.
        staleness: Versions between the Update's base Version and the one of the Round that folds it.

    Reference:
        Nguyen et al. 2022, Federated Learning with Buffered Asynchronous Aggregation (FedBuff), arXiv 2106.06639,
        section 5.2.
    """
    one = round(WEIGHT_UNIT / math.sqrt(1 + staleness))
    return {Weighting.EXAMPLES: min(header.statistics.counts[EXAMPLES], max_examples) * one, Weighting.ONE: one}
