"""The connections of the page: silent, slow and greedy peers keep no place, and a probe always gets through."""

import asyncio
import logging
import resource
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from fanin.protos.addresses import Address
from fanin.server.access.authority import local_identity
from fanin.server.web.listener import (
    MAX_CONNECTIONS,
    MAX_UNREAD_BYTES,
    PageServer,
    PageTimes,
    open_listener,
    tls_context,
)

REQUEST_S = 0.4
GET = b"GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


async def ready(request: Request) -> Response:
    return PlainTextResponse("ready\n")


async def large(request: Request) -> Response:
    return PlainTextResponse("x" * (8 << 20))


@asynccontextmanager
async def serving(answer_s: float = 0.3, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[PageServer, int]]:
    """Yield a server and its port."""
    app = Starlette(routes=[Route("/readyz", ready), Route("/large", large)])
    listener = open_listener(Address(host="127.0.0.1", port=0))
    times = PageTimes(request_s=REQUEST_S, answer_s=answer_s, again_s=0.01)
    server = PageServer(app, listener, tls, lambda: None, times)
    server.start()
    try:
        yield server, listener.address.port
    finally:
        await server.stop()


async def status(port: int, trust: ssl.SSLContext | None = None) -> bytes:
    """Return the status line of a new request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
    writer.write(GET)
    line = await asyncio.wait_for(reader.readline(), 5.0)
    await end(writer)
    return line


async def end(writer: asyncio.StreamWriter) -> None:
    """Close a connection that the server may have closed before."""
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def until(holds: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


def test_the_newest_request_is_answered_beside_any_number_of_silent_ones() -> None:
    async def run() -> None:
        async with serving() as (server, port):
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS + 40)]
            for _, writer in silent[:100]:
                writer.write(b"GET /readyz HT")
            assert await status(port) == b"HTTP/1.1 200 OK\r\n"
            assert len(server._lines) <= MAX_CONNECTIONS
            await until(lambda: not server._lines)
            for _, writer in silent:
                await end(writer)

    asyncio.run(run())


def test_a_connection_without_a_handshake_ends_and_a_new_one_is_served(tmp_path: Path) -> None:
    identity = local_identity(tmp_path / "tls", ("localhost", "127.0.0.1"), datetime.now(UTC))
    tls = tls_context(lambda: identity, tmp_path)
    trust = ssl.create_default_context(cafile=str(tmp_path / "tls" / "ca.pem"))

    async def run() -> None:
        async with serving(tls=tls) as (server, port):
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS + 20)]
            assert await status(port, trust) == b"HTTP/1.1 200 OK\r\n"
            await until(lambda: not server._lines)
            for _, writer in silent:
                await end(writer)
            assert await status(port, trust) == b"HTTP/1.1 200 OK\r\n"

    asyncio.run(run())


def test_a_header_that_drips_ends_after_the_time_of_a_request() -> None:
    async def run() -> None:
        async with serving() as (server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            # The first request of a connection, and a later one.
            writer.write(GET)
            assert await reader.readuntil(b"ready\n")
            begin = time.monotonic()
            for byte in GET * 100:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)
                if not server._lines:
                    break
            assert REQUEST_S / 2 < time.monotonic() - begin < 5 * REQUEST_S
            await end(writer)

    asyncio.run(run())


def test_an_answer_that_is_not_read_ends() -> None:
    async def run() -> None:
        async with serving() as (server, port):
            with socket.create_connection(("127.0.0.1", port)) as peer:
                peer.sendall(GET.replace(b"readyz", b"large"))
                await until(lambda: bool(server._lines))
                await until(lambda: not server._lines)

    asyncio.run(run())


def test_answers_that_many_do_not_read_are_bounded_together() -> None:
    async def run() -> None:
        async with serving(answer_s=60.0) as (server, port):
            peers = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
            for peer in peers:
                peer.sendall(GET.replace(b"readyz", b"large"))
            await until(lambda: len(server._lines) == len(peers))
            await until(lambda: len(server._lines) < len(peers))
            await until(lambda: sum(line.unread for line in server._lines) <= MAX_UNREAD_BYTES)
            assert server._lines
            for peer in peers:
                peer.close()

    asyncio.run(run())


def test_without_descriptors_the_log_has_one_line_and_the_page_recovers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def run() -> None:
        async with serving() as (_, port):
            peers = [socket.socket() for _ in range(20)]
            num_open = num_descriptors()
            resource.setrlimit(resource.RLIMIT_NOFILE, (num_open, before[1]))
            try:
                for peer in peers:
                    peer.setblocking(False)
                    peer.connect_ex(("127.0.0.1", port))
                await asyncio.sleep(0.5)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
                for peer in peers:
                    peer.close()
            assert await status(port) == b"HTTP/1.1 200 OK\r\n"

    asyncio.run(run())
    assert caplog.text.count("no connection can be accepted") == 1
    assert "Traceback" not in caplog.text
