"""Laws of the wire: every value survives the round trip, and no bytes raise anything but InvalidInput."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st
from support import control_laws as sc
from support import laws as s

from fanin.protos import convert as c
from fanin.protos import convert_control as cr
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import UploadReply
from fanin.v1 import control_pb2, fleet_pb2, plan_pb2

Pair = tuple[st.SearchStrategy[object], Callable[[object], Message], Callable[[Message], object], type[Message]]

PAIRS: Final[dict[str, Pair]] = {
    "artifact": (s.ARTIFACTS, c.artifact_to_proto, c.artifact_from_proto, fleet_pb2.Artifact),
    "bundle": (s.BUNDLES, c.bundle_to_proto, c.bundle_from_proto, fleet_pb2.BundleRef),
    "delegation": (s.DELEGATIONS, c.delegation_to_proto, c.delegation_from_proto, fleet_pb2.Delegation),
    "version": (s.versions(), c.version_to_proto, c.version_from_proto, fleet_pb2.Version),
    "assignment": (s.ASSIGNMENTS, c.assignment_to_proto, c.assignment_from_proto, fleet_pb2.Assignment),
    "publication": (s.PUBLICATIONS, c.publication_to_proto, c.publication_from_proto, fleet_pb2.Publication),
    "enrollment": (s.ENROLLMENTS, c.enrollment_to_proto, c.enrollment_from_proto, fleet_pb2.EnrollRequest),
    "check_in": (s.CHECK_INS, c.check_in_to_proto, c.check_in_from_proto, fleet_pb2.CheckInRequest),
    "answer": (s.ANSWERS, c.answer_to_proto, c.answer_from_proto, fleet_pb2.CheckInReply),
    "download": (s.DOWNLOADS, c.download_to_proto, c.download_from_proto, fleet_pb2.DownloadRequest),
    "telemetry": (s.TELEMETRY, c.telemetry_to_proto, c.telemetry_from_proto, fleet_pb2.Telemetry),
    "header": (s.HEADERS, c.header_to_proto, c.header_from_proto, fleet_pb2.UpdateHeader),
    "upload": (s.HEADERS | s.PIECES, c.upload_to_proto, c.upload_from_proto, fleet_pb2.UploadRequest),
    "upload_reply": (s.UPLOAD_REPLIES, c.upload_reply_to_proto, c.upload_reply_from_proto, fleet_pb2.UploadReply),
    "progress": (sc.PROGRESS, c.progress_to_proto, c.progress_from_proto, fleet_pb2.TrainingProgress),
    "report": (s.REPORTS, c.report_to_proto, c.report_from_proto, fleet_pb2.ReportRequest),
    "plan": (s.plans(), cr.plan_to_proto, cr.plan_from_proto, plan_pb2.Plan),
    "start_run": (sc.START_RUNS, cr.start_run_to_proto, cr.start_run_from_proto, control_pb2.StartRunRequest),
    "reclaim": (sc.reclaims(), cr.reclaim_to_proto, cr.reclaim_from_proto, control_pb2.ReclaimRunRequest),
    "run_info": (sc.RUN_INFOS, cr.run_info_to_proto, cr.run_info_from_proto, control_pb2.RunInfo),
    "listed_runs": (
        sc.LISTED_RUNS,
        cr.listed_runs_to_proto,
        cr.listed_runs_from_proto,
        control_pb2.ListRunsReply,
    ),
    "round_info": (sc.ROUND_INFOS, cr.round_info_to_proto, cr.round_info_from_proto, control_pb2.RoundInfo),
    "description": (sc.DESCRIPTIONS, cr.description_to_proto, cr.description_from_proto, control_pb2.RunDescription),
    "version_with_bundle": (
        sc.WITH_BUNDLES,
        cr.version_with_bundle_to_proto,
        cr.version_with_bundle_from_proto,
        control_pb2.GetVersionReply,
    ),
    "evaluation": (
        sc.VERSION_EVALUATIONS,
        cr.evaluation_to_proto,
        cr.evaluation_from_proto,
        control_pb2.VersionEvaluation,
    ),
    "evaluations": (
        st.lists(sc.VERSION_EVALUATIONS, max_size=3).map(tuple),
        cr.evaluations_to_proto,
        cr.evaluations_from_proto,
        control_pb2.EvaluationsReply,
    ),
    "command": (sc.COMMANDS, cr.command_to_proto, cr.command_from_proto, control_pb2.CommandRequest),
    "accepted_devices": (
        sc.ACCEPTED_DEVICES,
        cr.accepted_devices_to_proto,
        cr.accepted_devices_from_proto,
        control_pb2.AcceptedDevicesReply,
    ),
    "event": (sc.EVENTS, cr.event_to_proto, cr.event_from_proto, control_pb2.Event),
}


def test_every_converter_has_its_pair() -> None:
    names = {
        name.removesuffix("_to_proto")
        for module in (c, cr)
        for name in vars(module)
        if name.endswith("_to_proto") and name[0] != "_"
    }
    # A ReportReply is read as an UploadReply. It has its own test below.
    assert names - {"report_reply"} == set(PAIRS)


@given(s.UPLOAD_REPLIES)
def test_a_report_reply_is_an_upload_reply_without_bytes(reply: UploadReply) -> None:
    message = fleet_pb2.ReportReply.FromString(c.report_reply_to_proto(reply).SerializeToString())
    assert c.upload_reply_from_proto(message) == replace(reply, received_bytes=0)


@pytest.mark.parametrize("name", PAIRS)
@given(st.data())
def test_a_value_is_read_back_and_no_bytes_raise_anything_but_invalid_input(name: str, data: st.DataObject) -> None:
    # One test for both laws, because most of its time goes into drawing a value.
    values, to_proto, from_proto, kind = PAIRS[name]
    drawn = data.draw(values)
    good = to_proto(drawn).SerializeToString()
    assert from_proto(kind.FromString(good)) == drawn
    start = data.draw(st.integers(0, len(good)))
    stop = data.draw(st.integers(start, min(start + 3, len(good))))
    mutated = good[:start] + data.draw(st.binary(max_size=3)) + good[stop:]
    for wire in (mutated, data.draw(st.binary(max_size=60))):
        try:
            message = kind.FromString(wire)
        except DecodeError:
            continue  # the gRPC layer maps this error
        try:
            value = from_proto(message)
        except InvalidInput as exc:
            assert ", expected " in str(exc) or "unknown states" in str(exc)
            continue
        # A value that was read can be written again, and is read back unchanged.
        assert repr(from_proto(kind.FromString(to_proto(value).SerializeToString()))) == repr(value)
