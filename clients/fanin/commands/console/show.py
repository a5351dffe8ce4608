"""Runs and their events: as text for people, as rows for JSON."""

import base64
import math
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from types import MappingProxyType
from typing import Final, assert_never

from fanin.commands.console.streams import printable
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.runtimes.evaluations import validation_means
from fanin.edge.runtimes.quality import LabelDrop
from fanin.protos.chunks import short
from fanin.protos.messages import (
    MAX_SATURATED_SHARE,
    DevicesGone,
    DeviceSpread,
    Evaluation,
    LiveRound,
    LoggedEvent,
    Principal,
    RoundClosed,
    RoundExtended,
    RoundFailed,
    RoundLacks,
    RoundOpened,
    RunEvent,
    RunInfo,
    RunRested,
    RunResumed,
    RunState,
    RunWarned,
    SaturatedDevices,
    SpentPrivacy,
    VersionEvaluation,
    VersionPublished,
)
from fanin.protos.plans.entries import BASE64
from fanin.protos.texts import CHARGE_DUE, counted, epsilon_text

WIDE_POINTS: Final = 5.0
"""Points of accuracy that int8 loses above which the text carries a warning; well-trained models lose less than 1."""
WIDE_RISE_PERCENT: Final = 50.0
"""Rise of the squared error in int8 above which the text carries a warning; an export allows at most 10."""
MAX_SHOWN: Final = 5
"""Devices that one line of text names."""
CLOSED_PHASES: Final = ("paused", "closing", "folding", "publishing", "published", "failing", "failed")
"""The phases in which a Round does not wait for devices: those that every protocol has."""
JSON_KEYS: Final = MappingProxyType({"adopted_run_id": "adopted_run", "rounds": "num_rounds"})
"""Keys in the output of --json that differ from the field of an event."""
OF_LABELS: Final = ("accuracy_float", "accuracy_int8", "int8_agreement")
"""Values of an evaluation that are null if the devices predicted no labels."""


def note_on_local(bundle: Bundle) -> str:
    """Return a note for a model outside of a device about its personal parameters; "" if it has none."""
    local = bundle.manifest.local
    if local is None:
        return ""
    names = ", ".join(spec.name for spec in local.table.specs)
    return f"{names} have the initial values of the bundle; they are personal, and each device has trained its own"


def count_text(info: RunInfo, count: int) -> str:
    """Return a number of a Run as text. The numbers of a Run whose record is damaged are not known."""
    return "unknown" if info.plan is None else str(count)


def run_row(info: RunInfo) -> dict[str, object]:
    """Return the JSON row of a Run. Its numbers are null if its record is damaged."""
    is_known = info.plan is not None
    return {
        "run_id": info.run_id,
        "plan": None if info.plan is None else info.plan.name,
        "state": info.state.value,
        "reason": info.reason,
        "bundle_sha256": info.bundle_sha256,
        "version": info.version if is_known else None,
        "epoch": info.epoch if is_known else None,
        "version_sha256": info.version_sha256,
        "rounds": info.num_rounds if is_known else None,
        "max_rounds": info.max_rounds if is_known else None,
        "started_by": None if info.started_by is None else str(info.started_by),
        "newest_evaluation": None if info.newest_evaluation is None else evaluation_row(info.newest_evaluation),
        "best_evaluation": None if info.best_evaluation is None else evaluation_row(info.best_evaluation),
        "waits_for_publisher": info.waits_for_publisher,
        "privacy": None if info.privacy is None else asdict(info.privacy),
    }


def privacy_text(spent: SpentPrivacy) -> str:
    """Return what a population has spent as text."""
    left = max(spent.budget - float(epsilon_text(spent.epsilon)), 0.0)
    norm = f", clip norm {spent.clip_norm:.6g}" if spent.clip_norm else ""
    least, rest = ("at least ", CHARGE_DUE) if spent.is_charge_due else ("", f"{left:.4f} left")
    epsilon = f"epsilon {least}{epsilon_text(spent.epsilon)}"
    return f"{epsilon} of {spent.budget:g} at delta {spent.delta:g} ({rest}){norm}"


def evaluation_row(evaluation: VersionEvaluation) -> dict[str, object]:
    """Return the JSON row of the evaluation of a Version on held-out data."""
    row = {field.name: _plain(getattr(evaluation, field.name)) for field in fields(evaluation)}
    row["time_s"] = row.pop("time")
    return row


def evaluation_text(evaluation: VersionEvaluation) -> str:
    """Return the evaluation of a Version on held-out data as text."""
    if evaluation.problem:
        return f"version {evaluation.version} on {evaluation.data}: not evaluated: {evaluation.problem}"
    values = ", ".join(f"{name} {value:.4f}" for name, value in evaluation.values.items())
    return (
        f"version {evaluation.version} on {evaluation.data} ({counted(evaluation.num_examples, 'example')}): {values}"
    )


def waits_row(live: LiveRound) -> dict[str, object]:
    """Return the JSON row of the devices of an open Round. It is no event of the record, so it has no sequence."""
    return {
        "event": "RoundWaits",
        "round": live.round,
        "num_at_work": live.num_at_work,
        "num_waiting": live.num_waiting,
        "num_gave_up": live.num_gave_up,
        "num_refused": live.num_refused,
        "last_failure": live.last_failure,
        "progress": {device: asdict(each) for device, each in live.progress.items()},
    }


def waits_text(live: LiveRound) -> str:
    """Return the devices of an open Round as text; empty without one."""
    if not live.phase or live.phase in CLOSED_PHASES:
        return ""
    shares = [100 * each.step // each.num_steps for each in live.progress.values() if each.num_steps]
    counts = [f"{min(shares)} to {max(shares)} % trained"] if shares else []
    counts += [f"{live.num_waiting} waiting", f"{live.num_gave_up} gave up"]
    counts += [f"{live.num_refused} refused"] * bool(live.num_refused)
    failure = f", the last with: {live.last_failure!r}" if live.last_failure else ""
    at_work = f"{counted(live.num_at_work, 'device')} at work"
    waits = f"round {live.round} waits: "
    # The trouble may be that of the last failure.
    cause = "" if failure else live.trouble.removeprefix(waits)
    return f"{waits}{', '.join([at_work, *counts])}{failure}{f'; {cause}' * bool(cause)}"


def event_row(entry: LoggedEvent) -> dict[str, object]:
    """Return the JSON row of an event."""
    names = [field.name for field in fields(entry.event)]
    facts = {JSON_KEYS.get(name, name): _plain(getattr(entry.event, name)) for name in names}
    if isinstance(entry.event, VersionPublished):
        facts |= dict.fromkeys(_unknown(entry.event))
    return {
        "sequence": entry.sequence,
        "time_s": entry.time,
        "event": type(entry.event).__name__,
        **facts,
    }


def _unknown(event: VersionPublished) -> tuple[str, ...]:
    """Return the numbers of an event that no device reported. Under differential privacy none reports counts."""
    loss = () if event.train_loss_examples else ("train_loss",)
    counts = ("num_saturated", "num_rounded", "total_examples") if event.privacy is not None else ()
    return (*loss, *counts)


def _plain(value: object) -> object:
    match value:
        case RunState():
            return value.value
        case Principal():
            return str(value)
        case Evaluation():
            row = asdict(value)
            return row if value.has_labels else row | dict.fromkeys(OF_LABELS)
        case Mapping():
            return {name: _plain(item) for name, item in value.items()}
        case _ if is_dataclass(value):
            return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        case _:
            return value


def event_text(event: RunEvent) -> str:
    """Return an event as one line of text. A line feed in a reason could forge another event."""
    return printable(_event_text(event))


def _event_text(event: RunEvent) -> str:
    match event:
        case RoundOpened():
            return f"round {event.round} opened from version {event.base_version}"
        case RoundClosed():
            return f"round {event.round} closed with {counted(event.num_accepted, 'update')}"
        case RoundFailed():
            return f"round {event.round} failed: {event.reason}"
        case RoundExtended():
            devices = counted(event.num_devices, "device")
            return (
                f"round {event.round}: deadline {event.extension_s:g} s later in all, because {devices} make progress"
            )
        case RoundLacks():
            return f"round {event.round} waits: {event.text}"
        case DevicesGone():
            return f"round {event.round} waits no longer for {counted(event.num_devices, 'silent device')}"
        case VersionPublished():
            return _version_text(event)
        case RunRested():
            return f"run {event.state.value}: {event.reason}"
        case RunResumed():
            return f"run resumed{_by(event.by)}" + (f", for {counted(event.rounds, 'round')}" if event.rounds else "")
        case RunWarned():
            return f"{'no longer' if event.is_over else 'warning'}: {event.text}"
        case _:
            assert_never(event)


def _version_text(event: VersionPublished) -> str:
    text = f"version {event.number} {short(event.version_sha256)}"
    if not event.round:
        if event.adopted_run_id:
            text += f" adopted from version {event.adopted_number} of run {event.adopted_run_id}{_by(event.by)}"
            return text + (f"; its publisher reclaimed the run: epoch {event.new_epoch}" if event.new_epoch else "")
        return f"{text} published from outside{_by(event.by)}"
    text += f" in {event.round_s:.2f} s, {event.bytes_down} bytes down, {event.bytes_up} up"
    if event.num_saturated:
        text += f", {counted(event.num_saturated, 'value')} saturated"
    if event.saturated.num_devices:
        text += f" ({saturated_text(event.saturated)})"
    if event.num_clamped:
        text += f", {counted(event.num_clamped, 'value')} set to the end of a range"
    if event.strategy_metrics:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in sorted(event.strategy_metrics.items()))
        text += f", strategy: {metrics}"
    if event.not_reproducible:
        text += ", not reproducible"
    if event.privacy is not None:
        text += f", {privacy_text(event.privacy)}"
    if event.train_loss_examples:
        text += f", training loss {event.train_loss:.4f}"
        if event.train_loss_examples < event.total_examples:
            text += f" (of {event.train_loss_examples} of {counted(event.total_examples, 'example')})"
    evaluation = event.evaluation
    if evaluation is not None:
        text += f"; version {event.parent} validated on {evaluation.num_examples}: {_evaluation_text(evaluation)}"
    if means := validation_means(event.statistics, event.statistics_examples):
        text += f"; means of devices: {', '.join(f'{name} {value:.4f}' for name, value in means.items())}"
    spreads = {name: each for name, each in event.device_spreads.items() if each.num_devices > 1}
    return text + (f"; devices (min/10 %/median/90 %/max): {_spreads_text(spreads)}" if spreads else "")


def saturated_text(saturated: SaturatedDevices) -> str:
    """Return the devices with many saturated values as text."""
    named = [f"{device} {num}" for device, num in list(saturated.num_values.items())[:MAX_SHOWN]]
    more = saturated.num_devices - len(named)
    names = ", ".join([*named, *([f"{more} more"] if more else [])])
    devices = counted(saturated.num_devices, "device")
    return f"more than {100 * MAX_SATURATED_SHARE:g} % of the values of {devices}: {names}"


def _spreads_text(spreads: Mapping[str, DeviceSpread]) -> str:
    rows = {name: (each.min, each.p10, each.median, each.p90, each.max) for name, each in spreads.items()}
    return ", ".join(f"{name} {'/'.join(f'{value:.4g}' for value in row)}" for name, row in rows.items())


def _by(principal: Principal | None) -> str:
    return "" if principal is None else f" by {principal}"


def _evaluation_text(evaluation: Evaluation) -> str:
    if evaluation.has_labels:
        quality = f"accuracy {evaluation.accuracy_float:.4f} float, {evaluation.accuracy_int8:.4f} int8"
    elif evaluation.int8_rise_percent is None:
        return f"loss {evaluation.loss:.4f}"
    else:
        quality = f"cost of int8 {evaluation.int8_rise_percent:+.2f} %"
    lags = int8_lags(evaluation)
    return f"loss {evaluation.loss:.4f}, {quality}" + (f" ({lags})" if lags else "")


def int8_lags(evaluation: Evaluation) -> str:
    """Return a note if int8 is far worse than float; "" otherwise."""
    if evaluation.has_labels:
        drop = LabelDrop.of_shares(
            evaluation.num_labels, evaluation.accuracy_float, evaluation.accuracy_int8, evaluation.int8_agreement
        )
        is_wide = drop.exceeds(WIDE_POINTS)
    else:
        is_wide = evaluation.int8_rise_percent is not None and evaluation.int8_rise_percent > WIDE_RISE_PERCENT
    text = "int8 lags far behind: int8.ranges = 'devices' in the plan refreshes its scales in each Round"
    return text if is_wide else ""


def finite(value: object) -> object:
    """Replace NaN and infinity by None, and bytes by the notation of a Plan: JSON has none of them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return {BASE64: base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value
