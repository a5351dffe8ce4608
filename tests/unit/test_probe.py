"""The probe of a route: causes that need another network than loopback."""

import socket

import pytest
from support.errors import raises

from fanin.clients.probe import unreachable
from fanin.clients.route import route_to
from fanin.protos.addresses import parse_address
from fanin.protos.errors import Unavailable

TARGET = parse_address("server", "coordinator.test:7443")
UNKNOWN = "does not resolve (Name or service not known); check the name, and the network of this machine"
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
            "coordinator.test:7443: no answer within 5 s; check the address, and that no firewall drops the connection",
        ),
    ],
    ids=["name", "name of a proxy", "no answer"],
)
def test_a_network_that_leads_nowhere(environment: dict[str, str], error: OSError, text: str) -> None:
    with raises(Unavailable, text):
        raise unreachable(route_to(TARGET, environment), error)
