"""The round machine: the state of one Round, and protocols that change it by a transition table.

Rule 1: every transition of a Round is a row of its protocol. The diagram in docs/explanation/rounds.md is generated
from the rows.
Rule 2: no clock, no IO, no randomness. ``step(event, now)`` returns the next Round and its effects. The driver
carries the effects out and reports each result as the next event.
Rule 3: an event without a row in the protocol raises ``IllegalEvent`` and changes nothing.
Rule 4: every phase has a failure exit. ``Failed`` is legal until the Round has ended.
Rule 5: the cost of an event hardly grows with the number of devices. Their names are in persistent sets: a changed copy
shares all but a few nodes with the original. Only the event ``Closed``, once in a Round, has a list of names.

``now`` and ``deadline`` are seconds on one monotonic clock, which the caller chooses.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from rpds import HashTrieSet

from fanin.protos.messages import RoundPhase
from fanin.server.rounds import events as e
from fanin.server.selection.coverage import Lack

EXTENSIONS_PER_DEADLINE: Final = 20
"""A device that is silent for a twentieth of the deadline is gone, so one that makes progress has reported by then."""
MIN_STEP_S: Final = 1.0
"""Each step is two writes to the record."""
NO_LACK: Final = Lack()


class IllegalEvent(Exception):
    """An event that the phase does not allow. It is always a bug of the coordinator, never a peer's error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The Plan's settings for a Round; see ``protos.plans.CohortPlan``.

    ``late_counts``: an Update that comes after the Round may count in the next one. ``waits``: a Round that lacks
    required participants at its deadline waits for them.
    """

    concurrency: int
    buffer: int
    quorum: int
    deadline_s: float
    min_report_s: float = math.inf
    report_factor: float = 1.0
    late_counts: bool = False
    max_extension_s: float = 0.0
    waits: bool = False

    @property
    def step_s(self) -> float:
        """Seconds by which the deadline moves at once, and between two looks at a Round that waits."""
        return max(self.deadline_s / EXTENSIONS_PER_DEADLINE, MIN_STEP_S)

    @property
    def is_adaptive(self) -> bool:
        """Whether a Round with a quorum may close before its deadline."""
        return math.isfinite(self.min_report_s) and math.isfinite(self.report_factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohort:
    """The devices of a Round.

    Attributes:
        at_work: Devices that hold a place. Some may work for an earlier Round, and their Updates count in this one.
        accepted: Devices whose Updates are committed.
        gave_up: Devices that gave up in this Round.
    """

    at_work: "HashTrieSet[str]" = field(default_factory=HashTrieSet)
    accepted: "HashTrieSet[str]" = field(default_factory=HashTrieSet)
    gave_up: "HashTrieSet[str]" = field(default_factory=HashTrieSet)

    @property
    def num_taken(self) -> int:
        """Number of places that are taken, by devices at work and by committed Updates."""
        return len(self.at_work) + len(self.accepted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The state of one Round.

    Attributes:
        protocol: The transition table.
        rules: The Plan's settings.
        phase: The current phase.
        cohort: The devices. Empty once the set of Updates is recorded, because the record then has their names.
        deadline: When the Round closes. None until a quorum of devices takes part, because fewer devices can never
            produce a Version. None while the Round is paused.
        left_s: Seconds to the deadline when the Round was paused.
        quorum_s: Seconds from the start of the deadline to the Update that completed the quorum, None before that.
        was_resumed: Whether the Round was under way when the coordinator ended.
        lack: The required participants that are missing.
        extension_s: Seconds by which the deadline has moved for devices that make progress.
        overdue_at: When the Round looks again for missing participants; None before its deadline.
        may_have_progress: Whether devices may be at work of which this process does not know, after a restart.
    """

    protocol: "RoundProtocol"
    rules: Rules
    phase: RoundPhase = RoundPhase.SELECTING
    cohort: Cohort = Cohort()
    deadline: float | None = None
    left_s: float | None = None
    quorum_s: float | None = None
    was_resumed: bool = False
    lack: Lack = NO_LACK
    extension_s: float = 0.0
    overdue_at: float | None = None
    may_have_progress: bool = False

    def step(self, event: e.Event, now: float) -> tuple["Round", tuple[e.Effect, ...]]:
        """Return the Round after ``event`` and its effects. Raises IllegalEvent, and then changes nothing."""
        row = self.protocol.rows.get((self.phase, type(event)))
        if row is None:
            raise IllegalEvent(f"round: {type(event).__name__} in phase {self.phase.value}")
        after, effects = row.rule(self, event, now)
        assert after.phase in row.targets, f"{row.rule.__name__} went to {after.phase}"
        return after, effects

    @property
    def wake_at(self) -> float | None:
        """When time alone may close the Round: at the deadline or, with a quorum, after the wait for the others.

        That wait ends at once if no device is at work and none may begin any more.
        """
        if self.deadline is None or not self.assigns:
            return None
        if self.overdue_at is not None:
            return self.overdue_at
        if self.lack:
            # The quorum alone does not suffice.
            return self.deadline
        report_at, begins_until = self._report_at, self._begins_until
        if report_at is None:
            return self.deadline
        return report_at if self.cohort.at_work or begins_until is None else begins_until

    def may_extend(self, now: float) -> bool:
        """Return whether the deadline has come, and may still move."""
        return self.deadline is not None and now >= self.deadline and self.extension_s < self.rules.max_extension_s

    def num_places(self, now: float) -> int:
        """Return the number of devices that can be assigned now."""
        begins_until = self._begins_until
        if self.phase is not RoundPhase.SELECTING or (begins_until is not None and now >= begins_until):
            return 0
        # The Update of a device that was gone may come after its place was taken.
        return max(self.rules.concurrency - self.cohort.num_taken, 0)

    @property
    def _report_at(self) -> float | None:
        """When the quorum closes the Round, None without a quorum."""
        rules = self.rules
        if self.deadline is None or self.quorum_s is None:
            return None
        if not rules.is_adaptive:
            return self.deadline
        report_s = max(rules.min_report_s, rules.report_factor * self.quorum_s)
        return min(self.deadline - self.extension_s - rules.deadline_s + report_s, self.deadline)

    @property
    def _begins_until(self) -> float | None:
        """Until when a device may begin, None for as long as the Round is open.

        After the quorum, a device begins only if the Round still waits for as long as the quorum took.
        """
        report_at = self._report_at
        if (
            self.lack
            or report_at is None
            or self.quorum_s is None
            or not self.rules.is_adaptive
            or self.rules.late_counts
        ):
            return None
        return report_at - self.quorum_s

    @property
    def is_open(self) -> bool:
        """Whether the Round accepts Updates."""
        return self.phase in (*ASSIGNING, RoundPhase.PAUSED)

    @property
    def assigns(self) -> bool:
        """Whether devices receive Assignments: new devices if a place is free, devices at work the same one again."""
        return self.phase in ASSIGNING

    @property
    def has_ended(self) -> bool:
        """Whether the next Round may be opened."""
        return self.phase in (RoundPhase.PUBLISHED, RoundPhase.FAILED)

    def may_join(self, device: str, now: float) -> bool:
        """Return whether a device may have one of the free places now."""
        cohort = self.cohort
        return device not in cohort.at_work and device not in cohort.accepted and self.num_places(now) > 0


ASSIGNING: Final = (RoundPhase.SELECTING, RoundPhase.TRAINING)
"""The phases in which devices receive Assignments."""
Outcome = tuple[Round, tuple[e.Effect, ...]]
"""The Round after an event, and the effects to carry out."""
Rule = Callable[[Round, e.Event, float], Outcome]
"""The effect of an event: a pure function of the Round, the event and the time."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One row of a table: the rule, and the phases that it may lead to."""

    rule: Rule
    targets: frozenset[RoundPhase]


Key = tuple[RoundPhase, type[e.Event]]
"""A phase and the type of an event."""
Rows = Mapping[Key, Transition]
"""Rows of a table, by phase and event. A protocol is composed of several such groups."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundProtocol:
    """The transition table of Rounds of one kind. To add a protocol, compose its own rows with shared ones.

    Attributes:
        name: The name of the protocol.
        first: The phase in which a Round begins.
        rows: All rows.
    """

    name: str
    first: RoundPhase
    rows: Rows


def row(rule: Rule, *targets: RoundPhase) -> Transition:
    """Return one row of a table."""
    return Transition(rule, frozenset(targets))


def compose(name: str, first: RoundPhase, *groups: Rows) -> RoundProtocol:
    """Return the protocol that has the rows of all groups.

    Args:
        name: The name of the protocol.
        first: The phase in which a Round begins.
        groups: Groups of rows.

    Raises:
        ValueError: Two groups have a row for the same phase and event, or a phase has no failure exit. Or a row leads
            to a phase that has no row and does not end the Round.
    """
    rows: dict[Key, Transition] = {}
    for group in groups:
        if twice := sorted(f"{phase.value}, {event.__name__}" for phase, event in rows.keys() & group.keys()):
            raise ValueError(f"protocol {name}: got two rows for ({twice[0]}), expected one")
        rows |= group
    phases = {phase for phase, _ in rows}
    targets: Iterable[RoundPhase] = frozenset[RoundPhase]().union(*(one.targets for one in rows.values())) | {first}
    for phase in sorted(targets, key=list(RoundPhase).index):
        if phase not in phases and phase not in (RoundPhase.PUBLISHED, RoundPhase.FAILED):
            raise ValueError(f"protocol {name}: got no row for phase {phase.value}, which some row leads to")
    for phase in sorted(phases, key=list(RoundPhase).index):
        exit_row = rows.get((phase, e.Failed))
        if exit_row is None or exit_row.targets != {RoundPhase.FAILED}:
            raise ValueError(f"protocol {name}: got no failure exit for phase {phase.value}, expected a row for Failed")
    return RoundProtocol(name=name, first=first, rows=MappingProxyType(rows))


def diagram(protocol: RoundProtocol) -> str:
    """Return the state diagram of a protocol as Mermaid text, for docs/explanation/rounds.md."""
    order = list(RoundPhase).index
    lines = ["stateDiagram-v2", f"    [*] --> {protocol.first.value}"]
    for (phase, event), row in sorted(protocol.rows.items(), key=lambda item: order(item[0][0])):
        for target in sorted(row.targets, key=order):
            if target is not phase:
                lines.append(f"    {phase.value} --> {target.value}: {event.__name__}")
    lines += [f"    {phase.value} --> [*]" for phase in (RoundPhase.PUBLISHED, RoundPhase.FAILED)]
    return "\n".join(lines) + "\n"
