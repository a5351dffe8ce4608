"""The counters of calls and of the work of devices: plain numbers, kept while the coordinator runs."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from fanin.protos.messages import Assigned, CheckInAnswer, Rejected, Wait
from fanin.server.fleet.observer import AssignedWork, WorkOutcome
from fanin.server.storage.lanes import LONG_S, SHORT_S, Durations
from fanin.server.telemetry.rounds import RoundName, RoundPart

CODE: Final = re.compile(r"FN-\d{4}")
CALL_S: Final = (*SHORT_S, 30.0, 60.0)
"""Bounds for calls: a check-in waits for up to 45 s."""
_OUTCOMES: Final = {Assigned: "assigned", Wait: "wait", Rejected: "rejected"}


def known_code(code: str) -> str:
    """Return the code of an error as a label: a part of another package may have any text as its code."""
    return code if not code or CODE.fullmatch(code) else "other"


class FleetCounts:
    """Counts the calls of devices. It is a FleetObserver, and a RoundListener for the durations of parts.

    Attributes:
        checkins: Answered check-ins by outcome.
        sent_bytes: Bytes of Chunks that devices downloaded.
        received_bytes: Bytes of Updates that were stored.
        commits: The durations of commits.
    """

    def __init__(self) -> None:
        self.checkins: Counter[str] = Counter(dict.fromkeys(_OUTCOMES.values(), 0))
        self.sent_bytes = 0
        self.received_bytes = 0
        self.commits = Durations()
        self._work: dict[str, Counter[tuple[str, str]]] = {}
        self._parts: dict[str, dict[RoundPart, Durations]] = {}

    def work(self, run_id: str) -> Counter[tuple[str, str]]:
        """Return the number of each pair of outcome and code in a Run."""
        return self._work.get(run_id, Counter())

    def parts(self, run_id: str) -> dict[RoundPart, Durations]:
        """Return the durations of the parts of a Run's Rounds."""
        return self._parts.get(run_id, {})

    def keep(self, run_ids: frozenset[str]) -> None:
        """Forget all other Runs."""
        self._work = {run_id: counts for run_id, counts in self._work.items() if run_id in run_ids}
        self._parts = {run_id: parts for run_id, parts in self._parts.items() if run_id in run_ids}

    def answered(self, device: str, answer: CheckInAnswer) -> None:
        """See FleetObserver."""
        self.checkins[_OUTCOMES[type(answer)]] += 1

    def sent(self, num_bytes: int) -> None:
        """See FleetObserver."""
        self.sent_bytes += num_bytes

    def received(self, num_bytes: int) -> None:
        """See FleetObserver."""
        self.received_bytes += num_bytes

    @contextmanager
    def committing(self, work: AssignedWork) -> Iterator[None]:
        """See FleetObserver."""
        with self.commits.timed():
            yield

    def concluded(self, work: AssignedWork, outcome: WorkOutcome, code: str = "") -> None:
        """See FleetObserver."""
        self._work.setdefault(work.run_id, Counter())[outcome.value, known_code(code)] += 1

    def opened(self, name: RoundName) -> None:
        """See RoundListener."""

    def passed(self, name: RoundName, part: RoundPart, began_s: float, ended_s: float) -> None:
        """See RoundListener."""
        parts = self._parts.setdefault(name.run_id, {})
        parts.setdefault(part, Durations(LONG_S)).note(max(ended_s - began_s, 0.0))

    def ended(self, name: RoundName, ended_s: float, *, is_published: bool) -> None:
        """See RoundListener."""


class CallCounts:
    """Counts calls.

    Attributes:
        num_active: Calls under way.
        ended: Calls that ended, by method and status.
        refused: Calls that ended with an error of fanin, by code.
        durations: The durations of calls by method.
    """

    def __init__(self) -> None:
        self.num_active = 0
        self.ended: Counter[tuple[str, str]] = Counter()
        self.refused: Counter[str] = Counter()
        self.durations: dict[str, Durations] = {}

    def begin(self) -> None:
        """Count a call that begins."""
        self.num_active += 1

    def end(self, method: str, status: str, code: str, seconds: float) -> None:
        """Count a call that ended. ``method`` is one that the coordinator serves, so there are few."""
        self.num_active -= 1
        self.ended[method, status] += 1
        if code:
            self.refused[known_code(code)] += 1
        self.durations.setdefault(method, Durations(CALL_S)).note(seconds)
