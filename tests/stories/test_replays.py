"""A captured call that is sent again is refused, leaks nothing and disturbs no device.

The replayed bytes are exactly those of the first call: method, metadata and request.
"""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.message import Message
from support import federations as f
from support.hosted import Hosted
from support.peers import FLEET, Peer, pieces, sign
from support.snapshot import snapshot

from fanin.clients.transport import CallOptions, Connection
from fanin.protos import messages as m
from fanin.protos.errors import Untimely
from fanin.protos.wire import to_proto
from fanin.v1 import fleet_pb2 as pb

CAPABILITIES = m.Capabilities(codecs=("fixed32",), runtimes=("synthetic 1",), graph_formats=("onnx",))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    """A coordinator with an open Round for three devices."""
    host = Hosted(tmp_path).start()
    host.start_run(f.plan(), f.bundle_in(host.folder), f.PUBLISHER)
    yield host
    host.stop()


@pytest.fixture
def device(host: Hosted) -> Peer:
    """A device with an Assignment."""
    device = f.peers(host, f.bundle_in(host.folder), host.folder, 1)[0]
    device.begin()
    return device


class CapturedCall:
    """One call of a device, byte for byte."""

    def __init__(self, device: Peer, name: str, request: Message) -> None:
        self.device, self.name, self.body = device, name, request.SerializeToString()
        self.options: CallOptions = sign(device.key, name, self.body)

    def send(self, *parts: Message) -> list[Message]:
        """Make the call, and return all replies."""
        requests = iter([self.body, *(part.SerializeToString() for part in parts)])
        with self.device.connection() as connection:
            return list(self._call(connection, requests))

    def _call(self, connection: Connection, requests: Iterator[bytes]) -> Iterator[Message]:
        method = f"{FLEET}{self.name}"
        match self.name:
            case "Upload":
                yield from connection.stream_stream(method, requests, pb.UploadReply.FromString, self.options)
            case "Download":
                yield from connection.unary_stream(method, next(requests), pb.DownloadPiece.FromString, self.options)
            case _:
                reply = {"Enroll": pb.EnrollReply, "CheckIn": pb.CheckInReply, "Report": pb.ReportReply}[self.name]
                yield connection.unary(method, next(requests), reply.FromString, self.options)


def calls_of(device: Peer) -> list[tuple[CapturedCall, list[Message]]]:
    """Return a call of each kind, with the requests that follow its first one."""
    work = device.work
    download = m.Download(assignment_id=work.assignment_id, sha256=work.version.parameters.chunks[0].sha256, offset=0)
    header, payload = device.update()
    enrollment = m.Enrollment(protocol=m.PROTOCOL, token=device.host.device_token, public_key=device.key.public)
    return [
        (CapturedCall(device, "Enroll", to_proto(enrollment, pb.EnrollRequest)), []),
        (
            CapturedCall(
                device,
                "CheckIn",
                to_proto(m.CheckIn(protocol=1, capabilities=CAPABILITIES, wait_s=0.0), pb.CheckInRequest),
            ),
            [],
        ),
        (CapturedCall(device, "Download", to_proto(download, pb.DownloadRequest)), []),
        (
            CapturedCall(device, "Upload", to_proto(m.UploadRequest(part=header), pb.UploadRequest)),
            [to_proto(m.UploadRequest(part=piece), pb.UploadRequest) for piece in pieces(payload, end=1 << 20)],
        ),
        (
            CapturedCall(
                device, "Report", to_proto(m.Report(assignment_id=work.assignment_id, failure="no"), pb.ReportRequest)
            ),
            [],
        ),
    ]


def test_no_call_is_answered_twice_and_a_second_one_leaves_no_trace(host: Hosted, device: Peer) -> None:
    calls = calls_of(device)
    for call, parts in calls:
        assert call.send(*parts)
    before = snapshot(host.state)
    for call, parts in calls:
        with pytest.raises(Untimely, match="FN-0019"):
            call.send(*parts)
    assert snapshot(host.state) == before
    # The device itself continues, because it signs each try again.
    for new_call, parts in calls_of(device):
        assert new_call.send(*parts)


def test_a_replayed_failure_does_not_take_the_place_of_a_device_that_came_back(host: Hosted, device: Peer) -> None:
    report = calls_of(device)[-1][0]
    report.send()
    device.begin()
    with pytest.raises(Untimely):
        report.send()
    with host.operator() as operator:
        assert operator.describe("run", 1).live.at_work == (device.device_id,)


def test_a_replayed_check_in_does_not_end_the_one_that_waits(tmp_path: Path) -> None:
    host = Hosted(tmp_path).start()
    device = f.peers(host, f.bundle_in(host.folder), host.folder, 1)[0]
    answers: list[Message] = []
    try:
        with device.transport() as transport:
            transport.enroll(host.device_token)
        request = to_proto(m.CheckIn(protocol=1, capabilities=CAPABILITIES, wait_s=20.0), pb.CheckInRequest)
        call = CapturedCall(device, "CheckIn", request)
        thread = threading.Thread(target=lambda: answers.extend(call.send()))
        thread.start()
        time.sleep(0.5)
        with pytest.raises(Untimely):
            call.send()
        assert answers == []
        host.start_run(f.plan(), f.bundle_in(host.folder), f.PUBLISHER)
        thread.join()
        (answer,) = answers
        assert isinstance(answer, pb.CheckInReply) and answer.HasField("assigned")
    finally:
        host.stop()


def test_a_restart_refuses_the_calls_of_the_process_before_it(host: Hosted, device: Peer) -> None:
    calls = calls_of(device)
    for call, parts in calls:
        call.send(*parts)
    host.stop()
    host.start()
    for call, parts in calls:
        with pytest.raises(Untimely):
            call.send(*parts)
    device.begin()
