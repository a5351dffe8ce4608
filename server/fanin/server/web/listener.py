"""The socket of the page, and its HTTP server in the coordinator's event loop.

The socket is bound before any Run changes, so a port in use is an error of the start. The server installs no signal
handlers: the coordinator ends it. Its certificate is that of the coordinator, also after a renewal.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from fanin.protos.addresses import Address
from fanin.protos.errors import Conflict
from fanin.server.access.authority import ServerIdentity

LOG = logging.getLogger("fanin.server.web.listener")
DEFAULT_WEB: Final = Address(host="127.0.0.1", port=7480)
"""The address of the page without an option: only this machine reaches it."""
BACKLOG: Final = 128
MAX_CONNECTIONS: Final = 256
"""Connections of browsers at a time. Each holds a descriptor, of which devices need most."""
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

    Attributes:
        url: Where a browser on this machine opens the page.
    """

    def __init__(self, app: ASGIApp, listener: Listener, tls: ssl.SSLContext | None, close: Callable[[], None]) -> None:
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
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=GRACE_S,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        config.load()
        config.ssl = tls
        self.url = f"{'http' if tls is None else 'https'}://{listener.address}/"
        self._server = _Quiet(config)
        self._socket = listener.socket
        self._close = close
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to serve."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="page")

    async def stop(self) -> None:
        """Accept no more requests, and let those in progress end."""
        self._close()
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()
