"""Programs at a port that are no coordinator to trust, and HTTP proxies, all on loopback and on threads."""

import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import grpc

from fanin.server.access.authority import ServerIdentity

Serve = Callable[[socket.socket], None]


@contextmanager
def listening(serve: Serve) -> Iterator[str]:
    """Call ``serve`` for each connection to a port, on a thread. Yield the address."""
    threads: list[threading.Thread] = []

    def accept(server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                thread = threading.Thread(target=_served, args=(serve, connection))
                thread.start()
                threads.append(thread)

    with socket.create_server(("127.0.0.1", 0)) as server:
        acceptor = threading.Thread(target=accept, args=(server,))
        acceptor.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            # Closing alone does not wake a thread in accept.
            server.shutdown(socket.SHUT_RDWR)
            acceptor.join()
            for thread in threads:
                thread.join()


def _served(serve: Serve, connection: socket.socket) -> None:
    with connection, suppress(OSError):
        connection.settimeout(10.0)
        serve(connection)


def in_clear(connection: socket.socket) -> None:
    """Answer as a web server without TLS."""
    connection.recv(100)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def hanging_up(connection: socket.socket) -> None:
    """End each connection before TLS, as a coordinator with too many of them."""
    connection.recv(100)


def silent(connection: socket.socket) -> None:
    """Accept a connection and never answer, as a firewall that swallows TLS."""
    connection.settimeout(60.0)
    while connection.recv(1 << 16):
        pass


@contextmanager
def dropping() -> Iterator[str]:
    """A port whose packets are dropped: its queue of connections is full. Yield the address."""
    with socket.socket() as server, ExitStack() as stack:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        host, port = server.getsockname()
        for _ in range(4):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex((host, port))
        yield f"{host}:{port}"


@contextmanager
def grpc_in_clear() -> Iterator[str]:
    """A gRPC server without TLS."""
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


@contextmanager
def tls(
    identity: ServerIdentity,
    folder: Path,
    protocols: tuple[str, ...] = ("h2",),
    newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
) -> Iterator[str]:
    """A TLS server with a certificate, which ends each connection after the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for name, data in (("key", identity.key), ("certificate", identity.certificate)):
        (folder / name).write_bytes(data)
    context.load_cert_chain(folder / "certificate", folder / "key")
    if protocols:
        context.set_alpn_protocols(list(protocols))
    if newest < ssl.TLSVersion.TLSv1_2:
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.minimum_version = newest
    context.maximum_version = newest

    def serve(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secure:
            secure.recv(1)

    with listening(serve) as address:
        yield address


@contextmanager
def proxy(
    target: str, reply: bytes = b"HTTP/1.1 200 Connection established\r\n\r\n"
) -> Iterator[tuple[str, list[str]]]:
    """An HTTP proxy that connects every tunnel to ``target``, whatever the request names.

    Yields:
        The address, and the requests so far. The names of requests thus need not resolve.
    """
    host, _, port = target.rpartition(":")
    requests: list[str] = []

    def serve(connection: socket.socket) -> None:
        request = b""
        while b"\r\n\r\n" not in request:
            received = connection.recv(1 << 10)
            if not received:
                return
            request += received
        requests.append(request.decode())
        connection.sendall(reply)
        if b" 200 " not in reply:
            return
        with ExitStack() as stack:
            far = stack.enter_context(closing(socket.create_connection((host, int(port)))))
            far.settimeout(10.0)
            back = threading.Thread(target=_pump, args=(far, connection))
            back.start()
            stack.callback(back.join)
            _pump(connection, far)

    with listening(serve) as address:
        yield address, requests


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def inspecting(target: str, identity: ServerIdentity, authority: bytes, folder: Path) -> Iterator[str]:
    """An HTTP proxy that inspects TLS: it ends each tunnel with its own certificate, and connects to ``target``."""
    host, _, port = target.rpartition(":")
    inner = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for name, data in (("mitm.key", identity.key), ("mitm.pem", identity.certificate)):
        (folder / name).write_bytes(data)
    inner.load_cert_chain(folder / "mitm.pem", folder / "mitm.key")
    outer = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    outer.load_verify_locations(cadata=authority.decode())
    for context in (inner, outer):
        context.set_alpn_protocols(["h2"])

    def serve(connection: socket.socket) -> None:
        request = b""
        while b"\r\n\r\n" not in request:
            received = connection.recv(1)
            if not received:
                return
            request += received
        connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        with ExitStack() as stack:
            near = stack.enter_context(inner.wrap_socket(connection, server_side=True))
            plain = stack.enter_context(socket.create_connection((host, int(port))))
            far = stack.enter_context(outer.wrap_socket(plain, server_hostname="127.0.0.1"))
            # One thread: an SSL socket is not for two.
            _relay(near, far)

    with listening(serve) as address:
        yield address


def _relay(near: ssl.SSLSocket, far: ssl.SSLSocket) -> None:
    ends = {near: far, far: near}
    while True:
        ready = [end for end in ends if end.pending()] or select.select(list(ends), [], [], 10.0)[0]
        if not ready:
            return
        for end in ready:
            # A record may carry no data of the tunnel, such as a session ticket.
            end.settimeout(0.0)
            try:
                data = end.recv(1 << 16)
            except ssl.SSLWantReadError:
                continue
            finally:
                end.settimeout(10.0)
            if not data:
                return
            ends[end].sendall(data)
