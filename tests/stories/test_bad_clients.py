"""Clients that misbehave for long: afterwards the coordinator has its previous state, and nothing leaks.

Open files, tasks and files of the spool are counted before and after. Then the Round ends with the bits of an
undisturbed Round.
"""

import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support import federations as f
from support.hosted import Hosted
from support.leaks import SETTLE_S, nothing_leaks
from support.peers import FLEET, PIECE_BYTES, Peer, pieces, sign, upload_bytes
from support.snapshot import snapshot

from fanin.clients.transport import Connection
from fanin.edge.bundles.keys import SigningKey
from fanin.protos import messages as m
from fanin.protos.errors import InvalidUpdate, NotFound, Unauthenticated, Unavailable
from fanin.protos.wire import to_proto
from fanin.server.access.limits import Limits
from fanin.v1 import fleet_pb2 as pb

STALL_S = 0.3
NUM_RECONNECTS = 200
NUM_KNOCKS = 2000
STRANGER = SigningKey(bytes(range(1, 33)))
CAPABILITIES = m.Capabilities(codecs=("fixed32",), runtimes=("synthetic 1",), graph_formats=("onnx",))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """A coordinator with an open Round, the first of two, and a short stall timeout."""
    host = Hosted(tmp_path_factory.mktemp("clients"), limits=Limits(stall_s=STALL_S)).start()
    host.start_run(f.plan(num_rounds=2, num_spare=1), f.bundle_in(host.folder), f.PUBLISHER)
    yield host
    host.stop()


@pytest.fixture
def liar(host: Hosted, devices: list[Peer], tmp_path: Path) -> Peer:
    """A new device with the fourth place. A refused Update ends its Assignment."""
    peer = Peer(host=host, bundle=devices[0].bundle, index=len(devices), folder=tmp_path)
    peer.begin()
    return peer


def spool_files(header: m.UpdateHeader) -> tuple[str, ...]:
    """Return the names of an upload's files."""
    return f"{header.assignment_id}.header", f"{header.assignment_id}.part"


def test_a_client_that_stops_in_mid_chunk_for_ever(
    host: Hosted, devices: list[Peer], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    header, payload = devices[0].update()
    is_over = threading.Event()
    gave_up: list[bool] = []

    def stalled_requests() -> Iterator[bytes]:
        yield upload_bytes(header)
        for piece in pieces(payload, 0, PIECE_BYTES + 100):
            yield upload_bytes(piece)
        gave_up.append(not is_over.wait(SETTLE_S))

    with nothing_leaks(host, remaining=spool_files(header)), devices[0].connection() as connection:
        requests = stalled_requests()
        first = upload_bytes(header)
        call = sign(devices[0].key, "Upload", first)
        with pytest.raises(Unavailable, match="FN-0678"):
            list(connection.stream_stream(f"{FLEET}Upload", requests, pb.UploadReply.FromString, call))
        assert not gave_up, "the client was still silent"
        is_over.set()
    assert f"upload: the device was idle for {STALL_S:g} s, or sent less than 4 KiB/s on average; resume" in caplog.text


def test_a_client_that_sends_the_chunks_of_another_update(host: Hosted, devices: list[Peer], liar: Peer) -> None:
    own_update, other_update = liar.update(), devices[1].update()
    before = snapshot(host.state).rows
    with nothing_leaks(host), pytest.raises(InvalidUpdate, match="FN-0117"):
        liar.send(own_update[0], pieces(other_update[1]))
    assert snapshot(host.state).rows == before


def test_a_client_that_sends_without_end(host: Hosted, liar: Peer) -> None:
    header, payload = liar.update()

    def endless_requests() -> Iterator[bytes]:
        yield upload_bytes(header)
        for offset in itertools.count(0, PIECE_BYTES):
            # The right bytes, as long as they fill pieces.
            data = payload[offset : offset + PIECE_BYTES] if offset + PIECE_BYTES < len(payload) else bytes(PIECE_BYTES)
            yield upload_bytes(m.Piece(offset=offset, data=data))

    with nothing_leaks(host), liar.connection() as connection:
        call = sign(liar.key, "Upload", upload_bytes(header))
        with pytest.raises(InvalidUpdate, match=f"expected 1 or more, up to {len(payload)}"):
            list(connection.stream_stream(f"{FLEET}Upload", endless_requests(), pb.UploadReply.FromString, call))


def test_a_client_that_reconnects_without_end_while_it_uploads(host: Hosted, devices: list[Peer]) -> None:
    header, payload = devices[0].update()
    first = upload_bytes(header)
    piece = upload_bytes(m.Piece(offset=0, data=payload[:1000]))
    with nothing_leaks(host, remaining=spool_files(header)), devices[0].connection() as connection:
        for number in range(NUM_RECONNECTS):
            call = sign(devices[0].key, "Upload", first)
            requests = iter([first, piece]) if number % 2 else iter([first])
            with closing(
                connection.stream_stream(f"{FLEET}Upload", requests, pb.UploadReply.FromString, call)
            ) as replies:
                if number % 3 == 0:
                    next(replies)


def test_a_client_that_is_replaced_by_a_copy_of_itself(host: Hosted, devices: list[Peer]) -> None:
    header, _ = devices[0].update()
    first = upload_bytes(header)
    is_over = threading.Event()

    def silent_requests() -> Iterator[bytes]:
        yield first
        is_over.wait(SETTLE_S)

    # Each call has a connection of its own, as two copies of a device's folder have.
    with (
        nothing_leaks(host, remaining=spool_files(header)),
        devices[0].connection() as connection,
        devices[0].connection() as other_connection,
    ):
        call = replace(sign(devices[0].key, "Upload", first), timeout_s=SETTLE_S)
        earlier_replies = connection.stream_stream(f"{FLEET}Upload", silent_requests(), pb.UploadReply.FromString, call)
        next(earlier_replies)
        call = sign(devices[0].key, "Upload", first)
        with closing(
            other_connection.stream_stream(f"{FLEET}Upload", iter([first]), pb.UploadReply.FromString, call)
        ) as later_replies:
            next(later_replies)
            with pytest.raises(Unavailable, match="FN-0026"):
                next(earlier_replies)
        is_over.set()


@pytest.mark.nightly
def test_a_client_that_reconnects_without_end_while_it_waits(host: Hosted, devices: list[Peer]) -> None:
    body = to_proto(
        m.CheckIn(protocol=m.PROTOCOL, capabilities=CAPABILITIES, wait_s=30.0), pb.CheckInRequest
    ).SerializeToString()
    Peer(host, devices[0].bundle, 7, host.folder / "last").begin()
    peer = Peer(host, devices[0].bundle, 9, host.folder / "waiting")
    with peer.transport() as transport:
        transport.enroll(host.device_token)
    with nothing_leaks(host):
        for number in range(NUM_RECONNECTS):
            connection = Connection(host.address, host.ca)
            # All places are taken, so the call waits. The client hangs up at once or a little later.
            with pytest.raises(Unavailable):
                call = replace(sign(peer.key, "CheckIn", body), timeout_s=0.001 if number % 10 else 0.1)
                connection.unary(f"{FLEET}CheckIn", body, pb.CheckInReply.FromString, call)
            connection.close()


def test_a_client_that_knocks_a_thousand_times_a_second(host: Hosted, devices: list[Peer]) -> None:
    num_knocks = 0
    is_over = threading.Event()

    def knock() -> None:
        nonlocal num_knocks
        while not is_over.is_set():
            # It opens connections, sends nonsense on every other one and nothing on the rest, and hangs up.
            with socket.create_connection(("127.0.0.1", host.port)) as connection:
                if num_knocks % 2:
                    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            num_knocks += 1

    with nothing_leaks(host):
        knocker = threading.Thread(target=knock)
        knocker.start()
        while num_knocks < NUM_KNOCKS:
            # Meanwhile other devices are served.
            with devices[1].transport() as transport:
                reply = transport.report(m.Report(assignment_id=devices[1].work.assignment_id, failure=""))
                assert reply.update_state is m.UpdateState.RECEIVING
        is_over.set()
        knocker.join()


def test_a_client_that_claims_to_be_another_device(host: Hosted, devices: list[Peer]) -> None:
    header, payload = devices[0].update()
    first = upload_bytes(header)
    before = snapshot(host.state)
    with nothing_leaks(host), devices[0].connection() as connection:
        for _ in range(20):
            call = sign(STRANGER, "Upload", first, device_id=devices[0].device_id)
            requests = iter(
                [
                    first,
                    *(upload_bytes(piece) for piece in pieces(payload)),
                ]
            )
            with pytest.raises(Unauthenticated):
                list(connection.stream_stream(f"{FLEET}Upload", requests, pb.UploadReply.FromString, call))
    assert snapshot(host.state) == before


def test_a_client_that_uploads_for_a_round_of_the_day_before(host: Hosted, devices: list[Peer], tmp_path: Path) -> None:
    old_updates = [(device.work, device.update()) for device in devices]
    for device, (_, update) in zip(devices, old_updates, strict=True):
        assert device.upload(*update).update_state is m.UpdateState.ACCEPTED
    for device in devices:
        # The Assignments of today.
        device.begin()
        assert device.work.round == 2
    stranger = Peer(host, devices[0].bundle, 8, host.folder / "stranger")
    before = snapshot(host.state)
    with nothing_leaks(host):
        for device, (work, (header, payload)) in zip(devices, old_updates, strict=True):
            other_header = replace(header, statistics=m.Statistics(counts={"examples": 4000}))
            assert device.upload(other_header, payload).update_state is m.UpdateState.ACCEPTED
            with device.transport() as transport:
                # A device can give up neither the work that it has finished nor, by that report, its place of today.
                report = m.Report(assignment_id=work.assignment_id, failure="tired")
                closed_reply = m.UploadReply(round_state=m.RoundState.CLOSED, update_state=m.UpdateState.ACCEPTED)
                assert transport.report(report) == closed_reply
        with stranger.transport() as transport:
            transport.enroll(host.device_token)
            with pytest.raises(NotFound, match="FN-0613"):
                transport.report(m.Report(assignment_id=old_updates[0][0].assignment_id, failure="not mine"))
    after = snapshot(host.state)
    # The stranger enrolled, so its token was used.
    enrolled: dict[str, list[object]] = {"devices": [], "tokens": []}
    assert after.rows | enrolled == before.rows | enrolled
    assert after.files == before.files
    for device in devices:
        assert device.upload(*device.update()).update_state is m.UpdateState.ACCEPTED
    versions = [event.version_sha256 for event in host.published_versions()]
    assert versions[:1] == f.expected_digests(tmp_path)
    assert len(versions) == 2
    # The spool keeps nothing of the uploads that all these tests began.
    assert snapshot(host.state).under("spool") == []
    # The Run is over, so the second Round is in the past too, also after a restart.
    host.stop()
    host.start()
    with nothing_leaks(host):
        for device, (work, update) in zip(devices, old_updates, strict=True):
            assert device.upload(*update).update_state is m.UpdateState.ACCEPTED
            with device.transport() as transport, pytest.raises(NotFound, match="FN-0613"):
                chunk = device.work.version.parameters.chunks[0].sha256
                list(transport.download(m.Download(assignment_id=work.assignment_id, sha256=chunk, offset=0)))
