"""The section ``cohort`` of a Plan: the size of a Round, and when it closes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Annotated, Final

from fanin.protos.errors import InvalidPlan
from fanin.protos.names import NAME_FORM, is_name
from fanin.protos.plans.entries import OPTIONS, Option
from fanin.protos.plans.keys import DerivedDefault, Key, range_problem

MAX_COHORT: Final = 1_000_000
COHORT_SECTION: Final = "../howto/cohort.md"


def _default_quorum(cohort: Mapping[str, object]) -> int:
    """Return three quarters of the buffer, rounded up: 1 of 1, 2 of 2, 3 of 3, 3 of 4, 6 of 8."""
    buffer = cohort["buffer"]
    assert isinstance(buffer, int), "the type of a key is checked before the defaults of others derive from it"
    return -(-3 * buffer // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class CohortPlan:
    """Size and deadlines of a Round."""

    concurrency: Annotated[
        int,
        Key(
            text="Devices that work at the same time.",
            unit="devices",
            at_least=1,
            at_most=MAX_COHORT,
            see=COHORT_SECTION,
        ),
    ]
    buffer: Annotated[
        int,
        Key(
            text="Updates that close the Round at once. Equal to `concurrency`: FedAvg.",
            unit="Updates",
            at_least=1,
            at_most=MAX_COHORT,
            derived=DerivedDefault(text="`concurrency`", value=itemgetter("concurrency")),
            see=COHORT_SECTION,
        ),
    ]
    quorum: Annotated[
        int,
        Key(
            text="Updates that suffice once the time for the others has passed. With fewer at the deadline, the Round "
            "fails and is repeated. Each missing one may be a dead device, or a slow one whose data are left out. 0 "
            'goes with `privacy.sampling = "coins"` alone.',
            unit="Updates",
            at_least=0,
            at_most=MAX_COHORT,
            derived=DerivedDefault(text="three quarters of `buffer`, rounded up", value=_default_quorum),
            see=COHORT_SECTION,
        ),
    ]
    deadline_s: Annotated[
        float,
        Key(
            text="Time until the deadline, counted from the Assignment that completes a quorum of devices. A Round "
            "without a quorum of Updates costs all of it. A device that dies costs a twentieth of it, at least 3 s.",
            unit="s",
            above=0,
            below=math.inf,
            see=COHORT_SECTION,
        ),
    ] = 600.0
    min_report_s: Annotated[
        float,
        Key(
            text="Shortest time from the same Assignment until a quorum closes the Round before its deadline. "
            "`inf`: only at the deadline.",
            unit="s",
            above=0,
            see=COHORT_SECTION,
        ),
    ] = 1.0
    report_factor: Annotated[
        float,
        Key(
            text="Multiple of the time that the quorum took, from the same Assignment, after which the quorum closes "
            "the Round. `1.0`: at once. `inf`: only at the deadline. With `2.0` a silent device costs at most the time "
            "that the quorum took. A device that is slower than that is left out.",
            at_least=1,
            see=COHORT_SECTION,
        ),
    ] = 2.0
    max_extension_s: Annotated[
        float,
        Key(
            text="Most time by which the deadline of a Round moves, in steps of a twentieth of `deadline_s`, while a "
            "device at work reports a higher step than before. `0.0`: never.",
            unit="s",
            at_least=0,
            below=math.inf,
            see="../howto/operate.md#long-rounds",
        ),
    ] = 0.0
    selection: Annotated[
        str,
        Key(
            text="Which of the waiting devices get the free places: `uniform`, `least_recent`, or a policy that is "
            "installed at the coordinator.",
            form=NAME_FORM,
            is_valid=is_name,
            see="../howto/selection.md",
        ),
    ] = "uniform"
    selection_options: Annotated[
        dict[str, Option],
        Key(
            text="The options of the policy. Those of fanin have none.",
            entries=OPTIONS,
            see="../howto/selection.md#a-policy-of-your-own",
        ),
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if problem := range_problem(self, "cohort"):
            raise InvalidPlan(f"plan: {problem}", code="FN-0201")
        check_quorum(self)


def check_quorum(cohort: CohortPlan) -> None:
    """`cohort.quorum` <= `cohort.buffer` <= `cohort.concurrency`."""
    if not cohort.quorum <= cohort.buffer <= cohort.concurrency:
        raise InvalidPlan(
            f"plan: cohort: got quorum {cohort.quorum}, buffer {cohort.buffer}, concurrency {cohort.concurrency}, "
            "expected quorum <= buffer <= concurrency; lower quorum or buffer, or raise concurrency",
            code="FN-0205",
        )
