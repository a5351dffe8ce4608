"""How Runs and what happens in them are shown, to people and to programs."""

import json
import math
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from types import MappingProxyType
from typing import Final, assert_never

from fanin.protos.chunks import short
from fanin.protos.control import (
    Evaluation,
    LoggedEvent,
    RoundClosed,
    RoundFailed,
    RoundOpened,
    RunEvent,
    RunInfo,
    RunRested,
    RunResumed,
    RunState,
    VersionPublished,
)

WIDE_GAP: Final = 0.05
"""Accuracy that int8 may lose before people are told: well trained models lose less than 0.01."""
WIDE_RISE_PERCENT: Final = 50.0
"""What int8 may add to a squared error before people are told: a bundle begins with at most 10."""
JSON_KEYS: Final = MappingProxyType({"adopted_run_id": "adopted_run", "rounds": "num_rounds"})
"""Keys in the output of --json that differ from the field of an event."""


def run_row(info: RunInfo) -> dict[str, object]:
    """A Run for programs."""
    return {
        "run_id": info.run_id,
        "plan": info.plan.name,
        "state": info.state.value,
        "reason": info.reason,
        "bundle_sha256": info.bundle_sha256,
        "version": info.version,
        "version_sha256": info.version_sha256,
        "rounds": info.num_rounds,
    }


def follow(
    events: Iterable[LoggedEvent], json_target: str = "", before: Mapping[str, object] | None = None
) -> RunState:
    """Print events as they come, or write them as JSON lines to a file or, for ``-``, to standard output, after
    what was ``before`` them; the state that the Run was left in."""
    outcome = RunState.RUNNING
    with ExitStack() as stack:
        out = stack.enter_context(Path(json_target).open("w")) if json_target not in ("", "-") else sys.stdout
        if before is not None and json_target:
            out.write(_line(before))
        for recorded in events:
            out.write(_line(event_row(recorded)) if json_target else f"{describe(recorded.event)}\n")
            out.flush()
            if isinstance(recorded.event, RunRested):
                outcome = recorded.event.state
    return outcome


def _line(row: Mapping[str, object]) -> str:
    return json.dumps(finite(row), allow_nan=False) + "\n"


def event_row(recorded: LoggedEvent) -> dict[str, object]:
    """An event for programs."""
    names = [field.name for field in fields(recorded.event)]
    facts = {JSON_KEYS.get(name, name): _plain(getattr(recorded.event, name)) for name in names}
    return {
        "sequence": recorded.sequence,
        "time_s": recorded.time,
        "event": type(recorded.event).__name__,
        **facts,
    }


def _plain(value: object) -> object:
    match value:
        case RunState():
            return value.value
        case Evaluation():
            return asdict(value)
        case Mapping():
            return dict(value)
        case _:
            return value


def describe(event: RunEvent) -> str:
    """An event for people, on one line."""
    match event:
        case RoundOpened():
            return f"round {event.round} opened from version {event.base_version}"
        case RoundClosed():
            return f"round {event.round} closed with {event.num_accepted} updates"
        case RoundFailed():
            return f"round {event.round} failed: {event.reason}"
        case VersionPublished():
            return _describe_version(event)
        case RunRested():
            return f"run {event.state.value}: {event.reason}"
        case RunResumed():
            return f"run resumed, for {event.rounds} rounds" if event.rounds else "run resumed"
        case _:
            assert_never(event)


def _describe_version(event: VersionPublished) -> str:
    text = f"version {event.number} {short(event.version_sha256)}"
    if not event.round:
        if event.adopted_run_id:
            return f"{text} adopted from version {event.adopted_number} of run {event.adopted_run_id}"
        return f"{text} published from outside"
    text += f" in {event.round_s:.2f} s, {event.bytes_down} bytes down, {event.bytes_up} up"
    if event.num_saturated:
        text += f", {event.num_saturated} values saturated"
    if event.train_loss:
        text += f", training loss {event.train_loss:.4f}"
    found = event.evaluation
    if found is not None:
        text += f"; version {event.parent} validated on {found.num_examples}: {_describe_evaluation(found)}"
    return text


def _describe_evaluation(found: Evaluation) -> str:
    if found.int8_rise_percent is None:
        is_wide = found.accuracy_float - found.accuracy_int8 > WIDE_GAP
        said = f"accuracy {found.accuracy_float:.4f} float, {found.accuracy_int8:.4f} int8"
    else:
        is_wide = found.int8_rise_percent > WIDE_RISE_PERCENT
        said = f"int8's squared error {found.int8_rise_percent:+.2f} %"
    lags = " (int8 lags far behind: export the bundle again from a version trained further)" if is_wide else ""
    return f"loss {found.loss:.4f}, {said}{lags}"


def finite(value: object) -> object:
    """What JSON can say: it has no NaN and no infinity, and other readers than Python's stop at them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(held) for key, held in value.items()}
    return [finite(held) for held in value] if isinstance(value, list | tuple) else value
