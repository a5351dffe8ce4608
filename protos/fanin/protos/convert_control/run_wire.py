"""Wire form of Runs, Rounds and their descriptions."""

from dataclasses import replace
from typing import Final

from fanin.protos.convert import (
    bundle_from_proto,
    bundle_to_proto,
    delegation_from_proto,
    delegation_to_proto,
    version_from_proto,
    version_to_proto,
)
from fanin.protos.convert_control.evaluation_wire import evaluation_from_proto, evaluation_to_proto
from fanin.protos.convert_control.plan_wire import plan_from_proto, plan_to_proto
from fanin.protos.convert_control.principal_wire import principal_from_proto, principal_to_proto
from fanin.protos.errors import InvalidInput, NotFound
from fanin.protos.messages import (
    MAX_DESCRIBED_ROUNDS,
    MAX_NUMBER,
    MAX_PAGE_RUNS_BYTES,
    AcceptedDevices,
    ListedRuns,
    Reclaim,
    RoundInfo,
    RoundPhase,
    RunDescription,
    RunInfo,
    RunState,
    RunWarned,
    SaturatedDevices,
    StartRun,
    VersionEvaluation,
    VersionWithBundle,
    saturated_devices,
)
from fanin.v1 import control_pb2 as pb
from fanin.v1 import fleet_pb2

RUN_STATES: Final = {
    RunState.RUNNING: pb.RUN_STATE_RUNNING,
    RunState.FINISHED: pb.RUN_STATE_FINISHED,
    RunState.FAILED: pb.RUN_STATE_FAILED,
    RunState.PAUSED: pb.RUN_STATE_PAUSED,
    RunState.STOPPED: pb.RUN_STATE_STOPPED,
}
_ROUND_PHASES: Final = {
    RoundPhase.SELECTING: pb.ROUND_PHASE_SELECTING,
    RoundPhase.TRAINING: pb.ROUND_PHASE_TRAINING,
    RoundPhase.CLOSING: pb.ROUND_PHASE_CLOSING,
    RoundPhase.FOLDING: pb.ROUND_PHASE_FOLDING,
    RoundPhase.PUBLISHING: pb.ROUND_PHASE_PUBLISHING,
    RoundPhase.PUBLISHED: pb.ROUND_PHASE_PUBLISHED,
    RoundPhase.FAILING: pb.ROUND_PHASE_FAILING,
    RoundPhase.FAILED: pb.ROUND_PHASE_FAILED,
    RoundPhase.PAUSED: pb.ROUND_PHASE_PAUSED,
}


def start_run_to_proto(start: StartRun) -> pb.StartRunRequest:
    return pb.StartRunRequest(
        run_id=start.run_id,
        plan=plan_to_proto(start.plan),
        version=version_to_proto(start.version),
        delegation=delegation_to_proto(start.delegation),
    )


def start_run_from_proto(message: pb.StartRunRequest) -> StartRun:
    return StartRun(
        run_id=message.run_id,
        plan=plan_from_proto(message.plan),
        version=version_from_proto(message.version),
        delegation=delegation_from_proto(message.delegation),
    )


def reclaim_to_proto(reclaim: Reclaim) -> pb.ReclaimRunRequest:
    return pb.ReclaimRunRequest(
        delegation=delegation_to_proto(reclaim.delegation),
        version=version_to_proto(reclaim.version),
        adopted_number=reclaim.adopted_number,
        rounds=reclaim.rounds,
    )


def reclaim_from_proto(message: pb.ReclaimRunRequest) -> Reclaim:
    if message.adopted_number > MAX_NUMBER:
        raise NotFound(f"run {message.version.run_id[:64]!r}: has no version {message.adopted_number}")
    return Reclaim(
        delegation=delegation_from_proto(message.delegation),
        version=version_from_proto(message.version),
        adopted_number=message.adopted_number,
        rounds=message.rounds,
    )


def run_state_from_proto(number: int) -> RunState:
    for state, known in RUN_STATES.items():
        if known == number:
            return state
    raise InvalidInput(f"run state: got {number}, expected one of {sorted(RUN_STATES.values())}")


def run_info_to_proto(info: RunInfo) -> pb.RunInfo:
    return pb.RunInfo(
        run_id=info.run_id,
        state=RUN_STATES[info.state],
        plan=None if info.plan is None else plan_to_proto(info.plan),
        bundle_sha256=info.bundle_sha256,
        version=info.version,
        epoch=info.epoch,
        version_sha256=info.version_sha256,
        num_rounds=info.num_rounds,
        max_rounds=info.max_rounds,
        reason=info.reason,
        started_by=principal_to_proto(info.started_by),
        newest_evaluation=_evaluation_to_proto(info.newest_evaluation),
        best_evaluation=_evaluation_to_proto(info.best_evaluation),
    )


def run_info_from_proto(message: pb.RunInfo) -> RunInfo:
    return RunInfo(
        run_id=message.run_id,
        state=run_state_from_proto(message.state),
        plan=plan_from_proto(message.plan) if message.HasField("plan") else None,
        bundle_sha256=message.bundle_sha256,
        version=message.version,
        epoch=message.epoch,
        version_sha256=message.version_sha256,
        num_rounds=message.num_rounds,
        max_rounds=message.max_rounds,
        reason=message.reason,
        started_by=principal_from_proto(message.started_by) if message.HasField("started_by") else None,
        newest_evaluation=_evaluation_from_proto(message.newest_evaluation, message.HasField("newest_evaluation")),
        best_evaluation=_evaluation_from_proto(message.best_evaluation, message.HasField("best_evaluation")),
    )


def _evaluation_to_proto(evaluation: VersionEvaluation | None) -> pb.VersionEvaluation | None:
    return None if evaluation is None else evaluation_to_proto(evaluation)


def _evaluation_from_proto(message: pb.VersionEvaluation, is_present: bool) -> VersionEvaluation | None:
    return evaluation_from_proto(message) if is_present else None


def listed_runs_to_proto(page: ListedRuns) -> pb.ListRunsReply:
    """Return the first Runs of a page that fit ``MAX_PAGE_RUNS_BYTES``, at least one."""
    reply = pb.ListRunsReply(num_runs=page.num_runs)
    size_bytes = 0
    for info in page.runs:
        message = run_info_to_proto(info)
        size_bytes += message.ByteSize()
        if reply.runs and size_bytes > MAX_PAGE_RUNS_BYTES:
            break
        reply.runs.append(message)
    return reply


def listed_runs_from_proto(message: pb.ListRunsReply) -> ListedRuns:
    return ListedRuns(num_runs=message.num_runs, runs=tuple(map(run_info_from_proto, message.runs)))


def round_info_to_proto(info: RoundInfo) -> pb.RoundInfo:
    return pb.RoundInfo(
        round=info.round,
        base_version=info.base_version,
        phase=_ROUND_PHASES[info.phase],
        num_updates=info.num_updates,
        opened_at=info.opened_at,
        version=info.version,
    )


def round_info_from_proto(message: pb.RoundInfo) -> RoundInfo:
    phases = [phase for phase, known in _ROUND_PHASES.items() if known == message.phase]
    if not phases:
        raise InvalidInput(f"round phase: got {message.phase}, expected one of {sorted(_ROUND_PHASES.values())}")
    return RoundInfo(
        round=message.round,
        base_version=message.base_version,
        phase=phases[0],
        num_updates=message.num_updates,
        opened_at=message.opened_at,
        version=message.version,
    )


def warned_to_proto(event: RunWarned) -> pb.RunWarned:
    return pb.RunWarned(code=event.code, subject=event.subject, text=event.text)


def warned_from_proto(message: pb.RunWarned) -> RunWarned:
    return RunWarned(code=message.code, subject=message.subject, text=message.text)


def description_to_proto(description: RunDescription) -> pb.RunDescription:
    return pb.RunDescription(
        run=run_info_to_proto(description.run),
        rounds=[round_info_to_proto(info) for info in description.rounds],
        grid=fleet_pb2.Grid(exponents=description.grid),
        num_at_work=description.num_at_work,
        at_work=description.at_work,
        deadline_s=description.deadline_s,
        num_devices=description.num_devices,
        num_gave_up=description.num_gave_up,
        warnings=[warned_to_proto(each) for each in description.warnings],
        saturated=saturated_to_proto(description.saturated),
    )


def description_from_proto(message: pb.RunDescription) -> RunDescription:
    return RunDescription(
        run=run_info_from_proto(message.run),
        rounds=tuple(round_info_from_proto(info) for info in message.rounds),
        grid=tuple(message.grid.exponents),
        num_at_work=message.num_at_work,
        at_work=tuple(message.at_work),
        deadline_s=message.deadline_s,
        num_devices=message.num_devices,
        num_gave_up=message.num_gave_up,
        warnings=tuple(warned_from_proto(each) for each in message.warnings),
        saturated=saturated_from_proto(message.saturated),
    )


def saturated_to_proto(saturated: SaturatedDevices) -> pb.SaturatedDevices:
    return pb.SaturatedDevices(num_devices=saturated.num_devices, num_values=dict(saturated.num_values))


def saturated_from_proto(message: pb.SaturatedDevices) -> SaturatedDevices:
    return replace(saturated_devices(message.num_values), num_devices=message.num_devices)


def num_rounds_from_proto(message: pb.DescribeRunRequest) -> int:
    """Return the requested number of Rounds. Raises InvalidInput for too many."""
    if message.rounds > MAX_DESCRIBED_ROUNDS:
        raise InvalidInput(f"describe: got {message.rounds} rounds, expected at most {MAX_DESCRIBED_ROUNDS}")
    return message.rounds


def version_with_bundle_to_proto(pair: VersionWithBundle) -> pb.GetVersionReply:
    return pb.GetVersionReply(version=version_to_proto(pair.version), bundle=bundle_to_proto(pair.bundle))


def version_with_bundle_from_proto(message: pb.GetVersionReply) -> VersionWithBundle:
    return VersionWithBundle(version=version_from_proto(message.version), bundle=bundle_from_proto(message.bundle))


def version_number_from_proto(message: pb.GetVersionRequest) -> int | None:
    """Return the requested number, or None for the newest Version. Raises NotFound for an impossible number."""
    if message.number > MAX_NUMBER:
        raise NotFound(f"run {message.run_id[:64]!r}: has no version {message.number}")
    return message.number if message.HasField("number") else None


def accepted_devices_to_proto(page: AcceptedDevices) -> pb.AcceptedDevicesReply:
    return pb.AcceptedDevicesReply(num_accepted=page.num_accepted, device_ids=page.device_ids)


def accepted_devices_from_proto(message: pb.AcceptedDevicesReply) -> AcceptedDevices:
    return AcceptedDevices(num_accepted=message.num_accepted, device_ids=tuple(message.device_ids))
