"""Wire messages without a valid value: each is refused with one sentence, or accepted on purpose."""

import pytest
from support.errors import raises
from support.values import assignment

from fanin.protos import convert as c
from fanin.protos import convert_control as cr
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput, NotFound
from fanin.protos.messages import Command, LoggedEvent, RunState, round_closed
from fanin.v1 import control_pb2, fleet_pb2


def test_an_empty_check_in_reply_is_refused() -> None:
    with raises(InvalidInput, "check-in reply: got answer None, expected assigned, wait or rejected"):
        c.answer_from_proto(fleet_pb2.CheckInReply())


def test_an_empty_upload_request_is_refused() -> None:
    with raises(InvalidInput, "upload: got part None, expected a header or a piece"):
        c.upload_from_proto(fleet_pb2.UploadRequest())


def test_too_many_entries_of_a_header_are_refused_before_a_loop_over_them() -> None:
    """One device could block the calls of all others: a header of 2.6 MB held 300,000 statistics."""
    header = fleet_pb2.UpdateHeader(payload=fleet_pb2.Artifact(size_bytes=(1 << 20) + 1))
    # Not valid either, but read later.
    header.payload.chunks.extend([fleet_pb2.ChunkRef()] * 2)
    header.statistics.counts.update({f"not a name {index}": 1 for index in range(65)})
    with raises(InvalidInput, "statistics: got 65 counts, expected at most 64"):
        c.header_from_proto(header)
    header.statistics.counts.clear()
    header.payload.chunks.add()
    with raises(InvalidInput, "update: got 3 chunks, expected at most 2 for 1048577 bytes"):
        c.header_from_proto(header)


def test_unknown_states_are_refused() -> None:
    with raises(InvalidInput, "upload reply: got unknown states 0 and 9"):
        c.upload_reply_from_proto(fleet_pb2.UploadReply.FromString(b"\x10\x09"))


def test_an_unknown_run_state_is_refused() -> None:
    with raises(InvalidInput, "run state: got 0, expected one of [1, 2, 3, 4, 5]"):
        cr.run_state_from_proto(0)
    assert cr.run_state_from_proto(control_pb2.RUN_STATE_FAILED) is RunState.FAILED


def test_a_principal_of_an_unknown_kind_is_refused() -> None:
    principal = control_pb2.Principal(kind=9, id="a")
    with raises(InvalidInput, "principal kind: got 9, expected one of [1, 2, 3]"):
        cr.event_from_proto(control_pb2.Event(run_resumed=control_pb2.RunResumed(by=principal)))


def test_an_event_of_an_unknown_kind_is_refused() -> None:
    with raises(InvalidInput, "event: got None, expected a kind that this fanin knows; install a newer one"):
        cr.event_from_proto(control_pb2.Event(sequence=1))


def test_a_variant_without_a_wire_form_is_never_sent_empty() -> None:
    # A new variant, before its case is written.
    variant = object()
    for write in (
        lambda: cr.event_to_proto(LoggedEvent(sequence=1, time=1.0, event=variant)),
        lambda: cr.command_to_proto(Command(command_id="a", run_id="run", what=variant)),
        lambda: c.answer_to_proto(variant),
        lambda: c.upload_to_proto(variant),
    ):
        with pytest.raises(AssertionError, match="Expected code to be unreachable"):
            write()


def test_a_closed_round_that_was_recorded_without_a_number_counts_its_devices() -> None:
    event = control_pb2.Event(round_closed=control_pb2.RoundClosed(round=1, accepted=["b", "a"]))
    assert cr.event_from_proto(event).event == round_closed(1, ("b", "a"))
    with raises(InvalidInput, "round 1: got 2 accepted devices, expected at most 1"):
        cr.event_from_proto(
            control_pb2.Event(round_closed=control_pb2.RoundClosed(round=1, accepted=["b", "a"], num_accepted=1))
        )


def test_a_rejection_for_an_unknown_reason_is_still_a_rejection() -> None:
    message = fleet_pb2.CheckInReply.FromString(b"\x1a\x06\x08\x63\x12\x02no")
    assert c.answer_from_proto(message) == m.Rejected(reason=m.RejectReason.UNSUITABLE, text="no")


def test_fields_of_a_newer_protocol_are_ignored() -> None:
    data = c.assignment_to_proto(assignment()).SerializeToString() + b"\xfa\x3f\x03new"
    assert c.assignment_from_proto(fleet_pb2.Assignment.FromString(data)) == assignment()


def test_numbers_that_no_store_holds_are_refused() -> None:
    for number in (1 << 63, (1 << 64) - 1):
        with raises(NotFound, f"run 'run': has no version {number}"):
            cr.version_number_from_proto(control_pb2.GetVersionRequest(run_id="run", number=number))
        with raises(InvalidInput, f"watch: got from_sequence {number}, expected at most {(1 << 63) - 1}"):
            cr.from_sequence_from_proto(control_pb2.WatchRequest(run_id="run", from_sequence=number))
    largest = (1 << 63) - 1
    assert cr.version_number_from_proto(control_pb2.GetVersionRequest(number=largest)) == largest
    assert cr.version_number_from_proto(control_pb2.GetVersionRequest(number=0)) == 0
    assert cr.version_number_from_proto(control_pb2.GetVersionRequest()) is None
    assert cr.from_sequence_from_proto(control_pb2.WatchRequest(from_sequence=largest)) == largest


def test_a_version_without_delegation_is_read_without_one() -> None:
    message = fleet_pb2.Version.FromString(c.version_to_proto(assignment().version).SerializeToString())
    message.ClearField("delegation")
    assert c.version_from_proto(message).delegation is None


def test_two_auxiliary_tensors_of_one_name_are_refused() -> None:
    message = c.version_to_proto(assignment().version)
    del message.auxiliary[:]
    for name in ("control", "control"):
        message.auxiliary.add(name=name, tensor=message.parameters)
    with raises(
        InvalidInput, f"version {message.number}: got two auxiliary tensors of one name, expected different names"
    ):
        c.version_from_proto(message)
