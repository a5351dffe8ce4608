"""The conditions for a Run's rest, which follow from the events in its record."""

from collections.abc import Iterable, Sequence
from typing import Final

from fanin.edge.runtimes.quality import LabelDrop
from fanin.protos.messages import (
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
"""Consecutive failed Rounds after which the Run fails, for any reasons but one: devices sent no Update, while enough
others waited. The next Rounds select those others, so devices do not end the Run until no others are left."""


def reason_to_rest(losses: Sequence[float], num_rounds: int, max_rounds: int, stop: StopPlan) -> str:
    """Return why no further Round is opened, or an empty string to continue.

    Args:
        losses: Validation losses in nats since the last command that set the Run going, oldest first.
        num_rounds: Rounds that the Run has published.
        max_rounds: Published Rounds after which it finishes.
        stop: The Plan's stop rules.
    """
    if num_rounds >= max_rounds:
        return f"{num_rounds} of {counted(max_rounds, 'round')} done"
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
        drop = LabelDrop.of_shares(
            evaluation.num_labels, evaluation.accuracy_float, evaluation.accuracy_int8, evaluation.int8_agreement
        )
        is_too_large, loss = drop.exceeds(stop.max_int8_drop), f"{drop},"
    else:
        is_too_large = evaluation.int8_rise_percent > stop.max_int8_drop
        # Of the squared error, unless the targets have another form than the output: devices do not report which.
        loss = f"the cost of int8 is {evaluation.int8_rise_percent:.2f} %"
    if not is_too_large:
        return ""
    return (
        f"{loss} on {counted(evaluation.num_examples, 'example')} of the devices (version {last.parent}), the plan "
        f"allows {stop.max_int8_drop:g}; resume, or start a run with int8.ranges = 'devices' from the current model"
    )


class History:
    """What decides when a Run rests: its published Rounds, and the events since the last command for more of them.

    Its size does not grow with the Rounds.

    Args:
        stop: The Plan's stop rules.

    Attributes:
        next_sequence: The sequence number of the first event that was not read yet.
        begun_after: The newest Version before the last command for more Rounds; -1 without one.
    """

    def __init__(self, stop: StopPlan) -> None:
        self._stop = stop
        self.next_sequence = 0
        self.begun_after = -1
        self._newest = -1
        self._num_published = 0
        self._begin()

    def _begin(self) -> None:
        self._last: RunEvent | None = None
        self._num_failures = 0
        # The validation losses of the last Rounds, and before them the lowest earlier one.
        self._losses: list[float] = []

    def add(self, events: Iterable[LoggedEvent]) -> None:
        """Add the events that were recorded since the last call."""
        for entry in events:
            self.next_sequence = entry.sequence + 1
            match entry.event:
                case VersionPublished(round=0) | RunResumed() if entry.event.rounds:
                    self._begin()
                    self.begun_after = self._newest
                    self._note(entry.event)
                case VersionPublished() | RoundFailed() | RunResumed():
                    self._note(entry.event)
                case _:
                    pass

    def _note(self, event: RoundFailed | VersionPublished | RunResumed) -> None:
        self._last = event
        self._num_failures = self._num_failures + (not event.others_wait) if isinstance(event, RoundFailed) else 0
        if not isinstance(event, VersionPublished):
            return
        self._newest = event.number
        if not event.round:
            # A Version from outside may be worse at first, so the losses are counted from there.
            self._losses = []
            return
        self._num_published += 1
        patience = self._stop.patience
        if patience and event.evaluation is not None:
            self._losses.append(event.evaluation.loss)
            if len(self._losses) > patience:
                self._losses = [min(self._losses[:-patience]), *self._losses[-patience:]]

    def rest_of(self, max_rounds: int) -> RunRested | None:
        """Return the rest that is due now, or None to continue.

        Args:
            max_rounds: Published Rounds after which the Run finishes.
        """
        if self._num_failures >= MAX_FAILED_ROUNDS and isinstance(self._last, RoundFailed):
            reason = f"{MAX_FAILED_ROUNDS} rounds in a row: {self._last.reason}"
            return RunRested(state=RunState.FAILED, reason=reason)
        if reason := int8_reason_to_pause(self._last, self._stop):
            return RunRested(state=RunState.PAUSED, reason=reason)
        reason = reason_to_rest(self._losses, self._num_published, max_rounds, self._stop)
        return RunRested(state=RunState.FINISHED, reason=reason) if reason else None
