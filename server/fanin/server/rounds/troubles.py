"""What went wrong with an effect: whether trying again may help, for how long, and what an operator may read of it.

A reason goes over the network and into the record, so it names no path and quotes no other library's message. The log
has both.
"""

import math
from dataclasses import dataclass
from typing import Final

from fanin.protos.errors import FaninError, StorageFull, Unavailable, public_text
from fanin.server.rounds import events as e

RETRY_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Pauses between tries of an effect; the last one repeats."""
WAIT_S: Final = 86_400.0
"""How long an effect waits for space or for the database: somebody has to notice and to free some."""
UNFORESEEN_S: Final = 60.0
"""How long an effect is tried again after an error of unknown kind: a network disk may stop for that long."""

SEE_LOG: Final = "the coordinator's log has the details"


class Damaged(Exception):
    """Stored data of a Round does not verify, so no try can succeed. The message is for operators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why an effect failed, and how many seconds after the first try it is given up."""

    effect: str
    cause: str
    patience_s: float

    @property
    def reason(self) -> str:
        """What an operator reads while the effect is tried again."""
        return f"{self.effect} is tried again: {self.cause}"

    def given_up(self, tried_s: float) -> str:
        """What an operator reads once it is given up, so many seconds after the first try."""
        return f"{self.effect} failed for {tried_s:.0f} s: {self.cause}" if self.patience_s else self.cause


def trouble_of(effect: e.Effect, error: Exception) -> Trouble:
    """The Trouble of an effect that raised an error."""
    match error:
        case Damaged():
            patience_s = 0.0
        case StorageFull() | Unavailable():
            patience_s = WAIT_S
        case FaninError():
            patience_s = 0.0
        case _:
            patience_s = UNFORESEEN_S
    if isinstance(effect, e.Fail):
        # There is no exit behind this one. Until the failure is recorded the Round waits.
        patience_s = math.inf
    return Trouble(effect=type(effect).__name__, cause=reason_of(error), patience_s=patience_s)


def reason_of(error: Exception) -> str:
    """What an operator may read of an error."""
    match error:
        case Damaged():
            return f"{error}; {SEE_LOG}"
        case StorageFull():
            return "no space left on the coordinator's disk; free some"
        case Unavailable():
            return "the coordinator's database is locked by another process"
        case FaninError():
            return f"{public_text(error)}; {SEE_LOG}"
        case _:
            return f"unexpected error ({type(error).__name__}); {SEE_LOG}"
