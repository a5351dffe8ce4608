"""The socket of the page, and its HTTP server in the coordinator's event loop.

Any peer can connect, and keep a connection without a request. So the connections are few, those without a request end
within seconds, and a new one replaces the one that has waited longest: a probe of ``/readyz`` always gets through.

The socket is bound before any Run changes, so a port in use is an error of the start. The server installs no signal
handlers: the coordinator ends it. Its certificate is that of the coordinator, also after a renewal.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from fanin.protos.addresses import Address
from fanin.protos.errors import Conflict
from fanin.server.access.authority import ServerIdentity
from fanin.server.access.limited_log import LimitedLog

LOG = logging.getLogger("fanin.server.web.listener")
DEFAULT_WEB: Final = Address(host="127.0.0.1", port=7480)
"""The address of the page without an option: only this machine reaches it."""
BACKLOG: Final = 128
MAX_CONNECTIONS: Final = 256
"""Connections of browsers at a time. Each holds a descriptor, of which devices need most."""
MAX_UNREAD_BYTES: Final = 64 << 20
"""Answers in memory that browsers have not read. With more, the largest ones are given up."""
SWEEP_S: Final = 1.0
GRACE_S: Final = 3
MAX_HEADER_BYTES: Final = 32 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A listening socket, and the address under which a browser on this machine reaches it."""

    socket: socket.socket
    address: Address


def open_listener(address: Address | None) -> Listener:
    """Return a listening socket for the page.

    Args:
        address: The address of ``--web``; None without the option. Then the page has ``DEFAULT_WEB``, or a free port
            if another coordinator on this machine has that one.

    Raises:
        Conflict: The address cannot be listened on.
    """
    if address is not None:
        return _listen(address)
    try:
        return _listen(DEFAULT_WEB)
    except Conflict:
        listener = _listen(replace(DEFAULT_WEB, port=0))
        LOG.info("page: port %d is in use, so the page has a free one", DEFAULT_WEB.port)
        return listener


def _listen(address: Address) -> Listener:
    try:
        family, _, _, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        is_dual = address.is_unspecified and family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listener = socket.create_server(where[:2], family=family, backlog=BACKLOG, dualstack_ipv6=is_dual)
    except OSError as exc:
        raise Conflict(
            f"--web {address}: cannot be listened on ({exc.strerror or exc}); stop the other process, choose another "
            "--web HOST:PORT (port 0 selects a free port), or serve no page with --no-web",
            code="FN-1420",
        ) from exc
    listener.setblocking(False)
    return Listener(socket=listener, address=replace(address, port=listener.getsockname()[1]).loopback)


def tls_context(identity: Callable[[], ServerIdentity], folder: Path) -> ssl.SSLContext:
    """Return a context whose new connections get the certificate that ``identity`` returns then.

    Args:
        identity: Returns the certificate as it is now.
        folder: A private folder. Python reads keys from files alone, so each certificate is written there and removed.
    """

    def context_of(one: ServerIdentity) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with TemporaryDirectory(dir=folder, prefix="page-") as scratch:
            chain, key = Path(scratch, "chain.pem"), Path(scratch, "key.pem")
            chain.write_bytes(one.chain)
            key.write_bytes(one.key)
            context.load_cert_chain(chain, key)
        return context

    served = identity()
    fresh = first = context_of(served)

    def choose(line: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext) -> None:
        nonlocal served, fresh
        current = identity()
        if current is not served:
            # One that cannot be loaded is tried once: the connections keep the one before.
            served = current
            try:
                fresh = context_of(current)
            except OSError as exc:
                LOG.error("page: the new certificate is not served, but the one before: %s", exc)
        line.context = fresh

    # Called at the begin of each handshake, also of a client that sends no name.
    first.sni_callback = choose
    return first


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTimes:
    """How long a connection may use its place for nothing, in seconds.

    Attributes:
        request_s: For its TLS handshake, for the header of a request, and between two requests.
        answer_s: In which a browser must read what was sent, or the next MiB of a file.
        again_s: Pause after a connection that could not be accepted, such as for want of descriptors.
    """

    request_s: float = 10.0
    answer_s: float = 60.0
    again_s: float = 1.0


class _Line(H11Protocol):
    """A connection of a browser.

    Attributes:
        handshake: The task of its TLS handshake.
        unread: Bytes of answers that its browser had not read at the last look.
        waits_since: When it began to wait for the rest of a request, by the loop's clock; None while one is served.
    """

    def __init__(self, server: uvicorn.Server, ended: Callable[["_Line"], None]) -> None:
        super().__init__(server.config, server.server_state, {})
        self._ended = ended
        self.unread = 0
        self._read_at = self.loop.time()
        self._line: asyncio.Transport | None = None
        self.handshake: asyncio.Task[None] | None = None
        self.waits_since: float | None = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        self._line = transport
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Free its place."""
        self._ended(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Serve the request that is complete."""
        super().handle_events()
        # uvicorn's annotation lacks that there is none before the first request.
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is not None and not cycle.response_complete:
            self.waits_since = None

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.waits_since = self.loop.time()
        super().on_response_complete()

    def is_late(self, times: PageTimes) -> bool:
        """Return whether it has waited too long for a request, or its browser for too long read nothing."""
        now = self.loop.time()
        unread = 0 if self._line is None else self._line.get_write_buffer_size()
        if not unread or unread > self.unread:
            # All was read, or so much that the next piece of a file was sent.
            self._read_at = now
        self.unread = unread
        if unread:
            return now - self._read_at > times.answer_s
        return self.waits_since is not None and now - self.waits_since > times.request_s

    def abort(self) -> None:
        """Close it at once."""
        if self.handshake is not None:
            self.handshake.cancel()
        if self._line is not None:
            self._line.abort()


class _Quiet(uvicorn.Server):
    """A uvicorn server that leaves the signals of the process to the coordinator."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture nothing."""
        yield


class PageServer:
    """Serves an application on a listener until it is stopped.

    Args:
        app: The application.
        listener: Its listener.
        tls: The certificate (``tls_context``); None for plain HTTP.
        close: Ends the streams, which would otherwise hold the end of the server.
        times: How long a connection may use its place for nothing.

    Attributes:
        url: Where a browser on this machine opens the page.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: Listener,
        tls: ssl.SSLContext | None,
        close: Callable[[], None],
        times: PageTimes = PageTimes(),
    ) -> None:
        config = uvicorn.Config(
            app,
            loop="none",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            # The application logs its errors itself.
            log_level=logging.CRITICAL,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE_S,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        config.load()
        self.url = f"{'http' if tls is None else 'https'}://{listener.address}/"
        self._server = _Quiet(config)
        self._socket = listener.socket
        self._tls = tls
        self._close = close
        self._times = times
        self._lines: set[_Line] = set()
        self._failures = LimitedLog(LOG, max_lines=1, what="failed connections")
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start to serve."""
        # It has no socket: the connections are accepted here.
        works = (self._server.serve(sockets=[]), self._accept(), self._sweep())
        self._tasks = [asyncio.create_task(work, name="page") for work in works]

    async def stop(self) -> None:
        """Accept no more requests, and let those in progress end."""
        self._close()
        self._server.should_exit = True
        if self._tasks:
            served, *others = self._tasks
            for task in others:
                task.cancel()
            await asyncio.wait(self._tasks)
            served.result()
        for line in tuple(self._lines):
            line.abort()
        self._socket.close()
        # The sockets are closed by the next turn of the loop.
        await asyncio.sleep(0)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError as exc:
                text = (
                    f"page: no connection can be accepted ({exc.strerror}); raise the limit of open files (ulimit -n)"
                )
                self._failures.log(type(exc).__name__, text)
                await asyncio.sleep(self._times.again_s)
                continue
            if not self._has_place():
                connection.close()
            else:
                line = _Line(self._server, self._lines.discard)
                self._lines.add(line)
                line.handshake = asyncio.create_task(self._connect(line, connection), name="page connection")
            # Accepting does not wait while connections are there: without a pause, a flood would stop the coordinator.
            await asyncio.sleep(0)

    def _has_place(self) -> bool:
        """Return whether a connection may be added. At the limit, it replaces the one that has waited longest."""
        if len(self._lines) < MAX_CONNECTIONS:
            return True
        waiting = [(line.waits_since, id(line), line) for line in self._lines if line.waits_since is not None]
        if not waiting:
            return False
        line = min(waiting)[2]
        self._lines.discard(line)
        line.abort()
        return True

    async def _connect(self, line: _Line, connection: socket.socket) -> None:
        """Begin to serve a connection, after its TLS handshake."""
        loop = asyncio.get_running_loop()
        is_served = False
        try:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(self._times.request_s):
                    await loop.connect_accepted_socket(lambda: line, connection, ssl=self._tls)
                is_served = True
        finally:
            if not is_served:
                self._lines.discard(line)
                connection.close()

    async def _sweep(self) -> None:
        """End connections that keep a place and use it for nothing."""
        while True:
            await asyncio.sleep(min(SWEEP_S, self._times.request_s / 2))
            ended = [line for line in self._lines if line.is_late(self._times)]
            unread = sum(line.unread for line in self._lines)
            for line in sorted(self._lines, key=lambda line: line.unread, reverse=True):
                if unread <= MAX_UNREAD_BYTES:
                    break
                unread -= line.unread
                ended.append(line)
            for line in ended:
                self._lines.discard(line)
                line.abort()
