"""The route to a coordinator: which variable of the environment names a proxy, and for which hosts there is none."""

import pytest
from support.errors import raises

from fanin.clients.route import PROXIES, Route, route_to
from fanin.protos.addresses import Address, parse_address
from fanin.protos.errors import InvalidInput

TARGET = "coordinator.example.org:7443"
PROXY = "http://proxy.example.org:3128"


def variable_of(target: str, environment: dict[str, str]) -> str:
    """Return the variable of the proxy on the route to a target; empty without a proxy."""
    route = route_to(parse_address("server", target), environment)
    return "" if route.proxy is None else route.proxy.variable


def test_without_variables_the_route_is_direct() -> None:
    assert route_to(parse_address("server", TARGET), {"PATH": "/bin"}) == Route(target=parse_address("server", TARGET))


def test_the_first_variable_in_the_order_of_grpc_names_the_proxy() -> None:
    environment = dict.fromkeys(PROXIES, PROXY)
    for variable in PROXIES:
        assert variable_of(TARGET, environment) == variable
        # An empty value switches the proxy off, instead of the next variable.
        assert variable_of(TARGET, environment | {variable: ""}) == ""
        del environment[variable]
    assert variable_of(TARGET, environment | {"HTTP_PROXY": PROXY, "all_proxy": PROXY}) == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "[::1]", "localhost", "LOCALHOST", "a.localhost"])
def test_loopback_has_no_proxy(host: str) -> None:
    assert variable_of(f"{host}:7443", {"grpc_proxy": PROXY}) == ""


@pytest.mark.parametrize("variable", ["no_grpc_proxy", "no_proxy", "NO_PROXY"])
@pytest.mark.parametrize(
    ("host", "entries", "is_direct"),
    [
        ("coordinator.example.org", "coordinator.example.org", True),
        ("coordinator.example.org", "other, .EXAMPLE.org", True),
        ("coordinator.example.org", "example.org", True),
        ("coordinator.example.org", "*", True),
        ("coordinator.example.org", "", False),
        ("coordinator.example.org", "other.org,,", False),
        ("coordinator.example.org", "coordinator", False),
        ("10.1.2.3", "10.0.0.0/8", True),
        ("10.1.2.3", "10.1.2.3", True),
        ("10.1.2.3", "2.3", False),
        ("10.1.2.3", "fd00::/8", False),
        ("[fd00::7]", "fd00::/8", True),
        ("[fd00::7]", "[fd00::7]", True),
    ],
)
def test_exceptions(variable: str, host: str, entries: str, is_direct: bool) -> None:
    environment = {"https_proxy": PROXY, variable: entries}
    assert variable_of(f"{host}:7443", environment) == ("" if is_direct else "https_proxy")


def test_the_first_list_of_exceptions_counts_alone() -> None:
    assert variable_of(TARGET, {"https_proxy": PROXY, "no_proxy": "other.org", "NO_PROXY": "example.org"}) != ""


@pytest.mark.parametrize(
    ("value", "address", "url"),
    [
        (PROXY, "proxy.example.org:3128", PROXY),
        ("proxy.example.org:3128", "proxy.example.org:3128", PROXY),
        ("HTTP://10.0.0.1:80/", "10.0.0.1:80", "http://10.0.0.1:80"),
        ("http://u:p%40@[fd00::1]:80", "[fd00::1]:80", "http://u:p%40@[fd00::1]:80"),
    ],
)
def test_forms_of_a_proxy(value: str, address: str, url: str) -> None:
    proxy = route_to(parse_address("server", TARGET), {"http_proxy": value}).proxy
    assert proxy is not None
    assert (str(proxy.address), proxy.url) == (address, url)
    assert str(proxy) == f"the proxy {address} of $http_proxy"
    assert "p%40" not in repr(proxy)


@pytest.mark.parametrize("value", ["socks5://u:secret@p:1", "https://u:secret@p:1", "http://u:secret@p", "u:secret@p"])
def test_another_form_is_refused_without_its_password(value: str) -> None:
    scheme = value.partition("://")[0] + "://" if "://" in value else ""
    with raises(
        InvalidInput,
        f"$http_proxy: got {scheme}{value.rpartition('@')[2]}, expected http://HOST:PORT of an HTTP proxy; "
        "correct it, or to connect without a proxy set NO_PROXY=coordinator.example.org",
    ):
        variable_of(TARGET, {"http_proxy": value})


@pytest.mark.parametrize("text", ["a.example:1", "[::1]:7443", "127.0.0.1:65535", "[fe80::1%eth0]:1"])
def test_an_address_reads_back_as_it_was_written(text: str) -> None:
    assert str(parse_address("server", text)) == text


@pytest.mark.parametrize(
    ("listen", "dialed"),
    [("0.0.0.0:1", "127.0.0.1:1"), ("[::]:1", "[::1]:1"), ("[0:0::0]:1", "[::1]:1"), ("a.example:1", "a.example:1")],
)
def test_the_address_of_this_machine(listen: str, dialed: str) -> None:
    assert str(parse_address("listen", listen).loopback) == dialed


def test_an_ipv6_address_is_written_in_brackets() -> None:
    assert str(Address(host="fd00::1", port=7)) == "[fd00::1]:7"
