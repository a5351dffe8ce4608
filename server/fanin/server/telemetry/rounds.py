"""The parts of a Round, as the effects of the round machine show them.

    waiting      from the opening until a quorum of devices holds Assignments
    training     until the Round closes: devices download, train and upload, and their Updates are committed and added
    closing      the set of Updates is recorded
    folding      the sum is completed
    stepping     the outer step is computed, and the new parameters are stored
    publishing   the Version is signed and recorded

``RoundClock`` is an Observer. It reports each part, and the end of a Round, to its listeners. The parts that a Round
had behind it when the coordinator started are not reported.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from fanin.server.protocols import events as e
from fanin.server.protocols import phases
from fanin.server.protocols.phases import Phase


class RoundPart(Enum):
    """A part of a Round."""

    WAITING = "waiting"
    TRAINING = "training"
    CLOSING = "closing"
    FOLDING = "folding"
    STEPPING = "stepping"
    PUBLISHING = "publishing"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundName:
    """A Round, and the wall time of its opening, in seconds."""

    run_id: str
    round: int
    opened_at_s: float


class RoundListener(Protocol):
    """Receives what happens in Rounds. Times are wall times, in seconds."""

    def opened(self, name: RoundName) -> None:
        """Note that a Round was opened, or resumed after a start of the coordinator."""
        ...

    def passed(self, name: RoundName, part: RoundPart, began_s: float, ended_s: float) -> None:
        """Note the end of a part."""
        ...

    def ended(self, name: RoundName, ended_s: float, *, is_published: bool) -> None:
        """Note the end of a Round."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlace:
    """Where a Run is now.

    Attributes:
        name: The Round under way.
        phase: Its phase.
        has_deadline: Whether a quorum of devices holds Assignments.
        outer_step_at_s: Wall time at which the outer step began, None before that.
    """

    name: RoundName
    phase: Phase
    has_deadline: bool
    outer_step_at_s: float | None


FindPlace = Callable[[str], RunPlace | None]
"""Returns where a Run is, None between two Rounds or without a driver in this process."""


@dataclass(slots=True)
class _Running:
    """A Round under way. ``since_s`` is the begin of its current part, None if this process has not seen it."""

    name: RoundName
    part: RoundPart
    since_s: float | None
    has_ended: bool = False


class RoundClock:
    """An Observer that measures the parts of Rounds.

    Args:
        wall: The clock of the record, in seconds.
        listeners: Receive the parts.
    """

    def __init__(self, wall: Callable[[], float], listeners: Sequence[RoundListener]) -> None:
        self._wall = wall
        self._listeners = listeners
        self._find: FindPlace = lambda _run_id: None
        self._rounds: dict[str, _Running] = {}

    def find_with(self, find: FindPlace) -> None:
        """Use this function to find the Rounds. Runs exist only after their Observer."""
        self._find = find

    def last_round(self, run_id: str) -> int | None:
        """Return the number of the last Round of a Run that was under way in this process."""
        running = self._rounds.get(run_id)
        return None if running is None else running.name.round

    def starting(self, run_id: str, effect: e.Effect) -> None:
        """See Observer. An effect that is repeated changes nothing: the part has begun."""
        running = self._rounds.get(run_id)
        match effect:
            case e.KeepDeadline() if running is not None and running.part is RoundPart.WAITING:
                self._next(running, RoundPart.TRAINING)
            case e.Close() if running is not None and running.part in (RoundPart.WAITING, RoundPart.TRAINING):
                self._next(running, RoundPart.CLOSING)
            case e.GoOn() if running is not None and not running.has_ended:
                # A command ended the Round, or the set had no quorum.
                place = self._place(running)
                if place is None or place.phase.has_ended:
                    self._end(running, is_published=False)
            case _:
                pass

    def finished(self, run_id: str, effect: e.Effect) -> None:
        """See Observer."""
        if isinstance(effect, e.GoOn):
            self.look(run_id)
            return
        running = self._rounds.get(run_id)
        place = None if running is None else self._place(running)
        if running is None or place is None:
            return
        match (effect, place.phase):
            case (e.Close(), phases.FOLDING):
                self._next(running, RoundPart.FOLDING)
            case (e.Fold(), phases.PUBLISHING):
                self._next(running, RoundPart.STEPPING, place.outer_step_at_s)
                self._next(running, RoundPart.PUBLISHING)
            case (e.Publish(), phases.PUBLISHED):
                self._end(running, is_published=True)
            case (e.Close() | e.Fail(), phases.FAILED):
                self._end(running, is_published=False)
            case _:
                pass

    def look(self, run_id: str) -> None:
        """Begin with the Round under way, unless it is known. Rounds of a Run follow each other."""
        place, running = self._find(run_id), self._rounds.get(run_id)
        if place is None or (running is not None and running.name == place.name):
            return
        self._rounds[run_id] = _Running(place.name, RoundPart.WAITING, place.name.opened_at_s)
        for listener in self._listeners:
            listener.opened(place.name)

    def resume(self, run_id: str) -> None:
        """Follow a Round that was under way when the coordinator started."""
        place = self._find(run_id)
        if place is None or run_id in self._rounds:
            return
        self.look(run_id)
        if place.has_deadline:
            running = self._rounds[run_id]
            running.part, running.since_s = RoundPart.TRAINING, None

    def _place(self, running: _Running) -> RunPlace | None:
        """Return where the Run of a Round is, if the Round is still under way."""
        place = self._find(running.name.run_id)
        return place if place is not None and place.name == running.name else None

    def _next(self, running: _Running, part: RoundPart, now_s: float | None = None) -> None:
        now_s = self._wall() if now_s is None else now_s
        self._pass(running, now_s)
        running.part, running.since_s = part, now_s

    def _end(self, running: _Running, *, is_published: bool) -> None:
        now_s = self._wall()
        self._pass(running, now_s)
        running.has_ended = True
        for listener in self._listeners:
            listener.ended(running.name, now_s, is_published=is_published)

    def _pass(self, running: _Running, now_s: float) -> None:
        if running.since_s is not None:
            for listener in self._listeners:
                listener.passed(running.name, running.part, running.since_s, now_s)
