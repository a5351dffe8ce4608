"""Golden frames: the bytes that are sent and the bytes that are signed, for fixed values and fixed keys.

    python tests/golden/frames.py

writes one hex file a frame into ``frames/``. A change there needs a new number, or readers that read both forms.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from google.protobuf.message import Message
from support import manifests
from support.values import (
    BUNDLE,
    DELEGATION,
    DEVICE_KEY,
    PUBLISHER,
    RUN,
    RUN_KEY,
    TABLE,
    assignment,
    parameters,
    plan,
    update,
    version,
)

from fanin.edge.bundles.keys import BUNDLE_CONTEXT, CALL_CONTEXT
from fanin.edge.bundles.manifest_json import dump_manifest
from fanin.edge.bundles.versions import begin_epoch, sign_delegation
from fanin.edge.tensors import encode_parameters
from fanin.protos import messages as m
from fanin.protos.calls import DeviceCall, device_id_of
from fanin.protos.plans import FlowerPlan
from fanin.protos.plans.entries import Setting
from fanin.protos.roles import RoleKind, TensorRole
from fanin.protos.wire import from_proto, to_proto
from fanin.server.storage.access import next_entry
from fanin.server.storage.records import AuditFact
from fanin.v1 import access_pb2, control_pb2, fleet_pb2

FOLDER: Final = Path(__file__).parent / "frames"
_LINE_CHARS: Final = 96

HEADER, PAYLOAD = update(assignment(), saturated=1, train_loss_q16=-5)
MEASURED: Final = replace(HEADER, ranges=m.RangeCounts(cells=(3, 4, 130), counts=(60, 4, 64)))
VERSION: Final = version(parent=version())
STAGED: Final = replace(
    assignment(),
    version=version(parent=version(), auxiliary={"control": VERSION.parameters}),
    stages=(m.StageSpec(name="scaffold", options={"num_devices": 8.0}), m.StageSpec(name="error_feedback")),
    state=m.StageState(lineage=3, round=5),
    statistics=(m.Statistic(name="words", unit="words", bound=1 << 40),),
)
CALL: Final = DeviceCall(
    method="/fanin.v1.Fleet/CheckIn",
    device_id=device_id_of(DEVICE_KEY.public),
    time_us=1_700_000_000_000_000,
    body_sha256="ab" * 32,
)
CHECK_IN: Final = m.CheckIn(
    protocol=m.PROTOCOL,
    capabilities=m.Capabilities(
        codecs=("fixed32",),
        runtimes=("onnxruntime 1.31.0",),
        graph_formats=("onnx",),
        max_download_bytes=1 << 33,
    ),
    wait_s=40.0,
    served=m.ServedVersion(run_id=RUN, epoch=1, number=0),
)
NEWEST: Final = m.Publication(download_id="run.v1.device", run_id=RUN, bundle=BUNDLE, version=VERSION)
EXCHANGE_OUTCOMES: Final = {
    "answer": m.ExchangeAnswer(message=b"\x01\xfeanswer"),
    "pause": m.ExchangePause(retry_min_s=0.5, retry_max_s=2.25),
    "end": m.ExchangeEnd(reason="the round has ended"),
}
REPLY: Final = m.UploadReply(
    round_state=m.RoundState.CLOSED, update_state=m.UpdateState.ACCEPTED, received_bytes=len(PAYLOAD)
)
PUBLISHED: Final = m.VersionPublished(
    number=1,
    version_sha256=VERSION.sha256,
    parent=0,
    round=1,
    round_s=2.5,
    bytes_down=1 << 33,
    bytes_up=1000,
    num_saturated=1,
    saturated=m.saturated_devices({"a": 3, "b": 5}),
    num_rounded=2,
    num_clamped=3,
    train_loss=1.5,
    train_loss_examples=30,
    total_examples=40,
    evaluation=m.Evaluation(
        num_examples=8, loss=0.5, accuracy_float=0.75, accuracy_int8=0.625, int8_agreement=0.875, num_labels=8
    ),
    runtimes=MappingProxyType({"synthetic 1": 4}),
    statistics=MappingProxyType({"train.words": 9, "words": -7}),
    statistics_examples=MappingProxyType({"train.words": 30}),
    device_spreads=MappingProxyType(
        {"train_loss": m.DeviceSpread(num_devices=4, mean=1.25, min=0.5, p10=0.75, median=1.0, p90=1.75, max=2.5)}
    ),
    times=m.RoundTimes(num_devices=4, wait_s=1.0, download_s=0.5, train_s=2.0, upload_s=0.25, fold_s=0.125),
)
BY: Final = m.Principal(kind=m.PrincipalKind.OPERATOR, id="3fa9c01b2d4e")
INFO: Final = m.RunInfo(
    run_id=RUN,
    state=m.RunState.FINISHED,
    plan=plan(),
    bundle_sha256=BUNDLE.manifest.sha256,
    version=3,
    epoch=1,
    version_sha256=VERSION.sha256,
    num_rounds=3,
    max_rounds=3,
    reason="3 of 3 rounds done",
)
EVALUATION: Final = m.VersionEvaluation(
    version=2,
    data="digits",
    data_sha256="ab" * 32,
    num_examples=30,
    values=MappingProxyType({"accuracy": 0.75, "loss": 0.5}),
    runtime="synthetic 1",
    seconds=1.5,
    time=1_700_000_000.25,
)
FETCHED: Final = m.VersionWithBundle(version=VERSION, bundle=BUNDLE)
STARTED_BY: Final = replace(INFO, started_by=BY, waits_for_publisher=True)
EVALUATED: Final = replace(INFO, newest_evaluation=EVALUATION, best_evaluation=EVALUATION)
WARNED: Final = m.RunWarned(code="shared_partition", subject="a b", text="two devices report partition 3")
LIVE: Final = m.LiveRound(
    round=4,
    phase="training",
    num_at_work=2,
    at_work=("a", "b"),
    deadline_s=12.5,
    num_gave_up=1,
    num_refused=2,
    failures=(m.FailureCount(code="FN-0843", num_times=3, newest="got 7 labels, expected 3 [FN-0843]"),),
    progress=MappingProxyType({"a": m.TrainingProgress(step=3, num_steps=9, epoch=1, num_epochs=2)}),
    uploads=MappingProxyType({"b": m.UploadProgress(received_bytes=5, size_bytes=8)}),
    trouble="uploads wait: no space is left",
)
DESCRIPTION: Final = m.RunDescription(
    run=INFO,
    rounds=(
        m.RoundInfo(round=4, base_version=3, phase="training", num_updates=1, opened_at=1_700_000_000.25),
        m.RoundInfo(round=3, base_version=2, phase="published", num_updates=2, opened_at=1.7e9, version=3),
    ),
    grid=(-9, 3),
    live=LIVE,
    num_devices=100_000,
    saturated=m.saturated_devices({"a": 3}),
    warnings=(WARNED,),
    disk=m.DiskReport(free_bytes=9_000_000, used_bytes=1_000_000, bytes_per_day=-2.5, days_left=30.0),
)
RECLAIM: Final = m.Reclaim(
    delegation=sign_delegation(
        PUBLISHER, run_id=RUN, epoch=2, bundle_sha256=BUNDLE.manifest.sha256, run_public_key=RUN_KEY.public
    ),
    version=replace(begin_epoch(PUBLISHER, VERSION), delegation=None),
    adopted_number=1,
    rounds=4,
)
START: Final = m.StartRun(run_id=RUN, plan=plan(), version=version(), delegation=DELEGATION)

FLOWER_CONFIG: Final[dict[str, Setting]] = {
    "epochs": 2,
    "is-last": False,
    "momentum": 0.9,
    "names": ("a", "b"),
    "none": (),
    "optimizer": "sgd",
    "shift": -(1 << 62),
    "table": b"\x00\xff",
}
"""A value of each type."""
FLOWER_ROLES: Final[dict[str, TensorRole]] = {
    "*.gate": TensorRole(role=RoleKind.PARAMETER, lowest=0.0, highest=1.0),
    "steps": TensorRole(role=RoleKind.COUNTER),
    "var*": TensorRole(role=RoleKind.STATISTIC, lowest=0.0),
}
FLOWER: Final = FlowerPlan(config=FLOWER_CONFIG, roles=FLOWER_ROLES)


PRIVACY: Final = m.PrivacyTerms(
    mechanism="central",
    clip_norm=0.5,
    noise_multiplier=1.1,
    squared_sensitivity=1 << 36,
    epsilon=2.0,
    delta=1e-6,
    population="phones",
    population_size=100_000,
)
COMMANDS: Final = {
    "pause": m.Pause(),
    "resume": m.Resume(rounds=3),
    "stop": m.Stop(),
    "adopt": m.Adopt(from_run_id="other", number=7, rounds=2),
}
TOKEN: Final = m.NewToken(
    name="ward-3",
    role=m.Role.DEVICE,
    sha256="ab" * 32,
    lifetime_s=604800.0,
    max_uses=1,
    label="cart 7",
    tags=MappingProxyType({"site": "charite"}),
)
FACT: Final = AuditFact(principal="admin anna", call="CreateToken", subject='token caf\u00e9: "viewer"')
ENTRY: Final = next_entry(None, FACT, 1_700_000_000.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message: the value, its wire form, and the function that converts it back."""

    value: object
    message: Message
    back: Callable[..., object]


def _frame(value: object, message: type[Message]) -> Frame:
    return Frame(value=value, message=to_proto(value, message), back=lambda message: from_proto(type(value), message))


def _event(sequence: int, event: m.RunEvent) -> Frame:
    entry = m.LoggedEvent(sequence=sequence, time=1_700_000_000.25, event=event)
    return _frame(entry, control_pb2.Event)


def _plain(message: Message) -> Frame:
    """Return the frame of a message that has no value type."""
    return Frame(value=message, message=message, back=lambda value: value)


def frames() -> dict[str, Frame]:
    """Return the frames of all messages of the device protocol, and of the main messages of the operator protocol."""
    wait = m.Wait(retry_min_s=0.5, retry_max_s=2.5)
    enrollment = m.Enrollment(protocol=m.PROTOCOL, token="token", public_key=DEVICE_KEY.public)
    download = m.Download(assignment_id="run.1.device", sha256="ab" * 32, offset=1 << 33)
    more = m.Download(assignment_id="run.1.device", sha256="ab" * 32, offset=0, more_sha256=("cd" * 32, "ef" * 32))
    report = m.Report(
        assignment_id="run.1.device", failure="it diverged", telemetry=replace(HEADER.telemetry, partition=3)
    )
    progress = m.Report(
        assignment_id="run.1.device", progress=m.TrainingProgress(step=3, num_steps=40, epoch=1, num_epochs=10)
    )
    reporting = replace(CHECK_IN, capabilities=replace(CHECK_IN.capabilities, reports_progress=True))
    condition = m.DeviceCondition(battery_percent=80, is_charging=True, network=m.NetworkKind.WIFI)
    telling = replace(CHECK_IN, condition=condition, fanin_version="0.1.0")
    answers = {
        "assigned": m.Assigned(assignment=assignment()),
        "assigned-stages": m.Assigned(assignment=STAGED),
        "assigned-progress": m.Assigned(assignment=replace(assignment(), progress_s=10.0)),
        "assigned-flower": m.Assigned(assignment=replace(assignment(), flower=FLOWER)),
        "assigned-protocol": m.Assigned(
            assignment=replace(
                assignment(), round_protocol=m.RoundPlan(protocol="commit_reveal", options={"deadline_s": 30.0})
            )
        ),
        "assigned-privacy": m.Assigned(assignment=replace(assignment(), privacy=PRIVACY)),
        "wait": wait,
        "newest": replace(wait, newest=NEWEST),
        "finished": replace(wait, finished=assignment().training),
        "upgrade": m.Rejected(reason=m.RejectReason.UPGRADE, text="install another fanin"),
        "unsuitable": m.Rejected(reason=m.RejectReason.UNSUITABLE, text="codec"),
    }
    events: dict[str, m.RunEvent] = {
        "opened": m.RoundOpened(round=1, base_version=0),
        "closed": m.round_closed(1, ("b", "a")),
        "failed": m.RoundFailed(round=2, reason="nobody came"),
        "published": PUBLISHED,
        "rested": m.RunRested(state=m.RunState.FAILED, reason="nobody came"),
        "resumed": m.RunResumed(rounds=3),
        "warned": WARNED,
        "published-by": replace(PUBLISHED, round=0, by=BY),
        "rested-by": m.RunRested(state=m.RunState.PAUSED, reason=f"by {BY}", by=BY),
        "resumed-by": m.RunResumed(rounds=3, by=BY),
        "reclaimed": replace(PUBLISHED, round=0, new_epoch=2, by=BY),
        "gone": m.devices_gone(2, ("b", "a")),
        "failed-others": m.RoundFailed(round=2, reason="b was silent", others_wait=True),
    }
    evaluations = (
        EVALUATION,
        m.VersionEvaluation(version=4, data="digits", time=1.7e9, problem="no such file"),
    )
    return {
        "fleet-enroll-request": _frame(enrollment, fleet_pb2.EnrollRequest),
        "fleet-enroll-reply": _plain(fleet_pb2.EnrollReply(device_id=CALL.device_id)),
        "fleet-check-in-request": _frame(CHECK_IN, fleet_pb2.CheckInRequest),
        "fleet-check-in-request-progress": _frame(reporting, fleet_pb2.CheckInRequest),
        "fleet-check-in-request-condition": _frame(telling, fleet_pb2.CheckInRequest),
        **{
            f"fleet-check-in-reply-{name}": _frame(m.CheckInReply(answer=answer), fleet_pb2.CheckInReply)
            for name, answer in answers.items()
        },
        "fleet-download-request": _frame(download, fleet_pb2.DownloadRequest),
        "fleet-download-request-more": _frame(more, fleet_pb2.DownloadRequest),
        "fleet-download-piece": _plain(fleet_pb2.DownloadPiece(data=b"\0\xffpiece")),
        "fleet-upload-request-header-with-ranges": _frame(m.UploadRequest(part=MEASURED), fleet_pb2.UploadRequest),
        "fleet-upload-request-header": _frame(m.UploadRequest(part=HEADER), fleet_pb2.UploadRequest),
        "fleet-upload-request-piece": _frame(
            m.UploadRequest(part=m.Piece(offset=1 << 33, data=PAYLOAD)), fleet_pb2.UploadRequest
        ),
        "fleet-upload-reply": _frame(REPLY, fleet_pb2.UploadReply),
        "fleet-report-request": _frame(report, fleet_pb2.ReportRequest),
        "fleet-report-request-progress": _frame(progress, fleet_pb2.ReportRequest),
        "fleet-exchange-request": _frame(
            m.ExchangeRequest(assignment_id="run.1.device", phase="committing", payload=b"\0\xffmessage", wait_s=40.0),
            fleet_pb2.ExchangeRequest,
        ),
        **{
            f"fleet-exchange-reply-{name}": _frame(m.ExchangeReply(outcome=outcome), fleet_pb2.ExchangeReply)
            for name, outcome in EXCHANGE_OUTCOMES.items()
        },
        "fleet-report-reply": _frame(
            m.UploadReply(round_state=m.RoundState.OPEN, update_state=m.UpdateState.DISCARDED), fleet_pb2.ReportReply
        ),
        "control-prepare-run-request": _plain(control_pb2.PrepareRunRequest(run_id=RUN, epoch=2)),
        "control-reclaim-run-request": _frame(RECLAIM, control_pb2.ReclaimRunRequest),
        "control-start-run-request": _frame(START, control_pb2.StartRunRequest),
        "control-run-info": _frame(INFO, control_pb2.RunInfo),
        "control-run-info-evaluated": _frame(EVALUATED, control_pb2.RunInfo),
        "control-evaluations-reply": Frame(
            value=evaluations,
            message=control_pb2.EvaluationsReply(
                evaluations=[to_proto(each, control_pb2.VersionEvaluation) for each in evaluations]
            ),
            back=lambda reply: tuple(from_proto(m.VersionEvaluation, each) for each in reply.evaluations),
        ),
        "control-run-info-started-by": _frame(STARTED_BY, control_pb2.RunInfo),
        "control-run-description": _frame(DESCRIPTION, control_pb2.RunDescription),
        "control-get-version-reply": _frame(FETCHED, control_pb2.GetVersionReply),
        "control-publish-version-request": _plain(
            control_pb2.PublishVersionRequest(version=to_proto(VERSION, fleet_pb2.Version), rounds=5)
        ),
        **{
            f"control-command-request-{name}": _frame(
                m.Command(command_id="command-1", run_id=RUN, what=what), control_pb2.CommandRequest
            )
            for name, what in COMMANDS.items()
        },
        "control-chunk-data": _plain(control_pb2.ChunkData(sha256="ab" * 32, data=b"chunk")),
        "access-create-token-request": _frame(TOKEN, access_pb2.CreateTokenRequest),
        "access-audit-entry": _frame(ENTRY, access_pb2.AuditEntry),
        "control-watch-reply-live": _frame(m.WatchReply(what=LIVE), control_pb2.WatchReply),
        **{f"control-event-{name}": _event(number, event) for number, (name, event) in enumerate(events.items(), 1)},
    }


def raw() -> dict[str, bytes]:
    """Return the exact bytes that are signed or digested, and their signatures (Ed25519 is deterministic)."""
    manifest = dump_manifest(manifests.manifest())
    return {
        "parameters": encode_parameters(TABLE, parameters()),
        "update-payload": PAYLOAD,
        "manifest": manifest,
        "manifest-signature": PUBLISHER.sign(BUNDLE_CONTEXT, manifest),
        "call-signed": CALL.signed_bytes(),
        "call-signature": DEVICE_KEY.sign(CALL_CONTEXT, CALL.signed_bytes()),
        "version-signature": VERSION.signature,
        "delegation-signature": DELEGATION.signature,
    }


def all_bytes() -> dict[str, bytes]:
    """Return the bytes of each golden file by name."""
    wire = {name: frame.message.SerializeToString(deterministic=True) for name, frame in frames().items()}
    return wire | raw()


def hex_of(data: bytes) -> str:
    """Return hexadecimal text in short lines, so that a diff shows the place of a difference."""
    text = data.hex()
    return "".join(f"{text[start : start + _LINE_CHARS]}\n" for start in range(0, len(text), _LINE_CHARS))


def main() -> None:
    """Write all files again."""
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.hex"):
        path.unlink()
    for name, data in all_bytes().items():
        (FOLDER / f"{name}.hex").write_text(hex_of(data))


if __name__ == "__main__":
    main()
