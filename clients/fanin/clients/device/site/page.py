"""The page of a device on this machine: ``page.html``, which asks for the state every two seconds.

1. It listens on loopback only (``parse_page_address``), and it only reads.
2. The Host header must be a loopback name with its port. Otherwise a web site whose name an attacker points to
   127.0.0.1 could read the state through the owner's browser (DNS rebinding).
3. The page has no asset from elsewhere. Its Content-Security-Policy permits its own style and script by their digests,
   and connections to itself. All texts enter the page as text nodes, never as HTML.
"""

import json
import logging
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET, AF_INET6, socket
from typing import Final

from fanin.clients.device.site.view import site_view
from fanin.protos.addresses import Address, parse_address
from fanin.protos.errors import Conflict, FaninError, InvalidInput

LOG = logging.getLogger("fanin.clients")
PAGE: Final = Path(__file__).with_name("page.html")
REQUEST_S: Final = 10.0
"""Seconds until a browser that sends nothing is disconnected."""
MAX_BROWSERS: Final = 16
"""Connections at a time. Each has a thread, and the device needs its memory for the training."""


@contextmanager
def serve_page(folder: Path, address: Address) -> Iterator[str]:
    """Serve the page of the device in ``folder`` on a thread, until the context ends. Yields its URL.

    Raises:
        Conflict: The address is taken.
    """
    try:
        server = _Server(folder, address)
    except OSError as exc:
        raise Conflict(
            f"--web: {address} cannot be listened on ({exc.strerror}); choose another port, or 0 for any",
            code="FN-0691",
        ) from exc
    thread = threading.Thread(target=server.serve_forever, name="fanin page", daemon=True)
    thread.start()
    try:
        yield f"http://{Address(host=address.host, port=server.server_address[1])}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path, address: Address) -> None:
        self.folder = folder
        self.address_family = AF_INET6 if ":" in address.host else AF_INET
        self._places = threading.BoundedSemaphore(MAX_BROWSERS)
        super().__init__((address.host, address.port), _Handler)

    def process_request(self, request: socket | tuple[bytes, socket], client_address: object) -> None:
        """Serve a browser on a thread, or close its connection if there are too many."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: socket | tuple[bytes, socket], client_address: object) -> None:
        """Serve a browser, and free its place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that goes away is no error of the device."""
        LOG.debug("page: %s: the connection broke", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_S
    server_version = "fanin"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a request for the page or for the state."""
        if not _is_own(self.headers.get("Host", ""), self.server.server_address[1]):
            self._reply(421, "text/plain", b"this page is for a browser on this machine: use http://127.0.0.1\n")
        elif self.path == "/":
            page = PAGE.read_bytes()
            self._reply(200, "text/html", page, _policy(page.decode()))
        elif self.path == "/status.json":
            self._reply(200, "application/json", self._state())
        else:
            self._reply(404, "text/plain", b"not found: open /\n")

    def _state(self) -> bytes:
        try:
            return json.dumps(site_view(self.server.folder, time.time()).document()).encode()
        except (FaninError, OSError) as exc:
            return json.dumps({"error": str(exc)}).encode()

    def _reply(self, status: int, kind: str, body: bytes, policy: str = "default-src 'none'") -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing: the page asks every two seconds."""

    def log_error(self, *_: object) -> None:
        """Log nothing: a wrong request is no error of the device."""


def _is_own(host: str, port: int) -> bool:
    """Return whether a Host header names this machine and this port."""
    try:
        address = parse_address("Host", host)
    except InvalidInput:
        return False
    return address.is_loopback and address.port == port


def _policy(page: str) -> str:
    """Return the Content-Security-Policy of the page, with the digests of its style and its script."""
    digests = {
        name: b64encode(sha256(page.partition(f"<{name}>")[2].partition(f"</{name}>")[0].encode()).digest()).decode()
        for name in ("style", "script")
    }
    return (
        f"default-src 'none'; style-src 'sha256-{digests['style']}'; script-src 'sha256-{digests['script']}'; "
        "connect-src 'self'; img-src data:"
    )
