"""The route to a coordinator: direct, or through the HTTP proxy that the environment names.

The rule is one, also for the probe after a failure (``probe``); gRPC only carries it out:

1. A loopback address is reached directly. A proxy is another machine, or would have to call back.
2. The first of ``EXCEPTIONS`` that is set lists the hosts without a proxy, separated by commas: the end of a name
   (``example.org``), an address, a network (``10.0.0.0/8``), or ``*`` for all.
3. The first of ``PROXIES`` that is set names the proxy, http://[USER:PASSWORD@]HOST:PORT. An empty value is no proxy.

gRPC reads the lower-case names itself and silently ignores values that it cannot use. HTTP_PROXY in upper case is not
read: a web server sets it from a header of a request (https://httpoxy.org).
"""

import base64
import ipaddress
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote

from fanin.protos.addresses import Address, ip_of, parse_address
from fanin.protos.errors import InvalidInput

PROXIES: Final = ("grpc_proxy", "https_proxy", "HTTPS_PROXY", "http_proxy")
EXCEPTIONS: Final = ("no_grpc_proxy", "no_proxy", "NO_PROXY")
KEEPALIVE_MS: Final = 60_000
"""Interval of keep-alive pings. Routers drop idle connections after minutes; the coordinator allows this interval."""
IDLE_MS: Final = 120_000
"""Time for which a connection without a call stays open. It is shorter than the coordinator's limit, so the device
closes it first: gRPC prints a message on standard error if the coordinator does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """An HTTP proxy.

    Attributes:
        address: Its address.
        variable: The variable of the environment that names it.
        user: USER:PASSWORD, percent-encoded as in the variable; empty for none.
    """

    address: Address
    variable: str
    user: str = field(default="", repr=False)

    def __str__(self) -> str:
        """Return its name in messages, without the password."""
        return f"the proxy {self.address} of ${self.variable}"

    @property
    def url(self) -> str:
        """The URL for gRPC."""
        return f"http://{self.user}{'@' if self.user else ''}{self.address}"

    def connect_request(self, target: Address) -> bytes:
        """Return the request for a tunnel to a target (RFC 9110, section 9.3.6)."""
        lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
        if self.user:
            lines.append(f"Proxy-Authorization: Basic {base64.b64encode(unquote(self.user).encode()).decode()}")
        return "\r\n".join([*lines, "", ""]).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way to a coordinator. Without ``proxy`` it is direct."""

    target: Address
    proxy: Proxy | None = None


def route_to(target: Address, environment: Mapping[str, str]) -> Route:
    """Return the route to a target. Raises InvalidInput for a proxy of another form."""
    variable = next((name for name in PROXIES if name in environment), "")
    if not environment.get(variable) or target.is_loopback or _is_excepted(target.host, environment):
        return Route(target=target)
    return Route(target=target, proxy=_proxy(variable, environment[variable], target))


def _is_excepted(host: str, environment: Mapping[str, str]) -> bool:
    text = next((environment[name] for name in EXCEPTIONS if name in environment), "")
    entries = [entry.strip().strip("[]").lower() for entry in text.split(",")]
    ip = ip_of(host)
    if ip is None:
        # The end of a name, as gRPC compares it.
        return any(entry == "*" or (entry and host.lower().endswith(entry)) for entry in entries)
    return any(entry in ("*", host.lower()) or _covers(entry, ip) for entry in entries)


def _covers(entry: str, ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    try:
        return ip in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False


def _proxy(variable: str, value: str, target: Address) -> Proxy:
    scheme, _, rest = value.rpartition("://")
    user, _, place = rest.removesuffix("/").rpartition("@")
    try:
        if scheme.lower() not in ("", "http"):
            raise ValueError(f"unknown scheme {scheme}")
        address = parse_address(variable, place)
    except (InvalidInput, ValueError) as exc:
        # Without the user and the password of the value.
        raise InvalidInput(
            f"${variable}: got {scheme}{'://' if scheme else ''}{place}, expected http://HOST:PORT of an HTTP proxy; "
            f"correct it, or to connect without a proxy set NO_PROXY={target.host}",
            code="FN-0812",
        ) from exc
    return Proxy(address=address, variable=variable, user=user)


def check_authority(ca_certificate: bytes) -> None:
    """Raise InvalidInput unless these bytes are a certificate in PEM form."""
    try:
        # gRPC accepts any bytes and fails later without a reason. asyncio, which grpc imports, has already loaded ssl.
        # The parser in cryptography.x509 would cost a device 1.4 MB. Text outside the base64 blocks is a comment.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=ca_certificate.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as exc:
        raise InvalidInput(
            "certificate authority (--ca): got no PEM certificate, expected the coordinator's tls/ca.pem",
            code="FN-0807",
        ) from exc
