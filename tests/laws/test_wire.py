"""Laws of the wire: each value is read back, and no bytes raise any error but ours. They hold for every type."""

from dataclasses import is_dataclass, replace
from importlib import import_module
from pkgutil import iter_modules

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from support.wire_laws import SENT, pairs, values

from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput, NotFound
from fanin.protos.plans import Plan
from fanin.protos.plans.keys import SectionField, fields_of
from fanin.protos.wire import from_proto, to_proto
from fanin.v1 import access_pb2, control_pb2, fleet_pb2, plan_pb2

PAIRS = pairs()
VARIANTS = {"Assigned", "Wait", "Rejected"}
"""Their fields are in several messages, so only a CheckInReply has them."""
PLAIN = {
    "AcceptedDevicesRequest",
    "ChunkData",
    "DescribeRunRequest",
    "DownloadPiece",
    "EnrollReply",
    "EvaluationsReply",
    "EvaluationsRequest",
    "GetDeviceRequest",
    "GetRunRequest",
    "GetVersionRequest",
    "ListAuditRequest",
    "ListLedgerRequest",
    "ListPopulationsRequest",
    "ListTokensRequest",
    "MissingChunksReply",
    "MissingChunksRequest",
    "CheckPlanReply",
    "CheckPlanRequest",
    "PrepareRunReply",
    "PrepareRunRequest",
    "PublishBundleReply",
    "PublishBundleRequest",
    "PublishVersionRequest",
    "PutChunksReply",
    "RevokeTokenRequest",
    "WatchRequest",
}
"""Messages without a dataclass: one or a few values, which the services read themselves."""
PARTS = {
    "Auxiliary": "Version.auxiliary",
    "Grid": "Assignment.grid",
    "ReportReply": "UploadReply without a number of bytes",
    "Setting": "FlowerPlan.config",
    "SettingList": "FlowerPlan.config",
    "TensorRole": "FlowerPlan.roles",
    "Rejected": "CheckInReply.answer",
    "Wait": "CheckInReply.answer",
}
"""Messages that are a field of a dataclass, or a second form of one."""


UNCHECKED = {"FlowerPlan", "ScheduledChange"}
"""Sections that do not check the roles in them: the Plan or the Assignment around does."""


def sections(section: type) -> set[str]:
    """Return the names of a section of the Plan and of all sections within."""
    parts = (field.section for field in fields_of(section).values() if isinstance(field, SectionField))
    return {section.__name__}.union(*map(sections, parts))


def test_every_type_has_its_message() -> None:
    modules = [import_module(f"{m.__name__}.{each.name}") for each in iter_modules(m.__path__)]
    types = {
        name
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, type) and is_dataclass(value) and value.__module__ == module.__name__
    }
    assert types | sections(Plan) == (set(PAIRS) | VARIANTS) - {"Artifact", "ChunkRef"}


def test_every_message_has_its_type() -> None:
    names = {
        name
        for file in (fleet_pb2, control_pb2, access_pb2, plan_pb2)
        for name in file.DESCRIPTOR.message_types_by_name
    }
    typed = {message.DESCRIPTOR.name for _, message in PAIRS.values()}
    assert names - typed == PLAIN | set(PARTS)


@pytest.mark.parametrize("name", PAIRS)
@given(st.data())
def test_a_value_is_read_back_and_no_bytes_raise_anything_but_our_errors(name: str, data: st.DataObject) -> None:
    # One test for both laws, because most of its time goes into drawing a value.
    kind, message = PAIRS[name]
    drawn = data.draw(values(kind, message))
    good = to_proto(drawn, message).SerializeToString()
    assert from_proto(kind, message.FromString(good)) == drawn
    start = data.draw(st.integers(0, len(good)))
    stop = data.draw(st.integers(start, min(start + 3, len(good))))
    mutated = good[:start] + data.draw(st.binary(max_size=3)) + good[stop:]
    for wire in (mutated, data.draw(st.binary(max_size=60))):
        try:
            parsed = message.FromString(wire)
        except DecodeError:
            continue  # the gRPC layer maps this error
        try:
            value = from_proto(kind, parsed)
        except InvalidInput as exc:
            assert ", expected " in str(exc)
            continue
        except NotFound as exc:
            assert ": has no version " in str(exc)
            continue
        if name in UNCHECKED:
            continue
        # A value that was read can be written again, and is read back unchanged.
        again = to_proto(value, message).SerializeToString()
        assert repr(from_proto(kind, message.FromString(again))) == repr(value)


@given(values(m.UploadReply, SENT[m.UploadReply]))
def test_a_report_reply_is_an_upload_reply_without_bytes(reply: m.UploadReply) -> None:
    message = fleet_pb2.ReportReply.FromString(to_proto(reply, fleet_pb2.ReportReply).SerializeToString())
    assert from_proto(m.UploadReply, message) == replace(reply, received_bytes=0)
