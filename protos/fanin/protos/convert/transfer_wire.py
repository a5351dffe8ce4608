"""Wire form of downloads, uploads and reports."""

from types import MappingProxyType
from typing import Final, assert_never

from fanin.protos.chunks import MAX_MORE_CHUNKS, check_num_chunks
from fanin.protos.convert.version_wire import artifact_from_proto, artifact_to_proto
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import (
    Download,
    Piece,
    Report,
    RoundState,
    Statistics,
    Telemetry,
    TrainingProgress,
    UpdateHeader,
    UpdateState,
    UploadReply,
    check_num_counts,
)
from fanin.v1 import fleet_pb2 as pb

_ROUND_STATES: Final = {RoundState.OPEN: pb.ROUND_STATE_OPEN, RoundState.CLOSED: pb.ROUND_STATE_CLOSED}
_UPDATE_STATES: Final = {
    UpdateState.RECEIVING: pb.UPDATE_STATE_RECEIVING,
    UpdateState.RECEIVED: pb.UPDATE_STATE_RECEIVED,
    UpdateState.ACCEPTED: pb.UPDATE_STATE_ACCEPTED,
    UpdateState.DISCARDED: pb.UPDATE_STATE_DISCARDED,
}


def download_to_proto(download: Download) -> pb.DownloadRequest:
    return pb.DownloadRequest(
        assignment_id=download.assignment_id,
        sha256=download.sha256,
        offset=download.offset,
        more_sha256=download.more_sha256,
    )


def download_from_proto(message: pb.DownloadRequest) -> Download:
    if len(message.more_sha256) > MAX_MORE_CHUNKS:
        raise InvalidInput(f"download: got {len(message.more_sha256)} more chunks, expected at most {MAX_MORE_CHUNKS}")
    return Download(
        assignment_id=message.assignment_id,
        sha256=message.sha256,
        offset=message.offset,
        more_sha256=tuple(message.more_sha256),
    )


def header_to_proto(header: UpdateHeader) -> pb.UpdateHeader:
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


def header_from_proto(message: pb.UpdateHeader) -> UpdateHeader:
    check_num_counts(len(message.statistics.counts))
    check_num_chunks(len(message.payload.chunks), message.payload.size_bytes)
    # A protobuf map has no order. Sorting makes the value equal in every process.
    counts = MappingProxyType(dict(sorted(message.statistics.counts.items())))
    return UpdateHeader(
        format=message.format,
        assignment_id=message.assignment_id,
        run_id=message.run_id,
        round=message.round,
        version_sha256=message.version_sha256,
        codec=message.codec,
        shifts=tuple(message.shifts),
        payload=artifact_from_proto(message.payload),
        statistics=Statistics(counts=counts),
        telemetry=telemetry_from_proto(message.telemetry),
    )


def upload_to_proto(part: UpdateHeader | Piece) -> pb.UploadRequest:
    match part:
        case UpdateHeader():
            return pb.UploadRequest(header=header_to_proto(part))
        case Piece():
            return pb.UploadRequest(piece=pb.Piece(offset=part.offset, data=part.data))
        case other:
            assert_never(other)


def upload_from_proto(message: pb.UploadRequest) -> UpdateHeader | Piece:
    match message.WhichOneof("part"):
        case "header":
            return header_from_proto(message.header)
        case "piece":
            return Piece(offset=message.piece.offset, data=message.piece.data)
        case other:
            raise InvalidInput(f"upload: got part {other}, expected a header or a piece")


def upload_reply_to_proto(reply: UploadReply) -> pb.UploadReply:
    return pb.UploadReply(
        round_state=_ROUND_STATES[reply.round_state],
        update_state=_UPDATE_STATES[reply.update_state],
        received_bytes=reply.received_bytes,
    )


def upload_reply_from_proto(message: pb.UploadReply | pb.ReportReply) -> UploadReply:
    rounds = [state for state, number in _ROUND_STATES.items() if number == message.round_state]
    updates = [state for state, number in _UPDATE_STATES.items() if number == message.update_state]
    if not rounds or not updates:
        raise InvalidInput(f"upload reply: got unknown states {message.round_state} and {message.update_state}")
    received = message.received_bytes if isinstance(message, pb.UploadReply) else 0
    return UploadReply(round_state=rounds[0], update_state=updates[0], received_bytes=received)


def telemetry_to_proto(telemetry: Telemetry) -> pb.Telemetry:
    return pb.Telemetry(
        runtime=telemetry.runtime,
        train_s=telemetry.train_s,
        num_steps=telemetry.num_steps,
        bytes_downloaded=telemetry.bytes_downloaded,
        bytes_resumed=telemetry.bytes_resumed,
        fanin_version=telemetry.fanin_version,
        partition=telemetry.partition,
    )


def telemetry_from_proto(message: pb.Telemetry) -> Telemetry:
    return Telemetry(
        runtime=message.runtime,
        train_s=message.train_s,
        num_steps=message.num_steps,
        bytes_downloaded=message.bytes_downloaded,
        bytes_resumed=message.bytes_resumed,
        fanin_version=message.fanin_version,
        partition=message.partition if message.HasField("partition") else None,
    )


def report_to_proto(report: Report) -> pb.ReportRequest:
    return pb.ReportRequest(
        assignment_id=report.assignment_id,
        failure=report.failure,
        telemetry=telemetry_to_proto(report.telemetry),
        progress=None if report.progress is None else progress_to_proto(report.progress),
    )


def report_from_proto(message: pb.ReportRequest) -> Report:
    return Report(
        assignment_id=message.assignment_id,
        failure=message.failure,
        telemetry=telemetry_from_proto(message.telemetry),
        progress=progress_from_proto(message.progress) if message.HasField("progress") else None,
    )


def progress_to_proto(progress: TrainingProgress) -> pb.TrainingProgress:
    return pb.TrainingProgress(step=progress.step, num_steps=progress.num_steps, loss=progress.loss)


def progress_from_proto(message: pb.TrainingProgress) -> TrainingProgress:
    loss = message.loss if message.HasField("loss") else None
    return TrainingProgress(step=message.step, num_steps=message.num_steps, loss=loss)


def report_reply_to_proto(reply: UploadReply) -> pb.ReportReply:
    return pb.ReportReply(round_state=_ROUND_STATES[reply.round_state], update_state=_UPDATE_STATES[reply.update_state])
