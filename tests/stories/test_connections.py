"""Silent, excess and idle connections, and calls that arrive all at once, do not stop the coordinator."""

import asyncio
import hashlib
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import grpc
import pytest
from support import federations as f
from support.hosted import Hosted
from support.peers import FLEET, sign
from support.processes import Site

from fanin.clients.transport import Connection
from fanin.edge.bundles.keys import SigningKey
from fanin.protos import messages as m
from fanin.protos.errors import FaninError, Unauthenticated, Unavailable
from fanin.protos.messages import VersionPublished
from fanin.protos.wire import from_proto, to_proto
from fanin.server.access.connections import Connections
from fanin.server.access.limits import Limits
from fanin.server.folder import open_state
from fanin.server.storage.disk import Durability
from fanin.server.storage.lanes import inline
from fanin.server.storage.records import EnrolledDevice
from fanin.v1 import fleet_pb2 as pb

SOON_S = 10.0
HANDSHAKE_S = 0.4
NUM_CALLS = 1200
"""So many more than gRPC's default of 1,000 calls that gRPC would certainly cancel some."""
NUM_POLLS = 2000


@contextmanager
def serving(folder: Path, connections: Connections, first_request_s: float = 30.0) -> Iterator[Hosted]:
    """Serve with these limits."""
    host = Hosted(folder, connections=connections, first_request_s=first_request_s).start()
    try:
        yield host
    finally:
        host.stop()


def await_true(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_open(connection: socket.socket) -> bool:
    """Whether the other side has left this connection open."""
    connection.setblocking(False)
    try:
        while data := connection.recv(1 << 16):
            assert data
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except OSError:
        pass
    return False


def silent_connection(host: Hosted) -> socket.socket:
    """Return a TCP connection that sends nothing."""
    return socket.create_connection(("127.0.0.1", host.port))


def is_served(host: Hosted) -> bool:
    """Whether a caller on a new connection gets an answer."""
    with closing(Connection(host.address, host.ca)) as connection, pytest.raises(FaninError) as excinfo:
        connection.unary(f"{FLEET}CheckIn", b"", pb.CheckInReply.FromString, sign(f.PUBLISHER, "CheckIn", b""))
    return isinstance(excinfo.value, Unauthenticated)


def test_silent_connections_are_closed_and_their_number_is_limited(tmp_path: Path) -> None:
    with serving(tmp_path, Connections(max_connections=8, handshake_s=HANDSHAKE_S)) as host, ExitStack() as stack:
        callers = [stack.enter_context(silent_connection(host)) for _ in range(30)]
        await_true(lambda: sum(map(is_open, callers)) <= 8)
        await_true(lambda: not any(map(is_open, callers)))
        await_true(lambda: is_served(host))


def test_a_connection_that_stops_after_tls_is_closed(tmp_path: Path) -> None:
    with serving(tmp_path, Connections(handshake_s=HANDSHAKE_S)) as host, silent_connection(host) as tcp_connection:
        context = ssl.create_default_context(cadata=host.ca.decode())
        context.set_alpn_protocols(["h2"])
        with context.wrap_socket(tcp_connection, server_hostname="localhost") as connection:
            assert is_open(connection)
            await_true(lambda: not is_open(connection))


def test_a_connection_without_a_call_is_closed_and_the_next_call_opens_another(tmp_path: Path) -> None:
    # Long enough for the channel's watcher, which checks five times a second, to see each state.
    with serving(tmp_path, Connections(idle_s=1.0)) as host:
        credentials = grpc.ssl_channel_credentials(host.ca)
        states: list[grpc.ChannelConnectivity] = []
        with grpc.secure_channel(host.address, credentials) as channel:
            channel.subscribe(states.append)
            check_in: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"{FLEET}CheckIn")
            for num_calls in (1, 2):
                with pytest.raises(grpc.RpcError) as excinfo:
                    check_in(b"", timeout=SOON_S)
                assert excinfo.value.code() is grpc.StatusCode.UNAUTHENTICATED
                await_true(lambda num=num_calls: states.count(grpc.ChannelConnectivity.READY) == num)
                await_true(lambda: states[-1] is grpc.ChannelConnectivity.IDLE)


@pytest.mark.parametrize("method", ["CheckIn", "Download", "Upload"])
def test_a_call_that_never_sends_its_request_is_ended(tmp_path: Path, method: str) -> None:
    end_of_test = threading.Event()

    def no_requests() -> Iterator[bytes]:
        end_of_test.wait()
        yield from ()

    with serving(tmp_path, Connections(), first_request_s=0.2) as host:
        credentials = grpc.ssl_channel_credentials(host.ca)
        with grpc.secure_channel(host.address, credentials) as channel:
            call: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(f"{FLEET}{method}")
            with pytest.raises(grpc.RpcError) as excinfo:
                call(no_requests(), timeout=SOON_S)
            end_of_test.set()
            assert excinfo.value.code() is grpc.StatusCode.UNAVAILABLE


def test_each_of_many_calls_that_come_at_once_is_answered(tmp_path: Path) -> None:
    with serving(tmp_path, Connections()) as host, ExitStack() as stack:
        credentials = grpc.ssl_channel_credentials(host.ca)
        # Channels with different options have connections of their own.
        channels = [
            stack.enter_context(grpc.secure_channel(host.address, credentials, [("fanin.test", number)]))
            for number in range(2)
        ]
        for channel in channels:
            grpc.channel_ready_future(channel).result(SOON_S)
        host.block(1.0)
        methods: list[grpc.UnaryUnaryMultiCallable[bytes, bytes]] = [
            channel.unary_unary(f"{FLEET}CheckIn") for channel in channels
        ]
        calls = [methods[number % len(methods)].future(b"", timeout=60.0) for number in range(NUM_CALLS)]
        assert Counter(call.code() for call in calls) == {grpc.StatusCode.UNAUTHENTICATED: NUM_CALLS}


@pytest.mark.nightly
def test_each_of_many_polls_that_wait_at_once_is_answered(tmp_path: Path) -> None:
    keys = [SigningKey(hashlib.sha256(f"poll {number}".encode()).digest()) for number in range(NUM_POLLS)]
    state = open_state(tmp_path / "state", Durability.PROCESS, (inline, inline), time.time)
    asyncio.run(state.devices.enroll([EnrolledDevice(public_key=key.public) for key in keys], 1.0))
    check_in = m.CheckIn(
        protocol=m.PROTOCOL,
        capabilities=m.Capabilities(codecs=("fixed32",), runtimes=("synthetic 1",), graph_formats=("onnx",)),
        wait_s=5.0,
    )
    body = to_proto(check_in, pb.CheckInRequest).SerializeToString()
    with serving(tmp_path, Connections()) as host, ExitStack() as stack:
        # A coordinator serves no call that was signed before its start.
        signatures = [sign(key, "CheckIn", body).metadata for key in keys]
        credentials = grpc.ssl_channel_credentials(host.ca)
        methods: list[grpc.UnaryUnaryMultiCallable[bytes, bytes]] = [
            stack.enter_context(grpc.secure_channel(host.address, credentials, [("fanin.test", number)])).unary_unary(
                f"{FLEET}CheckIn"
            )
            for number in range(4)
        ]
        calls = [
            methods[number % 4].future(body, metadata=signature, timeout=120.0)
            for number, signature in enumerate(signatures)
        ]
        assert Counter(call.code() for call in calls) == {grpc.StatusCode.OK: NUM_POLLS}
        answers = [from_proto(m.CheckInReply, pb.CheckInReply.FromString(call.result())).answer for call in calls]
        assert Counter(answers) == {m.Wait(retry_min_s=0.0, retry_max_s=1.0): NUM_POLLS}


@pytest.mark.nightly
def test_a_round_ends_while_more_connections_are_silent_than_the_process_has_descriptors(tmp_path: Path) -> None:
    site = Site(tmp_path)
    try:
        coordinator = site.serve(max_descriptors=256)
        bundle = f.bundle_in(tmp_path)
        site.start_run(f.plan(), bundle, f.PUBLISHER)
        port = int(site.address.rpartition(":")[2])
        with ExitStack() as stack:
            for _ in range(400):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            # They are closed at the timeout for TLS. Until then the devices try again.
            for device in f.peers(site, bundle, tmp_path):
                device.take_part()
            assert any(isinstance(entry.event, VersionPublished) for entry in site.events())
        assert "descriptors: this process may open 256, expected 40064; at most 96 devices wait" in coordinator.text()
        assert "Too many open files" not in coordinator.text()
    finally:
        site.close()


def test_uploads_beyond_the_limit_are_refused_until_later(tmp_path: Path) -> None:
    host = Hosted(tmp_path, limits=Limits(max_uploads=0)).start()
    try:
        bundle = f.bundle_in(tmp_path)
        host.start_run(f.plan(), bundle, f.PUBLISHER)
        device, *_ = f.peers(host, bundle, tmp_path)
        device.begin()
        with pytest.raises(Unavailable, match="FN-0677"):
            device.upload(*device.update())
    finally:
        host.stop()
