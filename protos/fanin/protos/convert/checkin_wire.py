"""Wire form of enrollment, check-ins and their answers."""

from typing import Final, assert_never

from fanin.protos.convert.assignment_wire import assignment_from_proto, assignment_to_proto
from fanin.protos.convert.version_wire import publication_from_proto, publication_to_proto
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import (
    Assigned,
    Capabilities,
    CheckIn,
    CheckInAnswer,
    Enrollment,
    Publication,
    Rejected,
    RejectReason,
    ServedVersion,
    Wait,
)
from fanin.v1 import fleet_pb2 as pb

_REASONS: Final = {
    RejectReason.UPGRADE: pb.REJECT_REASON_UPGRADE,
    RejectReason.UNSUITABLE: pb.REJECT_REASON_UNSUITABLE,
}


def enrollment_to_proto(enrollment: Enrollment) -> pb.EnrollRequest:
    return pb.EnrollRequest(
        protocol=enrollment.protocol, token=enrollment.token, public_key=bytes.fromhex(enrollment.public_key)
    )


def enrollment_from_proto(message: pb.EnrollRequest) -> Enrollment:
    return Enrollment(protocol=message.protocol, token=message.token, public_key=message.public_key.hex())


def check_in_to_proto(check_in: CheckIn) -> pb.CheckInRequest:
    can, served = check_in.capabilities, check_in.served
    return pb.CheckInRequest(
        protocol=check_in.protocol,
        capabilities=pb.Capabilities(
            codecs=can.codecs,
            runtimes=can.runtimes,
            graph_formats=can.graph_formats,
            max_download_bytes=can.max_download_bytes,
            stages=can.stages,
            reports_progress=can.reports_progress,
        ),
        wait_s=check_in.wait_s,
        served=None
        if served is None
        else pb.ServedVersion(run_id=served.run_id, epoch=served.epoch, number=served.number),
    )


def check_in_from_proto(message: pb.CheckInRequest) -> CheckIn:
    can, served = message.capabilities, message.served
    return CheckIn(
        protocol=message.protocol,
        capabilities=Capabilities(
            codecs=tuple(can.codecs),
            runtimes=tuple(can.runtimes),
            graph_formats=tuple(can.graph_formats),
            max_download_bytes=can.max_download_bytes,
            stages=tuple(can.stages),
            reports_progress=can.reports_progress,
        ),
        wait_s=message.wait_s,
        served=ServedVersion(run_id=served.run_id, epoch=served.epoch, number=served.number)
        if message.HasField("served")
        else None,
    )


def answer_to_proto(answer: CheckInAnswer) -> pb.CheckInReply:
    match answer:
        case Assigned():
            return pb.CheckInReply(assigned=assignment_to_proto(answer.assignment))
        case Wait():
            wait = pb.Wait(retry_min_s=answer.retry_min_s, retry_max_s=answer.retry_max_s)
            return pb.CheckInReply(wait=wait, newest=_newest_to_proto(answer.newest))
        case Rejected():
            rejected = pb.Rejected(reason=_REASONS[answer.reason], text=answer.text)
            return pb.CheckInReply(rejected=rejected, newest=_newest_to_proto(answer.newest))
        case other:
            assert_never(other)


def answer_from_proto(message: pb.CheckInReply) -> CheckInAnswer:
    newest = publication_from_proto(message.newest) if message.HasField("newest") else None
    match message.WhichOneof("answer"):
        case "assigned":
            return Assigned(assignment=assignment_from_proto(message.assigned))
        case "wait":
            wait = message.wait
            return Wait(retry_min_s=wait.retry_min_s, retry_max_s=wait.retry_max_s, newest=newest)
        case "rejected":
            reasons = [reason for reason, number in _REASONS.items() if number == message.rejected.reason]
            # An unknown reason of a newer coordinator is still a rejection, and its text explains it.
            reason = reasons[0] if reasons else RejectReason.UNSUITABLE
            return Rejected(reason=reason, text=message.rejected.text, newest=newest)
        case other:
            raise InvalidInput(f"check-in reply: got answer {other}, expected assigned, wait or rejected")


def _newest_to_proto(newest: Publication | None) -> pb.Publication | None:
    return None if newest is None else publication_to_proto(newest)
