"""Failures of effects and of other work for a Run: how long each is repeated, and the reason that operators read.

A reason is sent over the network and recorded. So it names no path, and of other code it quotes only the errors of
rules, optimizers, stages and policies that a Plan names (``protos.errors.foreign_text``). The log has everything.
"""

import logging
import math
from dataclasses import dataclass
from typing import Final

from fanin.edge.files import DISK_PROBLEMS, disk_problem
from fanin.edge.scopes import about_run
from fanin.protos.errors import FaninError, StorageFull, StorageUnavailable, Unavailable, public
from fanin.protos.messages import RunWarned
from fanin.protos.plans.named import is_simulated, raised_text
from fanin.server.protocols import events as e

RETRY_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 10.0, 10.0, 10.0, 20.0, 60.0)
"""Seconds between tries of an effect. The last pause repeats."""
STORAGE_WAIT_S: Final = 86_400.0
"""Seconds that an effect waits for disk space or for the database. An operator must notice and act."""
UNSTORED_S: Final = 120.0
"""Seconds after an upload that could not be stored, within which its device tries again."""
UNFORESEEN_S: Final = 60.0
"""Seconds for which an effect is repeated after an error of unknown kind. A network disk may pause for that long."""

SEE_LOG: Final = "the coordinator's log has the details"


class Damaged(Exception):
    """Stored data of a Round fails verification, so no repetition can succeed. The message is for operators."""


def damaged_update(device: str) -> Damaged:
    """Return the failure of a Round one of whose Updates is damaged."""
    return Damaged(f"the update of device {device} is damaged on the coordinator's disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """The failure of an effect.

    Attributes:
        effect: The name of the effect.
        cause: The cause, for operators.
        give_up_after_s: Seconds after the first try at which the effect is given up.
    """

    effect: str
    cause: str
    give_up_after_s: float

    @property
    def reason(self) -> str:
        """The text for operators while the effect is repeated."""
        return f"{self.effect} is tried again: {self.cause}"

    def given_up(self, tried_s: float) -> str:
        """Return the text for operators once the effect is given up, ``tried_s`` seconds after the first try."""
        return f"{self.effect} failed for {tried_s:.0f} s: {self.cause}" if self.give_up_after_s else self.cause


class StorageWait:
    """Whether the uploads of a Run wait for the disk.

    Attributes:
        problem: Why an upload could not be stored; empty once an Update is.
    """

    def __init__(self) -> None:
        self.problem = ""
        # When an upload could not be stored: first without a deadline in between at which all could, and last.
        self._unstored: tuple[float, float] | None = None

    def note(self, problem: str, now: float) -> RunWarned | None:
        """Note why an upload could not be stored, or that one is (""). Return the warning that begins or ends."""
        if problem:
            self._unstored = (now if self._unstored is None else self._unstored[0], now)
        before, self.problem = self.problem, problem
        if bool(problem) == bool(before):
            return None
        return RunWarned(code="storage", text=f"uploads wait: {problem or before}", is_over=not problem)

    def is_blocked(self, now: float, deadline_s: float) -> bool:
        """Return whether uploads wait at a deadline of a Round, for a day at most."""
        if self._unstored is None:
            return False
        first, last = self._unstored
        if now - last <= max(deadline_s, UNSTORED_S):
            return now - first <= STORAGE_WAIT_S
        self._unstored = None
        return False


def trouble_of(effect: e.Effect, error: Exception) -> Trouble:
    """Return the Trouble of an effect that raised an error."""
    # A failure has no failure exit, so the Round waits until the failure is recorded.
    give_up_after_s = math.inf if isinstance(effect, e.Fail) else patience_s(error)
    return Trouble(effect=type(effect).__name__, cause=reason_of(error), give_up_after_s=give_up_after_s)


def patience_s(error: Exception) -> float:
    """Return the seconds after the first try for which work that raised an error is repeated."""
    match error:
        case StorageFull() | Unavailable():
            return STORAGE_WAIT_S
        case Damaged() | FaninError():
            return 0.0
        case _:
            return UNFORESEEN_S


def pause_s(num_tries: int) -> float:
    """Return the seconds until the next try, after ``num_tries`` tries."""
    return RETRY_S[min(num_tries, len(RETRY_S)) - 1]


def reason_of(error: Exception) -> str:
    """Return the cause of an error, as operators may read it."""
    match error:
        case Damaged():
            return f"{error}; {SEE_LOG}"
        case StorageFull() | StorageUnavailable():
            return cannot_write(error)
        case Unavailable():
            return f"the coordinator's store cannot be reached now; {SEE_LOG}"
        case FaninError():
            return f"{public(error)[0]}; {SEE_LOG}"
        case OSError(errno=number) if number in DISK_PROBLEMS:
            return f"on the coordinator's machine, {disk_problem(error)}"
        case _:
            kind = raised_text(error) if is_simulated() else type(error).__name__
            return f"unexpected error ({kind}); {SEE_LOG}"


def cannot_write(error: StorageFull | StorageUnavailable) -> str:
    """Return why the coordinator cannot write, and what to do, as operators may read it."""
    return f"the coordinator cannot write: {error.problem}"


class RepeatedTroubles:
    """Failures of work beside the effects of Runs, such as evaluations. Operators read them with the Run.

    Work that is repeated fails many times for one cause. The log has each cause once, until the work succeeds.

    Args:
        log: Receives the failures.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._causes: dict[tuple[str, str], str] = {}

    def report(self, run_id: str, work: str, error: Exception, suffix: str = "") -> None:
        """Show with a Run that some work for it failed, until ``clear``. ``suffix`` says what follows."""
        cause = f"{work}: {reason_of(error)}{suffix}"
        if self._causes.get((run_id, work)) != cause:
            self._causes[run_id, work] = cause
            has_text = isinstance(error, FaninError)
            trace = None if has_text else error
            about_run(self._log, run_id).error("%s: %s%s", work, error, suffix, exc_info=trace)

    def clear(self, run_id: str, work: str) -> None:
        """Forget the failures of some work for a Run, because it succeeded."""
        self._causes.pop((run_id, work), None)

    def of(self, run_id: str) -> tuple[str, ...]:
        """Return the failures of a Run."""
        return tuple(cause for (known, _), cause in self._causes.items() if known == run_id)
