"""Wire messages without a valid value: each is refused with one sentence, or accepted on purpose."""

import asyncio
from dataclasses import replace

import pytest
from support.errors import raises
from support.values import assignment

from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput, NotFound
from fanin.protos.wire import check_numbers, from_proto, to_proto
from fanin.server.service import ControlService
from fanin.v1 import control_pb2, fleet_pb2


def test_an_empty_check_in_reply_is_refused() -> None:
    with raises(InvalidInput, "check-in reply: got answer None, expected assigned, wait or rejected"):
        from_proto(m.CheckInReply, fleet_pb2.CheckInReply())


def test_an_empty_upload_request_is_refused() -> None:
    with raises(InvalidInput, "upload: got part None, expected a header or a piece"):
        from_proto(m.UploadRequest, fleet_pb2.UploadRequest())


def test_too_many_entries_of_a_header_are_refused_before_a_loop_over_them() -> None:
    """One device could block the calls of all others: a header of 2.6 MB held 300,000 statistics."""
    header = fleet_pb2.UpdateHeader(payload=fleet_pb2.Artifact(size_bytes=(1 << 20) + 1))
    # Not valid either, but read later.
    header.payload.chunks.extend([fleet_pb2.ChunkRef()] * 2)
    header.statistics.counts.update({f"not a name {index}": 1 for index in range(65)})
    with raises(InvalidInput, "statistics: got 65 counts, expected at most 64"):
        from_proto(m.UpdateHeader, header)
    header.statistics.counts.clear()
    header.payload.chunks.add()
    with raises(InvalidInput, "update: got 3 chunks, expected at most 2 for 1048577 bytes"):
        from_proto(m.UpdateHeader, header)


@pytest.mark.parametrize("message", [fleet_pb2.UploadReply, fleet_pb2.ReportReply])
def test_unknown_states_are_refused(message: type[fleet_pb2.UploadReply] | type[fleet_pb2.ReportReply]) -> None:
    with raises(InvalidInput, "round state: got 0, expected one of [1, 2]"):
        from_proto(m.UploadReply, message.FromString(b"\x10\x09"))
    with raises(InvalidInput, "update state: got 9, expected one of [1, 2, 3, 4]"):
        from_proto(m.UploadReply, message.FromString(b"\x08\x01\x10\x09"))


def test_an_unknown_run_state_is_refused() -> None:
    with raises(InvalidInput, "run state: got 0, expected one of [1, 2, 3, 4, 5]"):
        from_proto(m.RunInfo, control_pb2.RunInfo())
    assert from_proto(m.RunInfo, control_pb2.RunInfo(state="RUN_STATE_FAILED")).state is m.RunState.FAILED


def test_a_phase_of_a_round_without_a_name_is_refused() -> None:
    with pytest.raises(InvalidInput, match="round: phase: got '', expected 1 to 128 letters"):
        from_proto(m.RoundInfo, control_pb2.RoundInfo())


def test_a_principal_of_an_unknown_kind_is_refused() -> None:
    principal = control_pb2.Principal(kind=9, id="a")
    with raises(InvalidInput, "principal kind: got 9, expected one of [1, 2, 3, 4, 5]"):
        from_proto(m.LoggedEvent, control_pb2.Event(run_resumed=control_pb2.RunResumed(by=principal)))


def test_an_event_of_an_unknown_kind_is_refused() -> None:
    with raises(InvalidInput, "event: got None, expected a kind that this fanin knows; install a newer one"):
        from_proto(m.LoggedEvent, control_pb2.Event(sequence=1))


def test_a_variant_without_a_wire_form_is_never_sent_empty() -> None:
    # A new variant, before its field exists.
    variant = object()
    for value, message in (
        (m.LoggedEvent(sequence=1, time=1.0, event=variant), control_pb2.Event),
        (m.Command(command_id="a", run_id="run", what=variant), control_pb2.CommandRequest),
        (m.CheckInReply(answer=variant), fleet_pb2.CheckInReply),
        (m.UploadRequest(part=variant), fleet_pb2.UploadRequest),
    ):
        with pytest.raises(AssertionError, match=f"{message.__name__}: has no variant <class 'object'>"):
            to_proto(value, message)


def test_a_field_that_its_message_lacks_is_an_error_unless_it_is_local() -> None:
    # A new field, before the message has it.
    with pytest.raises(AssertionError, match="DownloadPiece: has no field offset"):
        to_proto(m.Piece(offset=0, data=b""), fleet_pb2.DownloadPiece)
    command = m.Command(
        command_id="a", run_id="run", what=m.Stop(), by=m.Principal(kind=m.PrincipalKind.OPERATOR, id="b")
    )
    assert from_proto(m.Command, to_proto(command, control_pb2.CommandRequest)) == replace(command, by=None)


def test_a_closed_round_that_was_recorded_without_a_number_counts_its_devices() -> None:
    event = control_pb2.Event(round_closed=control_pb2.RoundClosed(round=1, accepted=["b", "a"]))
    assert from_proto(m.LoggedEvent, event).event == m.round_closed(1, ("b", "a"))
    with raises(InvalidInput, "round 1: got 2 accepted devices, expected at most 1"):
        from_proto(
            m.LoggedEvent,
            control_pb2.Event(round_closed=control_pb2.RoundClosed(round=1, accepted=["b", "a"], num_accepted=1)),
        )


def test_a_rejection_for_an_unknown_reason_is_still_a_rejection() -> None:
    message = fleet_pb2.CheckInReply.FromString(b"\x1a\x06\x08\x63\x12\x02no")
    assert from_proto(m.CheckInReply, message).answer == m.Rejected(reason=m.RejectReason.UNSUITABLE, text="no")


def test_fields_of_a_newer_protocol_are_ignored() -> None:
    data = to_proto(assignment(), fleet_pb2.Assignment).SerializeToString() + b"\xfa\x3f\x03new"
    assert from_proto(m.Assignment, fleet_pb2.Assignment.FromString(data)) == assignment()


def test_numbers_that_no_store_holds_are_refused() -> None:
    for number in (1 << 63, (1 << 64) - 1):
        with raises(NotFound, f"run 'run': has no version {number}"):
            m.check_version_number("run", number)
        with raises(NotFound, f"run 'run': has no version {number}"):
            adopt = control_pb2.AdoptVersion(number=number)
            from_proto(m.Command, control_pb2.CommandRequest(command_id="a", run_id="run", adopt=adopt))
        with raises(NotFound, f"run 'other': has no version {number}"):
            adopt = control_pb2.AdoptVersion(from_run_id="other", number=number)
            from_proto(m.Command, control_pb2.CommandRequest(command_id="a", run_id="run", adopt=adopt))
        with raises(NotFound, f"run 'run': has no version {number}"):
            version = fleet_pb2.Version(run_id="run")
            from_proto(m.Reclaim, control_pb2.ReclaimRunRequest(version=version, adopted_number=number))
        with raises(InvalidInput, f"WatchRequest: got from_sequence {number}, expected at most {(1 << 63) - 1}"):
            check_numbers(control_pb2.WatchRequest(from_sequence=number))
    largest = (1 << 63) - 1
    m.check_version_number("run", largest)
    check_numbers(control_pb2.WatchRequest(from_sequence=largest))


def test_a_version_is_requested_by_its_number_or_as_the_newest() -> None:
    numbers: list[int | None] = []

    class Versions:
        async def version(self, run_id: str, number: int | None) -> m.VersionWithBundle:
            numbers.append(number)
            return m.VersionWithBundle(version=assignment().version, bundle=assignment().bundle)

    for request in (
        control_pb2.GetVersionRequest(run_id="run"),
        control_pb2.GetVersionRequest(run_id="run", number=0),
    ):
        asyncio.run(ControlService(Versions(), None, None, None, None).GetVersion(request, None))
    assert numbers == [None, 0]


def test_a_version_without_delegation_is_read_without_one() -> None:
    message = fleet_pb2.Version.FromString(to_proto(assignment().version, fleet_pb2.Version).SerializeToString())
    message.ClearField("delegation")
    assert from_proto(m.Version, message).delegation is None


def test_two_auxiliary_tensors_of_one_name_are_refused() -> None:
    message = to_proto(assignment().version, fleet_pb2.Version)
    del message.auxiliary[:]
    for name in ("control", "control"):
        message.auxiliary.add(name=name, tensor=message.parameters)
    with raises(
        InvalidInput, f"version {message.number}: got two auxiliary tensors of one name, expected different names"
    ):
        from_proto(m.Version, message)
