"""The conditions for a Run's rest: pure functions of the events in its record."""

from collections.abc import Iterable, Sequence
from typing import Final

from fanin.protos.control import (
    LoggedEvent,
    RoundFailed,
    RunEvent,
    RunRested,
    RunResumed,
    RunState,
    VersionPublished,
)
from fanin.protos.plans import StopPlan
from fanin.protos.texts import counted

MAX_FAILED_ROUNDS: Final = 3
"""Consecutive failed Rounds, for any reasons, after which the Run fails."""


def reason_to_rest(losses: Sequence[float], num_rounds: int, max_rounds: int, stop: StopPlan) -> str:
    """Return why no further Round is opened, or an empty string to continue.

    Args:
        losses: Validation losses in nats since the last command that set the Run going, oldest first.
        num_rounds: Rounds published since that command.
        max_rounds: Rounds to publish after that command.
        stop: The Plan's stop rules.
    """
    if num_rounds >= max_rounds:
        return f"{num_rounds} of {max_rounds} rounds done"
    if stop.patience and len(losses) > stop.patience:
        best_before = min(losses[: -stop.patience])
        best_since = min(losses[-stop.patience :])
        if best_since > best_before - stop.min_delta:
            rounds = counted(stop.patience, "round")
            return f"validation loss flat for {rounds} (best {best_before:.4f}, since {best_since:.4f})"
    return ""


def int8_reason_to_pause(last: RunEvent | None, stop: StopPlan) -> str:
    """Return why a Run pauses after its last event, or an empty string to continue.

    An operator who resumes the Run has seen the drop, so the same event does not pause it again.
    """
    if not stop.max_int8_drop or not isinstance(last, VersionPublished) or last.evaluation is None:
        return ""
    evaluation = last.evaluation
    if evaluation.int8_rise_percent is None:
        cost = 100 * (evaluation.accuracy_float - evaluation.accuracy_int8)
        loss = f"int8 loses {cost:.2f} points of accuracy"
    else:
        cost = evaluation.int8_rise_percent
        # Of the squared error, unless the targets have another form than the output: devices do not report which.
        loss = f"the cost of int8 is {cost:.2f} %"
    if cost <= stop.max_int8_drop:
        return ""
    return (
        f"{loss} on {counted(evaluation.num_examples, 'example')} of the devices (version {last.parent}), the plan "
        f"allows {stop.max_int8_drop:g}; export again with calibration on the current model, or resume"
    )


def rest_of(since: Sequence[RunEvent], max_rounds: int, stop: StopPlan) -> RunRested | None:
    """Return the rest that is due after these events, oldest first, or None to continue.

    Args:
        since: The events since the last command that set the number of Rounds to publish.
        max_rounds: Rounds to publish after that command.
        stop: The Plan's stop rules.
    """
    last = since[-MAX_FAILED_ROUNDS:]
    failures = [event for event in last if isinstance(event, RoundFailed)]
    if len(failures) == MAX_FAILED_ROUNDS:
        reason = f"{MAX_FAILED_ROUNDS} rounds in a row: {failures[-1].reason}"
        return RunRested(state=RunState.FAILED, reason=reason)
    if reason := int8_reason_to_pause(since[-1] if since else None, stop):
        return RunRested(state=RunState.PAUSED, reason=reason)
    published = [event for event in since if isinstance(event, VersionPublished) and event.round]
    # A Version from outside may be worse at first, so the losses are counted from there.
    start = max((place for place, event in enumerate(since) if _is_outside(event)), default=0)
    later = [event for event in since[start:] if isinstance(event, VersionPublished) and event.round]
    losses = [event.evaluation.loss for event in later if event.evaluation is not None]
    reason = reason_to_rest(losses, len(published), max_rounds, stop)
    return RunRested(state=RunState.FINISHED, reason=reason) if reason else None


def _is_outside(event: RunEvent) -> bool:
    return isinstance(event, VersionPublished) and not event.round


class History:
    """The events of a Run that decide when it rests, since the last command that set the Run going.

    Attributes:
        next_sequence: The sequence number of the first event that was not read yet.
    """

    def __init__(self) -> None:
        self._since: list[RunEvent] = []
        self.next_sequence = 0

    def add(self, events: Iterable[LoggedEvent]) -> None:
        """Add the events that were recorded since the last call."""
        for entry in events:
            self.next_sequence = entry.sequence + 1
            match entry.event:
                case VersionPublished(round=0) | RunResumed() if entry.event.rounds:
                    self._since = [entry.event]
                case VersionPublished() | RoundFailed() | RunResumed():
                    self._since.append(entry.event)
                case _:
                    pass

    def rest_of(self, max_rounds: int, stop: StopPlan) -> RunRested | None:
        """Return the rest that is due now, or None to continue."""
        return rest_of(self._since, max_rounds, stop)
