"""The section ``retention`` of a Plan: how long the coordinator keeps what a Run no longer needs.

A key that is absent keeps nothing by itself; without any key everything is kept. What one key keeps stays, whatever the
others say. So the limits add up, and a larger value never removes more.
"""

from dataclasses import dataclass
from typing import Annotated, Final

from fanin.protos.errors import InvalidPlan
from fanin.protos.plans.keys import Key, range_problem
from fanin.protos.plans.sections import MAX_TIMES

PAGE: Final = "../howto/retention.md"
MAX_DAYS: Final = 36_500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPlan:
    """What the coordinator keeps of the past of a Run. It changes no Round."""

    keep_versions: Annotated[
        int | None,
        Key(
            text="The parameters of so many newest Versions are kept. Absent, without `keep_days`: those of all.",
            unit="Versions",
            at_least=1,
            at_most=MAX_TIMES,
            see=PAGE,
        ),
    ] = None
    keep_updates: Annotated[
        int | None,
        Key(
            text="The Updates of so many newest Rounds with a Version are kept, so that `fanin verify` recomputes "
            "these Versions. 0: none, an Update is removed after its Round. Absent, without `keep_days`: those of all.",
            unit="Rounds",
            at_least=0,
            at_most=MAX_TIMES,
            see=PAGE,
        ),
    ] = None
    keep_days: Annotated[
        float | None,
        Key(
            text="Parameters, Updates and events are kept for so many days at least.",
            unit="days",
            at_least=0,
            at_most=MAX_DAYS,
            see=PAGE,
        ),
    ] = None

    def __post_init__(self) -> None:
        if problem := range_problem(self, "retention"):
            raise InvalidPlan(f"plan: {problem}", code="FN-0201")

    def __bool__(self) -> bool:
        """Whether anything may be removed."""
        return (self.keep_versions, self.keep_updates, self.keep_days) != (None, None, None)


def check_needed(retention: RetentionPlan, max_staleness: int) -> None:
    """Raise InvalidPlan if ``keep_versions`` removes what a kept Update needs to be folded again."""
    versions, updates = retention.keep_versions, retention.keep_updates
    if versions is None or not updates:
        return
    least = updates + 1 + max_staleness
    if versions < least:
        stale = f" and {max_staleness} before, for stale Updates" if max_staleness else ""
        raise InvalidPlan(
            f"plan: retention: got keep_updates {updates} with keep_versions {versions}: verify needs the Version "
            f"before these Rounds, too{stale}; expected keep_versions {least} or more, or fewer keep_updates",
            code="FN-1440",
        )
