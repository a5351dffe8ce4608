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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from rpds import HashTrieSet

from fanin.edge.rings import Correction, Ring, RingVector
from fanin.server.protocols import events as e
from fanin.server.protocols.phases import FAILED, PAUSED, PUBLISHED, SELECTING, SHARED, Phase, RoundFacts
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
        only: The devices that alone may take part; None: any device.
        extension_s: Seconds by which the deadline has moved for devices that make progress.
        overdue_at: When the Round looks again for missing participants; None before its deadline.
        may_have_progress: Whether devices may be at work of which this process does not know, after a restart.
        paused_from: The phase in which the Round was paused; None unless it is paused.
        members: The last roster: the devices that take part from now on. Empty before the first one.
        sent: The devices whose message of the phase is recorded.
        num_rosters: The number of rosters that are recorded. The closed set is one of them.
        is_freezing: Whether the roster of the phase is being recorded.
        closed: The closed set, until the sum of its Updates is ordered; empty before that.
    """

    protocol: "RoundProtocol"
    rules: Rules
    phase: Phase = SELECTING
    cohort: Cohort = Cohort()
    deadline: float | None = None
    left_s: float | None = None
    quorum_s: float | None = None
    was_resumed: bool = False
    lack: Lack = NO_LACK
    only: frozenset[str] | None = None
    extension_s: float = 0.0
    overdue_at: float | None = None
    may_have_progress: bool = False
    paused_from: Phase | None = None
    members: "HashTrieSet[str]" = field(default_factory=HashTrieSet)
    sent: "HashTrieSet[str]" = field(default_factory=HashTrieSet)
    num_rosters: int = 0
    is_freezing: bool = False
    closed: tuple[str, ...] = ()

    def step(self, event: e.Event, now: float) -> tuple["Round", tuple[e.Effect, ...]]:
        """Return the Round after ``event`` and its effects. Raises IllegalEvent, and then changes nothing."""
        row = self.protocol.rows.get((self.phase, type(event)))
        if row is None:
            raise IllegalEvent(f"round: {type(event).__name__} in phase {self.phase}")
        after, effects = row.rule(self, event, now)
        assert after.phase in row.targets, f"{row.rule.__name__} went to {after.phase}"
        return after, effects

    @property
    def wake_at(self) -> float | None:
        """When time alone may close the Round: at the deadline or, with a quorum, after the wait for the others.

        That wait ends at once if no device is at work and none may begin any more.
        """
        if self.deadline is None or not self.assigns or self.is_freezing:
            return None
        if self.overdue_at is not None:
            return self.overdue_at
        if self.lack:
            # The quorum alone does not suffice.
            return self.deadline
        report_at, begins_until = self._report_at, self._begins_until
        if report_at is None:
            return self.deadline
        return report_at if self.cohort.at_work or self.closed or begins_until is None else begins_until

    def may_extend(self, now: float) -> bool:
        """Return whether the deadline has come, and may still move."""
        return self.deadline is not None and now >= self.deadline and self.extension_s < self.rules.max_extension_s

    def num_places(self, now: float) -> int:
        """Return the number of devices that can be assigned now."""
        begins_until = self._begins_until
        if not self.phase.gives_places or self.is_freezing or (begins_until is not None and now >= begins_until):
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
        return min(self.deadline - self.extension_s - self.window_s + report_s, self.deadline)

    @property
    def _begins_until(self) -> float | None:
        """Until when a device may begin, None for as long as the Round is open.

        After the quorum, a device begins only if the Round still waits for as long as the quorum took.
        """
        report_at = self._report_at
        if report_at is not None and not self.protocol.first.accepts_updates and self.working.accepts_updates:
            # The roster is frozen: no device begins any more.
            return -math.inf
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
    def working(self) -> Phase:
        """The phase or, of a paused Round, the one in which it was paused."""
        return self.paused_from if self.phase is PAUSED and self.paused_from is not None else self.phase

    @property
    def accepts_updates(self) -> bool:
        """Whether Updates are committed now."""
        return self.working.accepts_updates

    @property
    def is_open(self) -> bool:
        """Whether Updates are committed now, or in a later phase."""
        return self.accepts_updates or (self.working.exchange is not None and not self.closed)

    @property
    def assigns(self) -> bool:
        """Whether devices receive Assignments: new devices if a place is free, devices at work the same one again."""
        return self.phase.assigns

    @property
    def has_ended(self) -> bool:
        """Whether the next Round may be opened."""
        return self.phase.has_ended

    @property
    def quorum(self) -> int:
        """The least number of messages of the phase, or of Updates."""
        exchange = self.working.exchange
        return self.rules.quorum if exchange is None or exchange.quorum is None else exchange.quorum

    @property
    def window_s(self) -> float:
        """Seconds from the start of the phase's deadline to its end, without extensions."""
        exchange = self.working.exchange
        return self.rules.deadline_s if exchange is None or exchange.deadline_s is None else exchange.deadline_s

    def leaves_out(self, device: str) -> bool:
        """Return whether the last roster was frozen without a device."""
        return bool(self.members) and device not in self.members

    def may_join(self, device: str, now: float) -> bool:
        """Return whether a device may have one of the free places now."""
        if self.only is not None and device not in self.only:
            return False
        return not self.holds(device) and device not in self.cohort.accepted and self.num_places(now) > 0

    def holds(self, device: str) -> bool:
        """Return whether a device takes part in the phase, so that it receives its Assignment again."""
        cohort = self.cohort
        if device in cohort.at_work:
            return True
        # After its Update, a device still takes part if the protocol has messages after the closed set.
        is_needed = bool(self.closed) or (device in cohort.accepted and bool(self.protocol.after_close))
        return is_needed and device in self.members and not (self.closed and device in self.sent)


Outcome = tuple[Round, tuple[e.Effect, ...]]
"""The Round after an event, and the effects to carry out."""
Rule = Callable[[Round, e.Event, float], Outcome]
"""The effect of an event: a pure function of the Round, the event and the time."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One row of a table: the rule, and the phases that it may lead to."""

    rule: Rule
    targets: frozenset[Phase]


Key = tuple[Phase, type[e.Event]]
"""A phase and the type of an event."""
Rows = Mapping[Key, Transition]
"""Rows of a table, by phase and event. A protocol is composed of several such groups."""


Begin = Callable[[Round, float], Outcome]
"""Begins a Round: a pure function of its state and the time."""
Correct = Callable[[RoundFacts], Correction]
"""Returns the correction of a sum: a pure function of the recorded facts, for the coordinator and ``fanin verify``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundProtocol:
    """The transition table of Rounds of one kind. To add a protocol, compose its own rows with shared ones.

    Attributes:
        name: The name of the protocol.
        first: The phase in which a Round begins.
        rows: All rows.
        phases: The phases by name.
        begin: Returns a Round that begins at a time, and its effects.
        after_close: The names of the phases after the set of Updates is closed.
        correct: Returns what the fold adds to the sum of the closed set; None: nothing.
        ring: The ring of the sum; None: the sum never wraps.
        is_masked: Whether Updates are masked. Their payload is a ``RingVector`` whose tail has the statistics of the
            Run. It needs a ring.
        num_honest: The least number of devices in a sum that do not help the coordinator, for whom noise on devices is
            scaled; 0 if the protocol promises none.
    """

    name: str
    first: Phase
    rows: Rows
    phases: Mapping[str, Phase]
    begin: Begin
    after_close: frozenset[str] = frozenset()
    correct: Correct | None = None
    ring: Ring | None = None
    is_masked: bool = False
    num_honest: int = 0

    def vector(self, num_values: int, num_statistics: int) -> RingVector | None:
        """Return the layout of a masked Update; None if Updates are not masked."""
        if self.ring is None or not self.is_masked:
            return None
        return RingVector(ring=self.ring, num_values=num_values, num_tail=num_statistics)


def row(rule: Rule, *targets: Phase) -> Transition:
    """Return one row of a table."""
    return Transition(rule, frozenset(targets))


def compose(name: str, first: Phase, begin: Begin, *groups: Rows) -> RoundProtocol:
    """Return the protocol that has the rows of all groups.

    Args:
        name: The name of the protocol.
        first: The phase in which a Round begins.
        begin: Begins a Round.
        groups: Groups of rows.

    Raises:
        ValueError: Two groups have a row for the same phase and event, two phases have one name, or a phase has no
            failure exit. Or a row leads to a phase that has no row and does not end the Round.
    """
    rows: dict[Key, Transition] = {}
    for group in groups:
        if twice := sorted(f"{phase}, {event.__name__}" for phase, event in rows.keys() & group.keys()):
            raise ValueError(f"protocol {name}: got two rows for ({twice[0]}), expected one")
        rows |= group
    begun = {phase for phase, _ in rows}
    reached: set[Phase] = {first}.union(*(one.targets for one in rows.values()))
    phases: dict[str, Phase] = {}
    for phase in sorted(begun | reached, key=str):
        if phases.setdefault(phase.name, phase) is not phase:
            raise ValueError(f"protocol {name}: got two phases with the name {phase}, expected one")
    for phase in sorted(reached - begun, key=str):
        if not phase.has_ended:
            raise ValueError(f"protocol {name}: got no row for phase {phase}, which some row leads to")
    for phase in sorted(begun, key=str):
        exit_row = rows.get((phase, e.Failed))
        if exit_row is None or exit_row.targets != {FAILED}:
            raise ValueError(f"protocol {name}: got no failure exit for phase {phase}, expected a row for Failed")
    return RoundProtocol(
        name=name, first=first, rows=MappingProxyType(rows), phases=MappingProxyType(phases), begin=begin
    )


def diagram(protocol: RoundProtocol) -> str:
    """Return the state diagram of a protocol as Mermaid text, for docs/explanation/rounds.md."""
    # Its own phases first, as its rows have them; then the shared ones.
    own = [phase for phase in dict.fromkeys(phase for phase, _ in protocol.rows) if phase not in SHARED]
    order = {phase: index for index, phase in enumerate((*own, *SHARED[1:], SHARED[0]))}
    lines = ["stateDiagram-v2", f"    [*] --> {protocol.first}"]
    for (phase, event), row in sorted(protocol.rows.items(), key=lambda item: order[item[0][0]]):
        for target in sorted(row.targets, key=order.__getitem__):
            if target is not phase:
                lines.append(f"    {phase} --> {target}: {event.__name__}")
    lines += [f"    {phase} --> [*]" for phase in (PUBLISHED, FAILED)]
    return "\n".join(lines) + "\n"
