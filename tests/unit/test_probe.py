"""The probe of a route: causes that need another network than loopback."""

import gc
import socket
import struct
import threading
import warnings
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.errors import raises

from fanin.clients.probe import cause_of_failure, unreachable
from fanin.clients.route import route_to
from fanin.protos.addresses import parse_address
from fanin.protos.errors import Unavailable
from fanin.server.access.authority import local_identity

TARGET = parse_address("server", "coordinator.test:7443")
UNKNOWN = "does not resolve (Name or service not known); check the name, and the network of this machine"
DROPPED = (
    "the machine is off, or a firewall drops the packets: check the address, and ask the administrators of the "
    "networks to let TCP port 7443 of coordinator.test pass, with TLS 1.2 or newer and HTTP/2 (ALPN h2), and without "
    "inspection"
)
PROXY = {"https_proxy": "http://proxy.test:3128"}


@pytest.mark.parametrize(
    ("environment", "error", "text"),
    [
        (
            {},
            socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
            f"coordinator.test:7443: the name coordinator.test {UNKNOWN}",
        ),
        (
            PROXY,
            socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
            f"coordinator.test:7443: the proxy proxy.test:3128 of $https_proxy: the name proxy.test {UNKNOWN}",
        ),
        (
            {},
            TimeoutError("timed out"),
            f"coordinator.test:7443: no answer within 5 s; {DROPPED}",
        ),
    ],
    ids=["name", "name of a proxy", "no answer"],
)
def test_a_network_that_leads_nowhere(environment: dict[str, str], error: OSError, text: str) -> None:
    with raises(Unavailable, text):
        raise unreachable(route_to(TARGET, environment), error)


def test_a_peer_that_resets_the_connection_leaves_no_open_socket(tmp_path: Path) -> None:
    """The reset arrives before, in or after the first step of the handshake."""
    authority = local_identity(tmp_path, ("127.0.0.1",), datetime.now(UTC)).ca_certificate
    listener = socket.create_server(("127.0.0.1", 0))

    def reset_all() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()

    thread = threading.Thread(target=reset_all)
    thread.start()
    route = route_to(parse_address("server", f"127.0.0.1:{listener.getsockname()[1]}"), {})
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            causes = [cause_of_failure(route, authority) for _ in range(200)]
            gc.collect()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
    assert {type(cause) for cause in causes} == {Unavailable}
    assert [str(each.message) for each in caught] == []
