"""Between the operator's protocol's values and their wire form; the rules are those of ``convert``."""

import math
from types import MappingProxyType
from typing import Final, assert_never

from fanin.protos import control as r
from fanin.protos import plans as p
from fanin.protos.control import MAX_NUMBER
from fanin.protos.convert import (
    bundle_from_proto,
    bundle_to_proto,
    codec_from_proto,
    codec_to_proto,
    delegation_from_proto,
    delegation_to_proto,
    training_from_proto,
    training_to_proto,
    version_from_proto,
    version_to_proto,
)
from fanin.protos.errors import InvalidInput, NotFound
from fanin.v1 import control_pb2 as pb
from fanin.v1 import fleet_pb2, plan_pb2

_RUN_STATES: Final = {
    r.RunState.RUNNING: pb.RUN_STATE_RUNNING,
    r.RunState.FINISHED: pb.RUN_STATE_FINISHED,
    r.RunState.FAILED: pb.RUN_STATE_FAILED,
    r.RunState.PAUSED: pb.RUN_STATE_PAUSED,
    r.RunState.STOPPED: pb.RUN_STATE_STOPPED,
}
_ROUND_PHASES: Final = {
    r.RoundPhase.SELECTING: pb.ROUND_PHASE_SELECTING,
    r.RoundPhase.TRAINING: pb.ROUND_PHASE_TRAINING,
    r.RoundPhase.CLOSING: pb.ROUND_PHASE_CLOSING,
    r.RoundPhase.FOLDING: pb.ROUND_PHASE_FOLDING,
    r.RoundPhase.PUBLISHING: pb.ROUND_PHASE_PUBLISHING,
    r.RoundPhase.PUBLISHED: pb.ROUND_PHASE_PUBLISHED,
    r.RoundPhase.FAILING: pb.ROUND_PHASE_FAILING,
    r.RoundPhase.FAILED: pb.ROUND_PHASE_FAILED,
    r.RoundPhase.PAUSED: pb.ROUND_PHASE_PAUSED,
}


def plan_to_proto(plan: p.Plan) -> plan_pb2.Plan:
    return plan_pb2.Plan(
        name=plan.name,
        cohort=plan_pb2.Cohort(
            concurrency=plan.cohort.concurrency,
            buffer=plan.cohort.buffer,
            quorum=plan.cohort.quorum,
            deadline_s=plan.cohort.deadline_s,
            min_report_s=plan.cohort.min_report_s if math.isfinite(plan.cohort.min_report_s) else 0.0,
        ),
        training=training_to_proto(plan.training),
        codec=codec_to_proto(plan.codec),
        aggregation=plan_pb2.Aggregation(
            max_examples=plan.aggregation.max_examples,
            outer_learning_rate=plan.aggregation.outer_learning_rate,
            max_staleness=plan.aggregation.max_staleness,
        ),
        stop=plan_pb2.Stop(
            max_rounds=plan.stop.max_rounds,
            patience=plan.stop.patience,
            min_delta=plan.stop.min_delta,
            max_int8_drop=plan.stop.max_int8_drop,
        ),
    )


def plan_from_proto(message: plan_pb2.Plan) -> p.Plan:
    return p.Plan(
        name=message.name,
        cohort=p.CohortPlan(
            concurrency=message.cohort.concurrency,
            buffer=message.cohort.buffer,
            quorum=message.cohort.quorum,
            deadline_s=message.cohort.deadline_s,
            min_report_s=message.cohort.min_report_s or math.inf,
        ),
        training=training_from_proto(message.training),
        codec=codec_from_proto(message.codec),
        aggregation=p.AggregationPlan(
            max_examples=message.aggregation.max_examples,
            outer_learning_rate=message.aggregation.outer_learning_rate,
            max_staleness=message.aggregation.max_staleness,
        ),
        stop=p.StopPlan(
            max_rounds=message.stop.max_rounds,
            patience=message.stop.patience,
            min_delta=message.stop.min_delta,
            max_int8_drop=message.stop.max_int8_drop,
        ),
    )


def start_run_to_proto(start: r.StartRun) -> pb.StartRunRequest:
    return pb.StartRunRequest(
        run_id=start.run_id,
        plan=plan_to_proto(start.plan),
        version=version_to_proto(start.version),
        delegation=delegation_to_proto(start.delegation),
    )


def start_run_from_proto(message: pb.StartRunRequest) -> r.StartRun:
    return r.StartRun(
        run_id=message.run_id,
        plan=plan_from_proto(message.plan),
        version=version_from_proto(message.version),
        delegation=delegation_from_proto(message.delegation),
    )


def run_state_from_proto(number: int) -> r.RunState:
    for state, known in _RUN_STATES.items():
        if known == number:
            return state
    raise InvalidInput(f"run state: got {number}, expected one of {sorted(_RUN_STATES.values())}")


def run_info_to_proto(info: r.RunInfo) -> pb.RunInfo:
    return pb.RunInfo(
        run_id=info.run_id,
        state=_RUN_STATES[info.state],
        plan=plan_to_proto(info.plan),
        bundle_sha256=info.bundle_sha256,
        version=info.version,
        version_sha256=info.version_sha256,
        num_rounds=info.num_rounds,
        reason=info.reason,
    )


def run_info_from_proto(message: pb.RunInfo) -> r.RunInfo:
    return r.RunInfo(
        run_id=message.run_id,
        state=run_state_from_proto(message.state),
        plan=plan_from_proto(message.plan),
        bundle_sha256=message.bundle_sha256,
        version=message.version,
        version_sha256=message.version_sha256,
        num_rounds=message.num_rounds,
        reason=message.reason,
    )


def round_info_to_proto(info: r.RoundInfo) -> pb.RoundInfo:
    return pb.RoundInfo(
        round=info.round,
        base_version=info.base_version,
        phase=_ROUND_PHASES[info.phase],
        num_updates=info.num_updates,
        opened_at=info.opened_at_s,
        version=info.version,
    )


def round_info_from_proto(message: pb.RoundInfo) -> r.RoundInfo:
    phases = [phase for phase, known in _ROUND_PHASES.items() if known == message.phase]
    if not phases:
        raise InvalidInput(f"round phase: got {message.phase}, expected one of {sorted(_ROUND_PHASES.values())}")
    return r.RoundInfo(
        round=message.round,
        base_version=message.base_version,
        phase=phases[0],
        num_updates=message.num_updates,
        opened_at_s=message.opened_at,
        version=message.version,
    )


def description_to_proto(found: r.RunDescription) -> pb.RunDescription:
    return pb.RunDescription(
        run=run_info_to_proto(found.info),
        rounds=[round_info_to_proto(info) for info in found.rounds],
        grid=fleet_pb2.Grid(exponents=found.grid),
        num_at_work=found.num_at_work,
        at_work=found.at_work,
        deadline_s=found.deadline_s,
        num_devices=found.num_devices,
    )


def description_from_proto(message: pb.RunDescription) -> r.RunDescription:
    return r.RunDescription(
        info=run_info_from_proto(message.run),
        rounds=tuple(round_info_from_proto(info) for info in message.rounds),
        grid=tuple(message.grid.exponents),
        num_at_work=message.num_at_work,
        at_work=tuple(message.at_work),
        deadline_s=message.deadline_s,
        num_devices=message.num_devices,
    )


def num_rounds_from_proto(message: pb.DescribeRunRequest) -> int:
    """Of how many Rounds to tell. Raises InvalidInput."""
    if message.rounds > r.MAX_DESCRIBED_ROUNDS:
        raise InvalidInput(f"describe: got {message.rounds} rounds, expected at most {r.MAX_DESCRIBED_ROUNDS}")
    return message.rounds


def command_to_proto(command: r.Command) -> pb.CommandRequest:
    message = pb.CommandRequest(command_id=command.command_id, run_id=command.run_id)
    match command.what:
        case r.Pause():
            message.pause.SetInParent()
        case r.Resume() as resume:
            message.resume.CopyFrom(pb.ResumeRun(rounds=resume.num_rounds))
        case r.Stop():
            message.stop.SetInParent()
        case r.Adopt() as adopt:
            found = pb.AdoptVersion(from_run_id=adopt.from_run, number=adopt.number, rounds=adopt.num_rounds)
            message.adopt.CopyFrom(found)
        case other:
            assert_never(other)
    return message


def command_from_proto(message: pb.CommandRequest) -> r.Command:
    return r.Command(command_id=message.command_id, run_id=message.run_id, what=_what(message))


def _what(message: pb.CommandRequest) -> r.Pause | r.Resume | r.Stop | r.Adopt:
    match message.WhichOneof("what"):
        case "pause":
            return r.Pause()
        case "resume":
            return r.Resume(num_rounds=message.resume.rounds)
        case "stop":
            return r.Stop()
        case "adopt":
            adopt = message.adopt
            if adopt.number > MAX_NUMBER:
                raise NotFound(f"run {(adopt.from_run_id or message.run_id)[:64]!r}: has no version {adopt.number}")
            return r.Adopt(from_run=adopt.from_run_id, number=adopt.number, num_rounds=adopt.rounds)
        case other:
            raise InvalidInput(f"command: got {other}, expected one that this fanin knows; install a newer one")


def version_with_bundle_to_proto(found: r.VersionWithBundle) -> pb.GetVersionReply:
    return pb.GetVersionReply(version=version_to_proto(found.version), bundle=bundle_to_proto(found.bundle))


def version_with_bundle_from_proto(message: pb.GetVersionReply) -> r.VersionWithBundle:
    return r.VersionWithBundle(version=version_from_proto(message.version), bundle=bundle_from_proto(message.bundle))


def event_to_proto(recorded: r.Recorded) -> pb.Event:
    message = pb.Event(sequence=recorded.sequence, time=recorded.time_s)
    match recorded.event:
        case r.RoundOpened() as event:
            message.round_opened.CopyFrom(pb.RoundOpened(round=event.round, base_version=event.base_version))
        case r.RoundClosed() as event:
            message.round_closed.CopyFrom(_closed_to_proto(event))
        case r.RoundFailed() as event:
            message.round_failed.CopyFrom(pb.RoundFailed(round=event.round, reason=event.reason))
        case r.VersionPublished() as event:
            message.version_published.CopyFrom(_published_to_proto(event))
        case r.RunRested() as event:
            message.run_rested.CopyFrom(pb.RunRested(state=_RUN_STATES[event.state], reason=event.reason))
        case r.RunResumed() as event:
            message.run_resumed.CopyFrom(pb.RunResumed(rounds=event.num_rounds))
        case other:
            assert_never(other)
    return message


def event_from_proto(message: pb.Event) -> r.Recorded:
    return r.Recorded(sequence=message.sequence, time_s=message.time, event=_run_event(message))


def _run_event(message: pb.Event) -> r.RunEvent:
    match message.WhichOneof("what"):
        case "round_opened":
            return r.RoundOpened(round=message.round_opened.round, base_version=message.round_opened.base_version)
        case "round_closed":
            return _closed_from_proto(message.round_closed)
        case "round_failed":
            return r.RoundFailed(round=message.round_failed.round, reason=message.round_failed.reason)
        case "version_published":
            return _published_from_proto(message.version_published)
        case "run_rested":
            return r.RunRested(state=run_state_from_proto(message.run_rested.state), reason=message.run_rested.reason)
        case "run_resumed":
            return r.RunResumed(num_rounds=message.run_resumed.rounds)
        case other:
            raise InvalidInput(f"event: got {other}, expected a kind that this fanin knows; install a newer one")


def _closed_to_proto(event: r.RoundClosed) -> pb.RoundClosed:
    return pb.RoundClosed(round=event.round, accepted=event.accepted, num_accepted=event.num_accepted)


def _closed_from_proto(message: pb.RoundClosed) -> r.RoundClosed:
    if not message.num_accepted:
        # Recorded before there was the number: all devices are listed.
        return r.round_closed(message.round, message.accepted)
    return r.RoundClosed(round=message.round, num_accepted=message.num_accepted, accepted=tuple(message.accepted))


def accepted_devices_to_proto(page: r.AcceptedDevices) -> pb.AcceptedDevicesReply:
    return pb.AcceptedDevicesReply(num_accepted=page.num_accepted, device_ids=page.device_ids)


def accepted_devices_from_proto(message: pb.AcceptedDevicesReply) -> r.AcceptedDevices:
    return r.AcceptedDevices(num_accepted=message.num_accepted, device_ids=tuple(message.device_ids))


def _published_to_proto(event: r.VersionPublished) -> pb.VersionPublished:
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
        num_rounded=event.num_rounded,
        train_loss=event.train_loss,
        total_examples=event.total_examples,
        runtimes=dict(event.runtimes),
        adopted_run_id=event.adopted_run,
        adopted_number=event.adopted_number,
        num_stale=event.num_stale,
        rounds=event.num_rounds,
        evaluation=None
        if evaluation is None
        else pb.Evaluation(
            num_examples=evaluation.num_examples,
            loss=evaluation.loss,
            accuracy_float=evaluation.accuracy_float,
            accuracy_int8=evaluation.accuracy_int8,
            int8_agreement=evaluation.int8_agreement,
            int8_rise_percent=evaluation.int8_rise_percent,
        ),
    )


def _published_from_proto(message: pb.VersionPublished) -> r.VersionPublished:
    evaluation = message.evaluation
    return r.VersionPublished(
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
        num_rounded=message.num_rounded,
        train_loss=message.train_loss,
        total_examples=message.total_examples,
        runtimes=MappingProxyType(dict(sorted(message.runtimes.items()))),
        adopted_run=message.adopted_run_id,
        adopted_number=message.adopted_number,
        num_stale=message.num_stale,
        num_rounds=message.rounds,
        evaluation=r.Evaluation(
            num_examples=evaluation.num_examples,
            loss=evaluation.loss,
            accuracy_float=evaluation.accuracy_float,
            accuracy_int8=evaluation.accuracy_int8,
            int8_agreement=evaluation.int8_agreement,
            int8_rise_percent=evaluation.int8_rise_percent if evaluation.HasField("int8_rise_percent") else None,
        )
        if message.HasField("evaluation")
        else None,
    )


def version_number_from_proto(message: pb.GetVersionRequest) -> int | None:
    """The number that is asked for, or None for the newest. Raises NotFound for one that no Version can have."""
    if message.number > MAX_NUMBER:
        raise NotFound(f"run {message.run_id[:64]!r}: has no version {message.number}")
    return message.number if message.HasField("number") else None


def from_sequence_from_proto(message: pb.WatchRequest) -> int:
    """The sequence number to begin with. Raises InvalidInput for one that no event can have."""
    if message.from_sequence > MAX_NUMBER:
        raise InvalidInput(f"watch: got from_sequence {message.from_sequence}, expected at most {MAX_NUMBER}")
    return message.from_sequence
