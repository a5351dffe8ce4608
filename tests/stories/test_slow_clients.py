"""Clients that hold a transfer without progress, and Rounds that end during a transfer."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from support import federations as f
from support.hosted import Hosted
from support.leaks import SETTLE_S, nothing_leaks
from support.peers import FLEET, PIECE_BYTES, Peer, pieces, sign, upload_bytes

from fanin.protos import messages as m
from fanin.protos.chunks import CHUNK_BYTES
from fanin.protos.errors import Unavailable
from fanin.protos.messages import Command, Stop
from fanin.protos.wire import from_proto, to_proto
from fanin.server.access.limits import Limits
from fanin.v1 import fleet_pb2 as pb

STALL_S = 0.4
"""A small part of the time that a coordinator usually waits for a device."""
LARGE = {"a": (1000, 1500)}
"""6 MB: six Chunks."""


@pytest.fixture
def impatient_host(tmp_path: Path) -> Iterator[Hosted]:
    """A coordinator with a short stall timeout."""
    host = Hosted(tmp_path, limits=Limits(stall_s=STALL_S)).start()
    yield host
    host.stop()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    """A coordinator with the default timeouts."""
    host = Hosted(tmp_path).start()
    yield host
    host.stop()


def begin_run(host: Hosted, num_spare: int = 0) -> list[Peer]:
    """Start a Run, and return its devices, which have Assignments in an open Round."""
    bundle = f.bundle_in(host.folder, LARGE)
    host.start_run(f.plan(num_spare=num_spare), bundle, f.PUBLISHER)
    devices = f.peers(host, bundle, host.folder, f.NUM_DEVICES + num_spare)
    for device in devices:
        device.begin()
    return devices


def upload_requests(
    header: m.UpdateHeader, payload: bytes, size_bytes: int, pause_s: float, deadline: float
) -> Iterator[bytes]:
    """Yield an upload in pieces of a size, with a pause before each. It ends at ``deadline`` at the latest."""
    yield upload_bytes(header)
    for start in range(0, len(payload), size_bytes):
        time.sleep(pause_s)
        if time.monotonic() > deadline:
            return
        piece = m.Piece(offset=start, data=payload[start : start + size_bytes])
        yield upload_bytes(piece)


def test_a_client_that_trickles_is_ended_although_bytes_arrive_all_the_time(impatient_host: Hosted) -> None:
    device, *_ = begin_run(impatient_host)
    header, payload = device.update()
    spool_files = (f"{header.assignment_id}.header", f"{header.assignment_id}.part")
    start_s = time.monotonic()
    with nothing_leaks(impatient_host, remaining=spool_files), device.connection() as connection:
        call = sign(device.key, "Upload", upload_bytes(header))
        requests = upload_requests(header, payload, 1, STALL_S / 8, start_s + SETTLE_S)
        with pytest.raises(Unavailable, match="FN-0678"):
            list(connection.stream_stream(f"{FLEET}Upload", requests, pb.UploadReply.FromString, call))
    assert time.monotonic() < start_s + SETTLE_S, "the client still sent"
    # The same device succeeds on a connection that works.
    assert device.upload(header, payload).update_state is m.UpdateState.ACCEPTED


def test_a_slow_client_that_makes_progress_is_tolerated(impatient_host: Hosted) -> None:
    device, *_ = begin_run(impatient_host)
    header, payload = device.update()
    start_s = time.monotonic()
    with device.connection() as connection:
        call = sign(device.key, "Upload", upload_bytes(header))
        requests = upload_requests(header, payload, CHUNK_BYTES, STALL_S / 3, start_s + SETTLE_S)
        replies = list(connection.stream_stream(f"{FLEET}Upload", requests, pb.UploadReply.FromString, call))
    assert from_proto(m.UploadReply, replies[-1]).update_state is m.UpdateState.ACCEPTED
    assert time.monotonic() - start_s > 1.5 * STALL_S


def await_true(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + SETTLE_S / 2
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def narrow_channel(host: Hosted) -> grpc.Channel:
    """Return a channel that buffers little unread data."""
    options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
    return grpc.secure_channel(host.address, grpc.ssl_channel_credentials(host.ca), options)


def test_a_client_that_never_reads_its_download_is_ended(
    impatient_host: Hosted, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    device, *_ = begin_run(impatient_host)
    # The complete Chunks of the graph and of the parameters are the same zeros.
    chunk = device.work.version.parameters.chunks[1]
    assert chunk.size_bytes == CHUNK_BYTES
    request = m.Download(assignment_id=device.work.assignment_id, sha256=chunk.sha256, offset=0)
    body = to_proto(request, pb.DownloadRequest).SerializeToString()
    with nothing_leaks(impatient_host), narrow_channel(impatient_host) as channel:
        download: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"{FLEET}Download")
        stream = download(body, metadata=sign(device.key, "Download", body).metadata)
        assert next(stream)
        await_true(lambda: f"call: its caller read nothing for {STALL_S:g} s" in caplog.text)
        with pytest.raises(grpc.RpcError) as excinfo:
            list(stream)
        assert excinfo.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_client_that_hangs_up_during_a_write_leaves_no_error_in_the_log(
    host: Hosted, caplog: pytest.LogCaptureFixture
) -> None:
    device, *_ = begin_run(host)
    chunk = device.work.version.parameters.chunks[1]
    request = m.Download(assignment_id=device.work.assignment_id, sha256=chunk.sha256, offset=0)
    body = to_proto(request, pb.DownloadRequest).SerializeToString()
    with nothing_leaks(host):
        for _ in range(10):
            with narrow_channel(host) as channel:
                download: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"{FLEET}Download")
                assert next(download(body, metadata=sign(device.key, "Download", body).metadata))
                # The coordinator's next write fails before it learns that the caller has gone.
                host.block(0.05)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def stop(host: Hosted, others: list[Peer]) -> None:
    """End the Run by an operator's command."""
    with host.operator() as operator:
        operator.command(Command(command_id="stop", run_id="run", what=Stop()))


def finish(host: Hosted, others: list[Peer]) -> None:
    """Fill the Round's buffer with the Updates of the other devices."""
    for device in others:
        assert device.upload(*device.update()).update_state is m.UpdateState.ACCEPTED


Ending = Callable[[Hosted, list[Peer]], None]


@pytest.mark.parametrize("end", [finish, stop])
def test_the_end_of_a_round_reaches_a_device_in_mid_chunk_at_once(host: Hosted, end: Ending) -> None:
    late_device, *others = begin_run(host, num_spare=1)
    header, payload = late_device.update()
    is_over = threading.Event()
    gave_up: list[bool] = []

    def stalled_requests() -> Iterator[bytes]:
        yield upload_bytes(header)
        for piece in pieces(payload, 0, CHUNK_BYTES + PIECE_BYTES + 100):
            yield upload_bytes(piece)
        gave_up.append(not is_over.wait(SETTLE_S))

    with late_device.connection() as connection:
        call = sign(late_device.key, "Upload", upload_bytes(header))
        with closing(
            connection.stream_stream(f"{FLEET}Upload", stalled_requests(), pb.UploadReply.FromString, call)
        ) as replies:
            messages = (from_proto(m.UploadReply, reply) for reply in replies)
            for reply in messages:
                if reply.received_bytes == CHUNK_BYTES:
                    break
            end(host, others)
            (last,) = messages
            assert not gave_up, "the device still sent"
        is_over.set()
    assert (last.round_state, last.update_state) == (m.RoundState.CLOSED, m.UpdateState.DISCARDED)
    assert list((host.state / "spool").iterdir()) == []


def test_the_end_of_a_round_reaches_the_production_client_while_it_sends(host: Hosted) -> None:
    late_device, *others = begin_run(host, num_spare=1)
    header, payload = late_device.update()
    is_reading, is_over = threading.Event(), threading.Event()

    def read(offset: int, size_bytes: int) -> bytes:
        if offset >= CHUNK_BYTES + PIECE_BYTES:
            # A connection or a disk that is slow for this piece.
            is_reading.set()
            gave_up.append(not is_over.wait(SETTLE_S))
        return payload[offset : offset + size_bytes]

    outcome: list[m.UploadReply] = []
    gave_up: list[bool] = []

    def send() -> None:
        with late_device.transport() as transport:
            outcome.append(transport.upload(header, read))

    sender = threading.Thread(target=send)
    sender.start()
    assert is_reading.wait(SETTLE_S)
    finish(host, others)
    host.published_versions()
    sender.join(SETTLE_S)
    assert not gave_up, "the device still read"
    is_over.set()
    (reply,) = outcome
    assert (reply.round_state, reply.update_state) == (m.RoundState.CLOSED, m.UpdateState.DISCARDED)
