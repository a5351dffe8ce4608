"""The robust rules by name: their options, and what they demand of a Plan."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Final

from fanin.protos.errors import InvalidPlan
from fanin.protos.plans import Plan
from fanin.protos.plans.keys import Key
from fanin.server.aggregation.robust.centre import CentredClipping, GeometricMedian
from fanin.server.aggregation.robust.middle import MeanAroundMedian, Median
from fanin.server.aggregation.robust.nearest import Bulyan, Krum

NumAttackers = Annotated[int, Key(text="The largest number of Updates of a Round that may be lies.", at_least=0)]


def _check_quorum(plan: Plan, num_attackers: int, factor: int, others: int) -> None:
    """Raise InvalidPlan unless the smallest Round has at least ``factor * f + others`` Updates."""
    least, quorum = factor * num_attackers + others, plan.cohort.quorum
    if quorum < least:
        raise InvalidPlan(
            f"plan: got aggregation.rule_options.f {num_attackers} and cohort.quorum {quorum} with the rule "
            f"{plan.aggregation.rule}, expected a quorum of at least {factor} x f + {others} = {least}; raise "
            "cohort.quorum, or lower f",
            code="FN-1800",
        )


def _median(_plan: Plan) -> Median:
    return Median()


def _krum(plan: Plan, *, f: NumAttackers) -> Krum:
    _check_quorum(plan, f, 2, 3)
    return Krum(f, 1)


def _multi_krum(
    plan: Plan,
    *,
    f: NumAttackers,
    m: Annotated[int | None, Key(text="Number of Updates in the mean; all but f if it is absent.", at_least=1)] = None,
) -> Krum:
    _check_quorum(plan, f, 2, 3)
    if m is not None and m > plan.cohort.quorum - f:
        raise InvalidPlan(
            f"plan: got aggregation.rule_options.m {m} with f {f} and cohort.quorum {plan.cohort.quorum}, expected at "
            f"most quorum - f = {plan.cohort.quorum - f}, because more would include a lie; lower m",
            code="FN-1801",
        )
    return Krum(f, m)


def _meamed(plan: Plan, *, f: NumAttackers) -> MeanAroundMedian:
    _check_quorum(plan, f, 2, 1)
    return MeanAroundMedian(f)


def _bulyan(plan: Plan, *, f: NumAttackers) -> Bulyan:
    _check_quorum(plan, f, 4, 3)
    return Bulyan(f)


def _geometric_median(
    _plan: Plan,
    *,
    iterations: Annotated[int, Key(text="Number of Weiszfeld steps.", at_least=1, at_most=100)] = 20,
    smoothing: Annotated[
        float,
        Key(text="The least distance in a step, in the unit of the parameters.", at_least=2.0**-60, below=math.inf),
    ] = 1e-6,
) -> GeometricMedian:
    return GeometricMedian(iterations, smoothing)


Radius = Annotated[
    float, Key(text="The largest norm of an Update, in the unit of the parameters.", above=0, below=math.inf)
]


def _centred_clipping(
    _plan: Plan,
    *,
    radius: Radius,
    iterations: Annotated[int, Key(text="Number of steps of the centre.", at_least=1, at_most=100)] = 3,
) -> CentredClipping:
    return CentredClipping(iterations, radius)


def _norm_bounding(_plan: Plan, *, radius: Radius) -> CentredClipping:
    return CentredClipping(1, radius)


RobustRule = Median | MeanAroundMedian | Krum | Bulyan | GeometricMedian | CentredClipping
ROBUST_RULES: Final[Mapping[str, Callable[..., RobustRule]]] = MappingProxyType(
    {
        "median": _median,
        "krum": _krum,
        "multi_krum": _multi_krum,
        "meamed": _meamed,
        "bulyan": _bulyan,
        "geometric_median": _geometric_median,
        "centred_clipping": _centred_clipping,
        "norm_bounding": _norm_bounding,
    }
)
"""The rules of this room, by name."""
