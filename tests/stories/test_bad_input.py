"""Updates that a coordinator must reject: each gets a clear error, and leaves no trace.

All of them are sent, over gRPC and TLS, into one open Round. It then ends with the bits of an undisturbed Round.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support import federations as f
from support.hosted import Hosted
from support.peers import FLEET, Peer, pieces, sign, upload_bytes
from support.snapshot import snapshot

from fanin.commands.console.show import event_text
from fanin.edge.codecs.grid import MAX_MOVE_BITS
from fanin.protos import messages as m
from fanin.protos.chunks import Artifact, artifact_of
from fanin.protos.errors import InvalidInput, InvalidUpdate, NotFound
from fanin.protos.wire import from_proto
from fanin.v1 import fleet_pb2 as pb

Change = Callable[[m.UpdateHeader], m.UpdateHeader]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """A coordinator with an open Round that three Updates close, and with room for two further devices."""
    host = Hosted(tmp_path_factory.mktemp("input")).start()
    host.start_run(f.plan(num_spare=2), f.bundle_in(host.folder), f.PUBLISHER)
    yield host
    host.stop()


@pytest.fixture(scope="module")
def devices(host: Hosted) -> list[Peer]:
    """The four devices, each with its Assignment."""
    peers = f.peers(host, f.bundle_in(host.folder), host.folder, f.NUM_DEVICES + 1)
    for device in peers:
        device.begin()
    return peers


@pytest.fixture
def liar(host: Hosted, devices: list[Peer], tmp_path: Path) -> Peer:
    """A new device with the fifth place. A refused Update ends its Assignment, so the next test has another device."""
    peer = Peer(host=host, bundle=f.bundle_in(host.folder), index=len(devices), folder=tmp_path)
    peer.begin()
    return peer


def header_with_sizes(header: m.UpdateHeader, sizes: list[int]) -> m.UpdateHeader:
    """Return a header that announces Chunks of these sizes."""
    chunks = tuple(replace(ref, size_bytes=size) for ref, size in zip(header.payload.chunks, sizes, strict=True))
    payload = Artifact(sha256=header.payload.sha256, size_bytes=sum(sizes), chunks=chunks)
    return replace(header, payload=payload)


def header_with_counts(header: m.UpdateHeader, **counts: int) -> m.UpdateHeader:
    """Return a header with other counts."""
    return replace(header, statistics=m.Statistics(counts=dict(header.statistics.counts) | counts))


HEADERS: dict[str, tuple[Change, str]] = {
    "format": (lambda h: replace(h, format=2), "update: got format 2, expected 1"),
    "run": (lambda h: replace(h, run_id="other"), "update: got run 'other' round 1, expected run 'run' round 1"),
    "round": (lambda h: replace(h, round=7), "update: got run 'run' round 7, expected run 'run' round 1"),
    "version": (
        lambda h: replace(h, version_sha256="0" * 64),
        "update: trained from version 00000000.., expected ",
    ),
    "codec": (lambda h: replace(h, codec="int4"), "update: got codec 'int4', expected 'fixed32'"),
    "number of shifts": (
        lambda h: replace(h, shifts=(0,)),
        "update: got 1 shifts up to 0, expected 2 up to 0",
    ),
    "too large shifts": (
        lambda h: replace(h, shifts=(0, 9)),
        "update: got 2 shifts up to 9, expected 2 up to 0",
    ),
    "shape": (
        lambda h: replace(h, payload=artifact_of(bytes(40))),
        "update: got 40 bytes, expected 1200012 for 300003 values; the model has another shape",
    ),
    "chunks": (
        lambda h: header_with_sizes(h, [1 << 19, 1200012 - (1 << 19)]),
        "update: got chunks of [524288, 675724] bytes, expected all but the last 1048576",
    ),
    "no examples": (
        lambda h: header_with_counts(h, examples=0),
        "update: got examples = 0, expected at least 1; check in again when this device has examples",
    ),
    "more values than there are": (
        lambda h: header_with_counts(h, saturated=1 << 40),
        "update: got saturated = 1099511627776, ",
    ),
    "more correct than predictions": (
        lambda h: header_with_counts(
            h, eval_examples=1, eval_predictions=1, eval_correct_float=2, eval_correct_int8=0, eval_agree=0
        ),
        "update: got eval_correct_float = 2, expected at most eval_predictions = 1",
    ),
    "negative examples": (
        lambda h: header_with_counts(h, examples=-5),
        "update: got examples = -5, expected at least 1",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_does_not_fit_leaves_no_trace(host: Hosted, liar: Peer, case: str) -> None:
    change, text = HEADERS[case]
    header, payload = liar.update()
    before = snapshot(host.state)
    with pytest.raises(InvalidUpdate) as excinfo:
        liar.send(change(header), pieces(payload))
    assert text in str(excinfo.value)
    assert snapshot(host.state) == before


def other_digest(header: m.UpdateHeader, payload: bytes) -> tuple[m.UpdateHeader, list[m.Piece]]:
    """Return Chunks as announced, in a payload with another digest than the announced one."""
    artifact = replace(header.payload, sha256=hashlib.sha256(b"another").hexdigest())
    return replace(header, payload=artifact), pieces(payload)


def other_chunk(header: m.UpdateHeader, payload: bytes) -> tuple[m.UpdateHeader, list[m.Piece]]:
    """Return a payload whose second Chunk has one changed bit."""
    other_payload = bytearray(payload)
    other_payload[-1] ^= 1
    return header, pieces(bytes(other_payload))


def excess_pieces(header: m.UpdateHeader, payload: bytes) -> tuple[m.UpdateHeader, list[m.Piece]]:
    """Return more bytes than the header announces."""
    payload_pieces = pieces(payload)
    return header, [*payload_pieces[:-1], replace(payload_pieces[-1], data=payload_pieces[-1].data + b"more")]


BODIES: dict[str, tuple[Callable[[m.UpdateHeader, bytes], tuple[m.UpdateHeader, list[m.Piece]]], str]] = {
    "digest of a chunk": (other_chunk, "update: chunk 1: digest mismatch (got "),
    "digest of the whole": (other_digest, "update: digest mismatch (got "),
    "offset": (lambda h, p: (h, pieces(p, 4096)), "update: got a piece at offset 4096, expected 0"),
    "gap": (lambda h, p: (h, [*pieces(p, 0, 512), *pieces(p, 516)]), "update: got a piece at offset 516, expected 512"),
    "empty piece": (lambda h, p: (h, [m.Piece(offset=0, data=b"")]), "update: got bytes 0 to 0, expected 1 or more"),
    "too much": (excess_pieces, "expected 1 or more, up to 1200012"),
}


@pytest.mark.parametrize("case", BODIES)
def test_bytes_that_differ_from_their_header_leave_no_trace(host: Hosted, liar: Peer, case: str) -> None:
    spoil, text = BODIES[case]
    header, payload = liar.update()
    before = snapshot(host.state)
    with pytest.raises(InvalidUpdate) as excinfo:
        liar.send(*spoil(header, payload))
    assert text in str(excinfo.value)
    assert snapshot(host.state) == before


def test_another_devices_assignment_is_not_found(host: Hosted, devices: list[Peer]) -> None:
    work = devices[1].work
    header, payload = devices[0].update()
    header = replace(header, assignment_id=work.assignment_id)
    before = snapshot(host.state)
    text = f"assignment {work.assignment_id}: not made for device {devices[0].device_id}; check in again"
    with pytest.raises(NotFound, match=text):
        devices[0].upload(header, payload)
    with devices[0].transport() as transport:
        with pytest.raises(NotFound, match=text):
            transport.report(m.Report(assignment_id=work.assignment_id, failure="not mine"))
        chunk = work.version.parameters.chunks[0].sha256
        with pytest.raises(NotFound, match=text):
            list(transport.download(m.Download(assignment_id=work.assignment_id, sha256=chunk, offset=0)))
    assert snapshot(host.state) == before


@pytest.mark.parametrize("name", ["run", "run.1.0000", "run.x.0000", "none.1.0000", "run.99999999999999999999.00"])
def test_an_assignment_that_does_not_exist_is_not_found(host: Hosted, devices: list[Peer], name: str) -> None:
    header, payload = devices[0].update()
    before = snapshot(host.state)
    with pytest.raises(NotFound, match="FN-0613"):
        devices[0].upload(replace(header, assignment_id=name), payload)
    assert snapshot(host.state) == before


def test_an_upload_out_of_order_is_refused(host: Hosted, liar: Peer) -> None:
    header, payload = liar.update()
    before = snapshot(host.state)
    with pytest.raises(InvalidInput, match="FN-0130"):
        liar.send(header, [header, *pieces(payload)])
    first = upload_bytes(m.Piece(offset=0, data=payload[:10]))
    with liar.connection() as connection:
        call = sign(liar.key, "Upload", first)
        replies = connection.stream_stream(f"{FLEET}Upload", iter([first]), pb.UploadReply.FromString, call)
        with closing(replies), pytest.raises(InvalidInput, match="FN-0130"):
            list(replies)
    assert snapshot(host.state).rows == before.rows
    # The first header was valid, so its upload may continue. The spool has only the files of that upload.
    assert {name.rpartition(".")[2] for name in snapshot(host.state).under("spool")} <= {"header", "part"}


def test_bytes_that_are_no_request_are_refused(host: Hosted, devices: list[Peer]) -> None:
    before = snapshot(host.state)
    garbage = b"\xff\xfe not a message"
    with devices[0].connection() as connection:
        call = sign(devices[0].key, "Report", garbage)
        with pytest.raises(InvalidInput, match="FN-0126"):
            connection.unary(f"{FLEET}Report", garbage, pb.ReportReply.FromString, call)
    assert snapshot(host.state) == before


def test_a_chunk_beyond_its_end_or_unknown_is_refused(host: Hosted, devices: list[Peer]) -> None:
    work = devices[0].work
    ref = work.version.parameters.chunks[0]
    before = snapshot(host.state)
    with devices[0].transport() as transport:
        for sha256, offset, kind, text in (
            (ref.sha256, ref.size_bytes + 1, InvalidInput, f"got offset {ref.size_bytes + 1}, expected 0 to"),
            ("0" * 64, 0, NotFound, "chunk '0000000000000000': not one that this assignment needs; check in again"),
            ("../../fanin.db", 0, NotFound, r"chunk '\.\./\.\./fanin\.db': not one that this assignment needs"),
        ):
            with pytest.raises(kind, match=text):
                list(transport.download(m.Download(assignment_id=work.assignment_id, sha256=sha256, offset=offset)))
    assert snapshot(host.state) == before


def test_a_half_sent_update_leaves_only_its_complete_chunks_in_the_spool(host: Hosted, devices: list[Peer]) -> None:
    header, payload = devices[0].update()
    before = snapshot(host.state)
    replies = devices[0].send(header, pieces(payload, 0, (1 << 20) + 1000))
    assert [reply.update_state for reply in replies] == [m.UpdateState.RECEIVING] * len(replies)
    after = snapshot(host.state)
    assert after.rows == before.rows
    assert after.under("updates") == before.under("updates")
    part = host.state / "spool" / f"{header.assignment_id}.part"
    assert part.read_bytes() == payload[: 1 << 20]


def test_a_duplicate_is_accepted_and_changes_nothing(host: Hosted, devices: list[Peer]) -> None:
    header, payload = devices[1].update()
    assert devices[1].upload(header, payload).update_state is m.UpdateState.ACCEPTED
    before = snapshot(host.state)
    reply = devices[1].upload(header, payload)
    assert reply == m.UploadReply(round_state=m.RoundState.OPEN, update_state=m.UpdateState.ACCEPTED)
    # Another Update in its place changes nothing either.
    devices[1].scale = 2.0
    other_header, other_payload = devices[1].update()
    devices[1].scale = 0.01
    assert other_header != header
    assert devices[1].upload(other_header, other_payload).update_state is m.UpdateState.ACCEPTED
    assert snapshot(host.state) == before


def test_the_round_ends_bit_identical_and_late_updates_are_discarded(
    host: Hosted, devices: list[Peer], tmp_path: Path
) -> None:
    *timely_devices, late_device = devices
    header, payload = late_device.update()
    first = upload_bytes(header)
    is_closed = threading.Event()

    def slow_requests() -> Iterator[bytes]:
        yield first
        for piece in pieces(payload):
            yield upload_bytes(piece)
            assert is_closed.wait(30.0)

    with late_device.connection() as connection:
        call = sign(late_device.key, "Upload", first)
        replies = connection.stream_stream(f"{FLEET}Upload", slow_requests(), pb.UploadReply.FromString, call)
        assert from_proto(m.UploadReply, next(replies)).update_state is m.UpdateState.RECEIVING
        for device in timely_devices:
            assert device.upload(*device.update()).update_state is m.UpdateState.ACCEPTED
        (version,) = host.published_versions()
        assert [version.version_sha256] == f.expected_digests(tmp_path)
        before = snapshot(host.state)
        is_closed.set()
        # The upload in progress learns of it with its next reply, and a new upload at once.
        last_reply = from_proto(m.UploadReply, list(replies)[-1])
    assert (last_reply.round_state, last_reply.update_state) == (m.RoundState.CLOSED, m.UpdateState.DISCARDED)
    (new_reply,) = late_device.send(header, [])
    assert new_reply == m.UploadReply(round_state=m.RoundState.CLOSED, update_state=m.UpdateState.DISCARDED)
    assert devices[0].upload(*devices[0].update()).update_state is m.UpdateState.ACCEPTED
    assert snapshot(host.state) == before
    assert before.under("spool") == []
    assert len(before.under("updates")) == f.NUM_DEVICES


def test_saturated_values_of_most_devices_are_counted_reported_and_the_next_grid_is_coarser(tmp_path: Path) -> None:
    host = Hosted(tmp_path).start()
    try:
        bundle = f.bundle_in(tmp_path)
        host.start_run(f.plan(num_rounds=2), bundle, f.PUBLISHER)
        devices = f.peers(host, bundle, tmp_path)
        devices[0].scale = devices[1].scale = 100.0
        for device in devices + devices:
            device.take_part()
        first, second = host.published_versions()
    finally:
        host.stop()
    rows = snapshot(host.state).rows
    grids = [json.loads(str(row[3])) for row in rows["rounds"]]
    # A first grid ends at +-4, so it saturates most normal values of scale 100. The values of the other device fit.
    assert 2 * 280_000 < first.num_saturated < 2 * f.NUM_VALUES
    assert grids == [[-29, -29], [-29 + MAX_MOVE_BITS] * 2]
    assert 0 < second.num_saturated < first.num_saturated
    assert f"{first.num_saturated} values saturated" in event_text(first)
