"""When a Run rests, and what the statistics of a Round say: functions of the Run's record."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from fanin.edge.runtimes.evaluations import SQUARES_INT8, quality_of
from fanin.protos import messages as m
from fanin.protos.control import (
    Evaluation,
    LoggedEvent,
    RoundFailed,
    RunEvent,
    RunRested,
    RunResumed,
    RunState,
    VersionPublished,
)
from fanin.protos.plans import StopPlan

MAX_FAILED_ROUNDS: Final = 3
"""Rounds that may fail in a row, for whatever reason, before the Run fails."""
MAX_RUNTIMES: Final = 50
OTHER_RUNTIMES: Final = "other"
MAX_RISE: Final = 1e9
"""Percent; where float makes no error at all, any error of int8 is as much. JSON knows no infinity."""


def evaluation_of(counts: Mapping[str, int], num_classes: int) -> Evaluation | None:
    """What the devices' validation parts say of the Version that they started from; None without examples.

    ``num_classes`` is the Bundle's, 0 for a model of values: what kind a model is, no device says.
    """
    found, of_values = quality_of(counts), not num_classes and SQUARES_INT8 in counts
    if found.num_examples <= 0:
        return None
    return Evaluation(
        num_examples=found.num_examples,
        loss=found.loss_sum / found.num_examples,
        accuracy_float=found.accuracy_float,
        accuracy_int8=found.accuracy_int8,
        int8_agreement=found.agreement,
        int8_rise_percent=min(found.rise_percent, MAX_RISE) if of_values else None,
    )


def train_loss_of(counts: Mapping[str, int]) -> float:
    """Mean training loss in nats an example; 0.0 if nobody told it."""
    examples = counts.get(m.EXAMPLES, 0)
    return counts.get(m.TRAIN_LOSS, 0) / m.LOSS_UNIT / examples if examples > 0 else 0.0


def runtimes_of(names: Iterable[str]) -> Mapping[str, int]:
    """How many Updates were made with each runtime: the ``MAX_RUNTIMES`` most frequent ones, and ``OTHER_RUNTIMES``.
    Devices choose these names, and one message holds them."""
    counts = Counter(names)
    frequent = dict(counts.most_common(MAX_RUNTIMES))
    num_other = counts.total() - sum(frequent.values())
    return frequent | ({OTHER_RUNTIMES: num_other} if num_other else {})


def reason_to_rest(losses: Sequence[float], num_rounds: int, max_rounds: int, stop: StopPlan) -> str:
    """Why no further Round is opened; empty to go on.

    ``losses`` are the validation losses in nats, oldest first, since the Run was last set going;
    ``num_rounds`` of ``max_rounds`` are done since then.
    """
    if num_rounds >= max_rounds:
        return f"{num_rounds} of {max_rounds} rounds done"
    if stop.patience and len(losses) > stop.patience:
        best_before = min(losses[: -stop.patience])
        best_since = min(losses[-stop.patience :])
        if best_since > best_before - stop.min_delta:
            return f"validation loss flat for {stop.patience} rounds (best {best_before:.4f}, since {best_since:.4f})"
    return ""


def int8_reason_to_pause(last: RunEvent | None, stop: StopPlan) -> str:
    """Why a Run pauses after its last event; empty to go on. An operator who resumes it has seen the drop."""
    if not stop.max_int8_drop or not isinstance(last, VersionPublished) or last.evaluation is None:
        return ""
    found = last.evaluation
    if found.int8_rise_percent is None:
        cost = 100 * (found.accuracy_float - found.accuracy_int8)
        said = f"int8 loses {cost:.2f} points of accuracy"
    else:
        cost = found.int8_rise_percent
        said = f"int8 adds {cost:.2f} % to the squared error"
    if cost <= stop.max_int8_drop:
        return ""
    return (
        f"{said} on {found.num_examples} examples of the devices (version {last.parent}), the plan allows "
        f"{stop.max_int8_drop:g}; export anew, calibrated on what the model is now, or resume"
    )


def rest_of(since: Sequence[RunEvent], max_rounds: int, stop: StopPlan) -> RunRested | None:
    """Whether a Run rests, after what happened since it was last set going, oldest first."""
    last = since[-MAX_FAILED_ROUNDS:]
    failures = [event for event in last if isinstance(event, RoundFailed)]
    if len(failures) == MAX_FAILED_ROUNDS:
        reason = f"{MAX_FAILED_ROUNDS} rounds in a row: {failures[-1].reason}"
        return RunRested(state=RunState.FAILED, reason=reason)
    if reason := int8_reason_to_pause(since[-1] if since else None, stop):
        return RunRested(state=RunState.PAUSED, reason=reason)
    published = [event for event in since if isinstance(event, VersionPublished) and event.round]
    # A Version from outside may be worse at first: it begins anew.
    begun = max((place for place, event in enumerate(since) if _is_outside(event)), default=0)
    later = [event for event in since[begun:] if isinstance(event, VersionPublished) and event.round]
    losses = [event.evaluation.loss for event in later if event.evaluation is not None]
    reason = reason_to_rest(losses, len(published), max_rounds, stop)
    return RunRested(state=RunState.FINISHED, reason=reason) if reason else None


def _is_outside(event: RunEvent) -> bool:
    return isinstance(event, VersionPublished) and not event.round


class History:
    """The events of a Run that decide when it rests, as its record has them, since it was last set going."""

    def __init__(self) -> None:
        self._since: list[RunEvent] = []
        self.next_sequence = 0

    def add(self, events: Iterable[LoggedEvent]) -> None:
        """Take note of what was recorded since the last time."""
        for recorded in events:
            self.next_sequence = recorded.sequence + 1
            match recorded.event:
                case VersionPublished(round=0) | RunResumed() if recorded.event.rounds:
                    self._since = [recorded.event]
                case VersionPublished() | RoundFailed() | RunResumed():
                    self._since.append(recorded.event)
                case _:
                    pass

    def rest_of(self, max_rounds: int, stop: StopPlan) -> RunRested | None:
        """Whether the Run rests now."""
        return rest_of(self._since, max_rounds, stop)
