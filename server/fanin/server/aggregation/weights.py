"""The integer weights of the Updates of a Round.

An Update weighs as many steps as its device has examples, up to ``max_examples`` of the Plan, or as many as
``aggregation.weights`` says. If the steps of a Round
exceed the head-room of its sum (``Plan.max_total_examples``), all weights are divided by one power of two: 2^scale.

    steps(n, scale) = max(1, n / 2^scale rounded to the nearest integer, halves up)

An Update without examples is refused before its commit (``runs.validation``), so each weight is at least 1.

``scale_of`` returns the smallest scale with which the steps of the set fit. It is a function of the set alone, whatever
the order. So ``fanin verify`` computes the same one, and partial sums of relays can be merged if all of them use the
scale of the whole set. More than half of the head-room is in use if the scale is above 0. So the share of an Update
differs from its exact share by at most n_updates / (half of the head-room), whatever one device claims.
"""

from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_EVEN, Context, Decimal, localcontext
from functools import lru_cache

import numpy as np

from fanin.edge.codecs.vector import Weighting
from fanin.protos.messages import EXAMPLES, UpdateHeader
from fanin.protos.plans import BY_SITE, UNIFORM, Plan


def examples_of(header: UpdateHeader, plan: Plan) -> int:
    """Return the number of examples that an Update counts as."""
    return min(header.statistics.counts[EXAMPLES], plan.max_examples)


def claim_of(header: UpdateHeader, plan: Plan, device: str) -> int:
    """Return the weight of an Update before the scale: its examples, one, or the weight of its device in the Plan."""
    if plan.aggregation.weights == UNIFORM:
        return 1
    if plan.aggregation.weights == BY_SITE:
        return plan.aggregation.site_weights.get(device, 1)
    return examples_of(header, plan)


def steps_of(examples: int, scale: int) -> int:
    """Return the weight of an Update in steps, at least one."""
    return max((examples + (1 << scale >> 1)) >> scale, 1)


def scale_of(examples: Sequence[int], most: int) -> int:
    """Return the smallest scale with which the steps of a set have a sum of at most ``most``.

    Args:
        examples: The number of examples that each Update counts as, each at least 1 and below 2^62.
        most: The largest sum, at least the number of Updates.
    """
    scale, numbers = 0, np.array(examples, np.int64)
    while int(np.maximum((numbers + (1 << scale >> 1)) >> scale, 1).sum()) > most:
        scale += 1
    return scale


class RunningScale:
    """The scale for Updates that are folded while others arrive. It only rises, so a sum is seldom folded again.

    When the steps exceed the head-room, the missing Updates of the Round are expected to resemble the present ones.

    Args:
        plan: The Plan.

    Attributes:
        value: The scale.
    """

    def __init__(self, plan: Plan) -> None:
        self.value = 0
        self._most = plan.max_total_examples
        self._num_places = plan.cohort.buffer
        self._examples: dict[str, int] = {}
        self._num_steps = 0

    def add(self, device: str, examples: int) -> None:
        """Add the Update of a device, unless that was done before."""
        if device in self._examples:
            return
        self._examples[device] = examples
        self._num_steps += steps_of(examples, self.value)
        if self._num_steps > self._most:
            known = list(self._examples.values())
            share = self._most * len(known) // max(self._num_places, len(known))
            self.value = scale_of(known, max(share, len(known)))
            self._num_steps = sum(steps_of(each, self.value) for each in known)


@lru_cache(maxsize=4096)
def stale_weight(unit: int, staleness: int, exponent: float) -> int:
    """Return the weight of a step of an Update: unit / (1 + staleness)^exponent, rounded, ties to even; at least 1.

    The power is computed in decimal arithmetic of 50 digits, which is software and exact about its rounding. So every
    machine computes the same integers. A power of float64 comes from the C library, whose last bit differs between
    machines (docs/decisions/0067).

    Args:
        unit: The weight of a step of a fresh Update.
        staleness: Versions between the Update's base Version and the one of the Round.
        exponent: ``aggregation.staleness_exponent``: as the Plan writes it, in the fewest decimal digits.
    """
    with localcontext(Context(prec=50, rounding=ROUND_HALF_EVEN)):
        return max(int((unit / Decimal(1 + staleness) ** Decimal(repr(exponent))).to_integral_value()), 1)


def weights_of(
    header: UpdateHeader, plan: Plan, *, device: str = "", scale: int = 0, staleness: int = 0
) -> Mapping[Weighting, int]:
    """Return the integer weight of an Update in groups of each weighting.

    In the group of the parameters an Update has the weight of its steps: exactly FedAvg's weighting, if it is fresh,
    the scale is 0 and the Plan weighs by examples. In groups with equal weights of all devices it has the weight of one
    step. So the headroom of the parameters is enough for all groups. In a Plan that allows staleness, a step weighs
    ``stale_weight``, otherwise 1.

    Args:
        header: The Update's header.
        plan: The Plan.
        device: The device of the Update.
        scale: The scale of the Round.
        staleness: Versions between the Update's base Version and the one of the Round that folds it.

    Reference:
        Nguyen et al. 2022, Federated Learning with Buffered Asynchronous Aggregation (FedBuff), arXiv 2106.06639,
        section 5.2, with the exponent 1/2. Xie et al. 2019, Asynchronous Federated Optimization, arXiv 1903.03934,
        section 5.2: the polynomial s_a(t) = (t + 1)^-a.
    """
    one = stale_weight(plan.weight_unit, staleness, plan.aggregation.staleness_exponent)
    return {Weighting.EXAMPLES: steps_of(claim_of(header, plan, device), scale) * one, Weighting.ONE: one}
