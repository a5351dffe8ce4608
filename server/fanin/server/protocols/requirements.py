"""What a protocol with rosters or masks needs of a Plan. A Plan without it is refused before its Run begins."""

from fanin.edge.rings import WIDE, Ring, largest_weight, smallest_ring
from fanin.protos.errors import InvalidPlan
from fanin.protos.plans import BY_EXAMPLES, DEVICES, EXPORT, Plan


def ring_of(plan: Plan) -> Ring:
    """Return the smallest ring that is proven to hold the sum of each Round of a Plan, if devices apply the weights.

    A Round has at most ``cohort.buffer`` Updates, whose weights are at most ``aggregation.max_examples`` each.

    Raises:
        InvalidPlan: No ring of 64 bits holds it, or a device does not know its weight.
    """
    weights = plan.aggregation.weights
    if weights != BY_EXAMPLES and plan.max_examples > 1:
        raise InvalidPlan(
            f"plan: aggregation.weights: got {weights!r} with round.protocol {plan.round.protocol!r}, expected "
            f"{BY_EXAMPLES!r}: devices apply their weights under the masks; set aggregation.max_examples = 1 for equal "
            "weights",
            code="FN-1853",
        )
    try:
        return smallest_ring(plan.codec.bits, plan.cohort.buffer * plan.max_examples)
    except ValueError as exc:
        most = largest_weight(WIDE, plan.codec.bits)
        raise InvalidPlan(
            f"plan: the masked sum of a Round could overflow ({exc}): {plan.codec.bits} bits of {plan.codec.name}, "
            f"cohort.buffer {plan.cohort.buffer} and a weight of at most {plan.max_examples}, expected a buffer of at "
            f"most {most // plan.max_examples}, or a weight of at most {most // plan.cohort.buffer}; set or lower "
            "aggregation.max_examples",
            code="FN-1624",
        ) from exc


def check_rosters(plan: Plan) -> None:
    """Raise InvalidPlan if Updates may count of devices that no roster of the Round names."""
    cohort, staleness = plan.cohort, plan.aggregation.max_staleness
    if cohort.buffer < cohort.concurrency or staleness:
        raise InvalidPlan(
            f"plan: round.protocol: got {plan.round.protocol!r} with cohort.buffer {cohort.buffer}, cohort.concurrency "
            f"{cohort.concurrency} and aggregation.max_staleness {staleness}, expected a buffer that equals the "
            "concurrency, and 0: its Rounds know their devices before the training; change these keys",
            code="FN-1601",
        )


def check_masks(plan: Plan) -> None:
    """Raise InvalidPlan if a key needs to see an Update that is masked."""
    ranges = plan.int8.ranges
    for key, value, expected in (
        ("codec.max_shift", plan.codec.max_shift, 0),
        ("int8.ranges", ranges, EXPORT if ranges == DEVICES else ranges),
        ("participants.min_examples", plan.participants.min_examples, 0),
    ):
        if value != expected:
            raise InvalidPlan(
                f"plan: {key}: got {value!r} with round.protocol {plan.round.protocol!r}, expected {expected!r}: the "
                f"coordinator sees the sum of the Updates alone; set {key} to {expected!r}",
                code="FN-1601",
            )
