"""Between the device protocol's values and their wire form; pure, and round-trip tested.

``x_to_proto`` never fails. ``x_from_proto`` raises InvalidInput for what does not make a value: unknown enum
numbers, a missing part, numbers out of range. Unknown fields are ignored, as proto3 asks.
"""

from types import MappingProxyType
from typing import Final, assert_never

from fanin.protos import messages as m
from fanin.protos.chunks import MAX_MORE_CHUNKS, Artifact, ChunkRef
from fanin.protos.errors import InvalidInput
from fanin.v1 import fleet_pb2 as pb

_ROUND_STATES: Final = {m.RoundState.OPEN: pb.ROUND_STATE_OPEN, m.RoundState.CLOSED: pb.ROUND_STATE_CLOSED}
_UPDATE_STATES: Final = {
    m.UpdateState.RECEIVING: pb.UPDATE_STATE_RECEIVING,
    m.UpdateState.RECEIVED: pb.UPDATE_STATE_RECEIVED,
    m.UpdateState.ACCEPTED: pb.UPDATE_STATE_ACCEPTED,
    m.UpdateState.DISCARDED: pb.UPDATE_STATE_DISCARDED,
}
_REASONS: Final = {
    m.RejectReason.UPGRADE: pb.REJECT_REASON_UPGRADE,
    m.RejectReason.UNSUITABLE: pb.REJECT_REASON_UNSUITABLE,
}


def artifact_to_proto(artifact: Artifact) -> pb.Artifact:
    chunks = (pb.ChunkRef(sha256=ref.sha256, size_bytes=ref.size_bytes, url=ref.url) for ref in artifact.chunks)
    return pb.Artifact(sha256=artifact.sha256, size_bytes=artifact.size_bytes, chunks=chunks)


def artifact_from_proto(message: pb.Artifact) -> Artifact:
    chunks = tuple(ChunkRef(sha256=ref.sha256, size_bytes=ref.size_bytes, url=ref.url) for ref in message.chunks)
    return Artifact(sha256=message.sha256, size_bytes=message.size_bytes, chunks=chunks)


def bundle_to_proto(bundle: m.BundleRef) -> pb.BundleRef:
    return pb.BundleRef(
        manifest=artifact_to_proto(bundle.manifest),
        public_key=bytes.fromhex(bundle.public_key),
        signature=bundle.signature,
    )


def bundle_from_proto(message: pb.BundleRef) -> m.BundleRef:
    return m.BundleRef(
        manifest=artifact_from_proto(message.manifest),
        public_key=message.public_key.hex(),
        signature=message.signature,
    )


def delegation_to_proto(delegation: m.Delegation) -> pb.Delegation:
    return pb.Delegation(
        run_id=delegation.run_id,
        bundle_sha256=delegation.bundle_sha256,
        run_public_key=bytes.fromhex(delegation.run_public_key),
        signature=delegation.signature,
    )


def delegation_from_proto(message: pb.Delegation) -> m.Delegation:
    return m.Delegation(
        run_id=message.run_id,
        bundle_sha256=message.bundle_sha256,
        run_public_key=message.run_public_key.hex(),
        signature=message.signature,
    )


def version_to_proto(version: m.Version) -> pb.Version:
    return pb.Version(
        run_id=version.run_id,
        number=version.number,
        parent=version.parent,
        bundle_sha256=version.bundle_sha256,
        parameters=artifact_to_proto(version.parameters),
        public_key=bytes.fromhex(version.public_key),
        signature=version.signature,
        delegation=delegation_to_proto(version.delegation) if version.delegation else None,
    )


def version_from_proto(message: pb.Version) -> m.Version:
    return m.Version(
        run_id=message.run_id,
        number=message.number,
        parent=message.parent,
        bundle_sha256=message.bundle_sha256,
        parameters=artifact_from_proto(message.parameters),
        public_key=message.public_key.hex(),
        signature=message.signature,
        delegation=delegation_from_proto(message.delegation) if message.HasField("delegation") else None,
    )


def codec_to_proto(codec: m.CodecSpec) -> pb.Codec:
    return pb.Codec(name=codec.name, max_shift=codec.max_shift)


def codec_from_proto(message: pb.Codec) -> m.CodecSpec:
    return m.CodecSpec(name=message.name, max_shift=message.max_shift)


def training_to_proto(training: m.Training) -> pb.Training:
    return pb.Training(
        epochs=training.epochs,
        learning_rate=training.learning_rate,
        seed=training.seed,
        proximal_weight=training.proximal_weight,
        batch_size=training.batch_size,
    )


def training_from_proto(message: pb.Training) -> m.Training:
    return m.Training(
        epochs=message.epochs,
        learning_rate=message.learning_rate,
        seed=message.seed,
        proximal_weight=message.proximal_weight,
        batch_size=message.batch_size,
    )


def assignment_to_proto(work: m.Assignment) -> pb.Assignment:
    return pb.Assignment(
        assignment_id=work.assignment_id,
        run_id=work.run_id,
        round=work.round,
        bundle=bundle_to_proto(work.bundle),
        version=version_to_proto(work.version),
        grid=pb.Grid(exponents=work.grid),
        codec=codec_to_proto(work.codec),
        training=training_to_proto(work.training),
        deadline_s=work.deadline_s,
        relay=work.relay,
    )


def assignment_from_proto(message: pb.Assignment) -> m.Assignment:
    return m.Assignment(
        assignment_id=message.assignment_id,
        run_id=message.run_id,
        round=message.round,
        bundle=bundle_from_proto(message.bundle),
        version=version_from_proto(message.version),
        grid=tuple(message.grid.exponents),
        codec=codec_from_proto(message.codec),
        training=training_from_proto(message.training),
        deadline_s=message.deadline_s,
        relay=message.relay,
    )


def enrollment_to_proto(enrollment: m.Enrollment) -> pb.EnrollRequest:
    return pb.EnrollRequest(
        protocol=enrollment.protocol, token=enrollment.token, public_key=bytes.fromhex(enrollment.public_key)
    )


def enrollment_from_proto(message: pb.EnrollRequest) -> m.Enrollment:
    return m.Enrollment(protocol=message.protocol, token=message.token, public_key=message.public_key.hex())


def publication_to_proto(publication: m.Publication) -> pb.Publication:
    return pb.Publication(
        download_id=publication.download_id,
        run_id=publication.run_id,
        bundle=bundle_to_proto(publication.bundle),
        version=version_to_proto(publication.version),
    )


def publication_from_proto(message: pb.Publication) -> m.Publication:
    return m.Publication(
        download_id=message.download_id,
        run_id=message.run_id,
        bundle=bundle_from_proto(message.bundle),
        version=version_from_proto(message.version),
    )


def check_in_to_proto(check_in: m.CheckIn) -> pb.CheckInRequest:
    can, served = check_in.capabilities, check_in.served
    return pb.CheckInRequest(
        protocol=check_in.protocol,
        capabilities=pb.Capabilities(
            codecs=can.codecs,
            runtimes=can.runtimes,
            graph_formats=can.graph_formats,
            max_download_bytes=can.max_download_bytes,
        ),
        wait_s=check_in.wait_s,
        served=None if served is None else pb.ServedVersion(run_id=served.run_id, number=served.number),
    )


def check_in_from_proto(message: pb.CheckInRequest) -> m.CheckIn:
    can, served = message.capabilities, message.served
    return m.CheckIn(
        protocol=message.protocol,
        capabilities=m.Capabilities(
            codecs=tuple(can.codecs),
            runtimes=tuple(can.runtimes),
            graph_formats=tuple(can.graph_formats),
            max_download_bytes=can.max_download_bytes,
        ),
        wait_s=message.wait_s,
        served=m.ServedVersion(run_id=served.run_id, number=served.number) if message.HasField("served") else None,
    )


def answer_to_proto(answer: m.CheckInAnswer) -> pb.CheckInReply:
    match answer:
        case m.Assigned():
            return pb.CheckInReply(assigned=assignment_to_proto(answer.assignment))
        case m.Wait():
            wait = pb.Wait(retry_min_s=answer.retry_min_s, retry_max_s=answer.retry_max_s)
            return pb.CheckInReply(wait=wait, newest=_newest_to_proto(answer.newest))
        case m.Rejected():
            rejected = pb.Rejected(reason=_REASONS[answer.reason], text=answer.text)
            return pb.CheckInReply(rejected=rejected, newest=_newest_to_proto(answer.newest))
        case other:
            assert_never(other)


def answer_from_proto(message: pb.CheckInReply) -> m.CheckInAnswer:
    newest = publication_from_proto(message.newest) if message.HasField("newest") else None
    match message.WhichOneof("answer"):
        case "assigned":
            return m.Assigned(assignment=assignment_from_proto(message.assigned))
        case "wait":
            wait = message.wait
            return m.Wait(retry_min_s=wait.retry_min_s, retry_max_s=wait.retry_max_s, newest=newest)
        case "rejected":
            reasons = [reason for reason, number in _REASONS.items() if number == message.rejected.reason]
            # A reason that a newer coordinator gives and we do not know is still a rejection: its text counts.
            reason = reasons[0] if reasons else m.RejectReason.UNSUITABLE
            return m.Rejected(reason=reason, text=message.rejected.text, newest=newest)
        case other:
            raise InvalidInput(f"check-in reply: got answer {other}, expected assigned, wait or rejected")


def _newest_to_proto(newest: m.Publication | None) -> pb.Publication | None:
    return None if newest is None else publication_to_proto(newest)


def download_to_proto(download: m.Download) -> pb.DownloadRequest:
    return pb.DownloadRequest(
        assignment_id=download.assignment_id, sha256=download.sha256, offset=download.offset, more_sha256=download.more
    )


def download_from_proto(message: pb.DownloadRequest) -> m.Download:
    if len(message.more_sha256) > MAX_MORE_CHUNKS:
        raise InvalidInput(f"download: got {len(message.more_sha256)} more chunks, expected at most {MAX_MORE_CHUNKS}")
    return m.Download(
        assignment_id=message.assignment_id,
        sha256=message.sha256,
        offset=message.offset,
        more=tuple(message.more_sha256),
    )


def telemetry_to_proto(telemetry: m.Telemetry) -> pb.Telemetry:
    return pb.Telemetry(
        runtime=telemetry.runtime,
        train_s=telemetry.train_s,
        num_steps=telemetry.num_steps,
        bytes_downloaded=telemetry.bytes_downloaded,
        bytes_resumed=telemetry.bytes_resumed,
        fanin_version=telemetry.fanin_version,
    )


def telemetry_from_proto(message: pb.Telemetry) -> m.Telemetry:
    return m.Telemetry(
        runtime=message.runtime,
        train_s=message.train_s,
        num_steps=message.num_steps,
        bytes_downloaded=message.bytes_downloaded,
        bytes_resumed=message.bytes_resumed,
        fanin_version=message.fanin_version,
    )


def header_to_proto(header: m.UpdateHeader) -> pb.UpdateHeader:
    return pb.UpdateHeader(
        format=header.format,
        assignment_id=header.assignment_id,
        run_id=header.run_id,
        round=header.round,
        version_sha256=header.version_sha256,
        codec=header.codec,
        shifts=header.shifts,
        payload=artifact_to_proto(header.payload),
        statistics=pb.Statistics(counts=dict(header.statistics.counts)),
        telemetry=telemetry_to_proto(header.telemetry),
    )


def header_from_proto(message: pb.UpdateHeader) -> m.UpdateHeader:
    # A protobuf map has no order; sorted, one message reads the same in every process.
    counts = MappingProxyType(dict(sorted(message.statistics.counts.items())))
    return m.UpdateHeader(
        format=message.format,
        assignment_id=message.assignment_id,
        run_id=message.run_id,
        round=message.round,
        version_sha256=message.version_sha256,
        codec=message.codec,
        shifts=tuple(message.shifts),
        payload=artifact_from_proto(message.payload),
        statistics=m.Statistics(counts=counts),
        telemetry=telemetry_from_proto(message.telemetry),
    )


def upload_to_proto(part: m.UpdateHeader | m.Piece) -> pb.UploadRequest:
    match part:
        case m.UpdateHeader():
            return pb.UploadRequest(header=header_to_proto(part))
        case m.Piece():
            return pb.UploadRequest(piece=pb.Piece(offset=part.offset, data=part.data))
        case other:
            assert_never(other)


def upload_from_proto(message: pb.UploadRequest) -> m.UpdateHeader | m.Piece:
    match message.WhichOneof("part"):
        case "header":
            return header_from_proto(message.header)
        case "piece":
            return m.Piece(offset=message.piece.offset, data=message.piece.data)
        case other:
            raise InvalidInput(f"upload: got part {other}, expected a header or a piece")


def upload_reply_to_proto(reply: m.UploadReply) -> pb.UploadReply:
    return pb.UploadReply(
        round_state=_ROUND_STATES[reply.round_state],
        update_state=_UPDATE_STATES[reply.update_state],
        received_bytes=reply.received_bytes,
    )


def upload_reply_from_proto(message: pb.UploadReply | pb.ReportReply) -> m.UploadReply:
    rounds = [state for state, number in _ROUND_STATES.items() if number == message.round_state]
    updates = [state for state, number in _UPDATE_STATES.items() if number == message.update_state]
    if not rounds or not updates:
        raise InvalidInput(f"upload reply: got unknown states {message.round_state} and {message.update_state}")
    received = message.received_bytes if isinstance(message, pb.UploadReply) else 0
    return m.UploadReply(round_state=rounds[0], update_state=updates[0], received_bytes=received)


def report_to_proto(report: m.Report) -> pb.ReportRequest:
    return pb.ReportRequest(
        assignment_id=report.assignment_id,
        failure=report.failure,
        telemetry=telemetry_to_proto(report.telemetry),
    )


def report_from_proto(message: pb.ReportRequest) -> m.Report:
    return m.Report(
        assignment_id=message.assignment_id,
        failure=message.failure,
        telemetry=telemetry_from_proto(message.telemetry),
    )


def report_reply_to_proto(reply: m.UploadReply) -> pb.ReportReply:
    return pb.ReportReply(round_state=_ROUND_STATES[reply.round_state], update_state=_UPDATE_STATES[reply.update_state])
