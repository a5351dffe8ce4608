"""Wire form of events. The coordinator's database holds events in this form."""

from dataclasses import asdict
from types import MappingProxyType
from typing import assert_never

from fanin.protos.convert_control.principal_wire import principal_from_proto, principal_to_proto
from fanin.protos.convert_control.run_wire import (
    RUN_STATES,
    run_state_from_proto,
    saturated_from_proto,
    saturated_to_proto,
    warned_from_proto,
    warned_to_proto,
)
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import (
    MAX_NUMBER,
    DevicesGone,
    DeviceSpread,
    Evaluation,
    LoggedEvent,
    RoundClosed,
    RoundFailed,
    RoundOpened,
    RunEvent,
    RunRested,
    RunResumed,
    RunWarned,
    VersionPublished,
    round_closed,
)
from fanin.v1 import control_pb2 as pb


def event_to_proto(logged: LoggedEvent) -> pb.Event:
    message = pb.Event(sequence=logged.sequence, time=logged.time)
    match logged.event:
        case RoundOpened() as event:
            message.round_opened.CopyFrom(pb.RoundOpened(round=event.round, base_version=event.base_version))
        case RoundClosed() as event:
            message.round_closed.CopyFrom(_closed_to_proto(event))
        case RoundFailed() as event:
            message.round_failed.CopyFrom(
                pb.RoundFailed(round=event.round, reason=event.reason, others_wait=event.others_wait)
            )
        case DevicesGone() as event:
            message.devices_gone.CopyFrom(
                pb.DevicesGone(round=event.round, num_devices=event.num_devices, device_ids=event.device_ids)
            )
        case VersionPublished() as event:
            message.version_published.CopyFrom(_published_to_proto(event))
        case RunRested() as event:
            message.run_rested.CopyFrom(_rested_to_proto(event))
        case RunResumed() as event:
            message.run_resumed.CopyFrom(pb.RunResumed(rounds=event.rounds, by=principal_to_proto(event.by)))
        case RunWarned() as event:
            message.run_warned.CopyFrom(warned_to_proto(event))
        case other:
            assert_never(other)
    return message


def event_from_proto(message: pb.Event) -> LoggedEvent:
    return LoggedEvent(sequence=message.sequence, time=message.time, event=_run_event(message))


def _run_event(message: pb.Event) -> RunEvent:
    match message.WhichOneof("what"):
        case "round_opened":
            return RoundOpened(round=message.round_opened.round, base_version=message.round_opened.base_version)
        case "round_closed":
            return _closed_from_proto(message.round_closed)
        case "round_failed":
            failed = message.round_failed
            return RoundFailed(round=failed.round, reason=failed.reason, others_wait=failed.others_wait)
        case "devices_gone":
            gone = message.devices_gone
            return DevicesGone(round=gone.round, num_devices=gone.num_devices, device_ids=tuple(gone.device_ids))
        case "version_published":
            return _published_from_proto(message.version_published)
        case "run_rested":
            return _rested_from_proto(message.run_rested)
        case "run_resumed":
            resumed = message.run_resumed
            by = principal_from_proto(resumed.by) if resumed.HasField("by") else None
            return RunResumed(rounds=resumed.rounds, by=by)
        case "run_warned":
            return warned_from_proto(message.run_warned)
        case other:
            raise InvalidInput(f"event: got {other}, expected a kind that this fanin knows; install a newer one")


def _closed_to_proto(event: RoundClosed) -> pb.RoundClosed:
    return pb.RoundClosed(round=event.round, accepted=event.accepted, num_accepted=event.num_accepted)


def _closed_from_proto(message: pb.RoundClosed) -> RoundClosed:
    if not message.num_accepted:
        # An event of an older release lacks the number and lists all devices.
        return round_closed(message.round, message.accepted)
    return RoundClosed(round=message.round, num_accepted=message.num_accepted, accepted=tuple(message.accepted))


def _rested_to_proto(event: RunRested) -> pb.RunRested:
    return pb.RunRested(state=RUN_STATES[event.state], reason=event.reason, by=principal_to_proto(event.by))


def _rested_from_proto(message: pb.RunRested) -> RunRested:
    return RunRested(
        state=run_state_from_proto(message.state),
        reason=message.reason,
        by=principal_from_proto(message.by) if message.HasField("by") else None,
    )


def _published_to_proto(event: VersionPublished) -> pb.VersionPublished:
    evaluation = event.evaluation
    return pb.VersionPublished(
        number=event.number,
        version_sha256=event.version_sha256,
        parent=event.parent,
        round=event.round,
        round_s=event.round_s,
        bytes_down=event.bytes_down,
        bytes_up=event.bytes_up,
        bytes_down_resumed=event.bytes_down_resumed,
        bytes_up_resumed=event.bytes_up_resumed,
        num_saturated=event.num_saturated,
        saturated=saturated_to_proto(event.saturated),
        num_clamped=event.num_clamped,
        num_rounded=event.num_rounded,
        train_loss=event.train_loss,
        train_loss_examples=event.train_loss_examples,
        total_examples=event.total_examples,
        runtimes=dict(event.runtimes),
        statistics=dict(event.statistics),
        statistics_examples=dict(event.statistics_examples),
        device_spreads={name: pb.DeviceSpread(**asdict(each)) for name, each in event.device_spreads.items()},
        adopted_run_id=event.adopted_run_id,
        adopted_number=event.adopted_number,
        num_stale=event.num_stale,
        rounds=event.rounds,
        new_epoch=event.new_epoch,
        by=principal_to_proto(event.by),
        evaluation=None
        if evaluation is None
        else pb.Evaluation(
            num_examples=evaluation.num_examples,
            loss=evaluation.loss,
            accuracy_float=evaluation.accuracy_float,
            accuracy_int8=evaluation.accuracy_int8,
            int8_agreement=evaluation.int8_agreement,
            num_labels=evaluation.num_labels,
            int8_rise_percent=evaluation.int8_rise_percent,
        ),
    )


def _published_from_proto(message: pb.VersionPublished) -> VersionPublished:
    evaluation = message.evaluation
    return VersionPublished(
        number=message.number,
        version_sha256=message.version_sha256,
        parent=message.parent,
        round=message.round,
        round_s=message.round_s,
        bytes_down=message.bytes_down,
        bytes_up=message.bytes_up,
        bytes_down_resumed=message.bytes_down_resumed,
        bytes_up_resumed=message.bytes_up_resumed,
        num_saturated=message.num_saturated,
        saturated=saturated_from_proto(message.saturated),
        num_clamped=message.num_clamped,
        num_rounded=message.num_rounded,
        train_loss=message.train_loss,
        train_loss_examples=message.train_loss_examples,
        total_examples=message.total_examples,
        runtimes=MappingProxyType(dict(sorted(message.runtimes.items()))),
        statistics=MappingProxyType(dict(sorted(message.statistics.items()))),
        statistics_examples=MappingProxyType(dict(sorted(message.statistics_examples.items()))),
        device_spreads=MappingProxyType(
            {name: _spread_from_proto(each) for name, each in sorted(message.device_spreads.items())}
        ),
        adopted_run_id=message.adopted_run_id,
        adopted_number=message.adopted_number,
        num_stale=message.num_stale,
        rounds=message.rounds,
        new_epoch=message.new_epoch,
        by=principal_from_proto(message.by) if message.HasField("by") else None,
        evaluation=Evaluation(
            num_examples=evaluation.num_examples,
            loss=evaluation.loss,
            accuracy_float=evaluation.accuracy_float,
            accuracy_int8=evaluation.accuracy_int8,
            int8_agreement=evaluation.int8_agreement,
            num_labels=evaluation.num_labels,
            int8_rise_percent=evaluation.int8_rise_percent if evaluation.HasField("int8_rise_percent") else None,
        )
        if message.HasField("evaluation")
        else None,
    )


def _spread_from_proto(message: pb.DeviceSpread) -> DeviceSpread:
    return DeviceSpread(
        num_devices=message.num_devices,
        mean=message.mean,
        min=message.min,
        p10=message.p10,
        median=message.median,
        p90=message.p90,
        max=message.max,
    )


def from_sequence_from_proto(message: pb.WatchRequest) -> int:
    """Return the first requested sequence number. Raises InvalidInput for an impossible number."""
    if message.from_sequence > MAX_NUMBER:
        raise InvalidInput(f"watch: got from_sequence {message.from_sequence}, expected at most {MAX_NUMBER}")
    return message.from_sequence
