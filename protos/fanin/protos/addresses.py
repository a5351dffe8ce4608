"""Network addresses as people write them: HOST:PORT, with an IPv6 address in brackets."""

import ipaddress
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from fanin.protos.errors import InvalidInput

DEFAULT_PORT: Final = 7443
MAX_PORT: Final = 65535
_NOT_IN_HOSTS: Final = frozenset("/\\@?#%,;'\"[]")
"""Characters that no host name has. A text with one of them is a URL or a list, and gRPC would read it as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A host and a port.

    Attributes:
        host: A name or an address; an IPv6 address without brackets.
        port: The port; 0 is any free port, to listen on.
    """

    host: str
    port: int

    def __str__(self) -> str:
        """Return HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_unspecified(self) -> bool:
        """Whether it stands for all addresses of a machine (0.0.0.0, ::). One can listen there, but not connect."""
        ip = ip_of(self.host)
        return ip is not None and ip.is_unspecified

    @property
    def is_loopback(self) -> bool:
        """Whether it is this machine: 127.0.0.0/8, ::1, or localhost and the names below it (RFC 6761)."""
        ip = ip_of(self.host)
        return self.host.lower().split(".")[-1] == "localhost" if ip is None else ip.is_loopback

    @property
    def loopback(self) -> "Address":
        """The address at which this machine reaches what listens here: its loopback address if it is unspecified."""
        if not self.is_unspecified:
            return self
        return Address(host="::1" if ":" in self.host else "127.0.0.1", port=self.port)


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address of a host; None for a name."""
    with suppress(ValueError):
        return ipaddress.ip_address(host)
    return None


def parse_address(what: str, text: str) -> Address:
    """Return the address of a text. Raises InvalidInput, with the corrected text if it can be told, unless HOST:PORT.

    Args:
        what: Name of the option or field, for the message.
        text: HOST:PORT. An IPv6 address must be in brackets: without them, the end of ``::1:7443`` may be a port or a
            part of the address.
    """
    _, is_url, rest = text.rpartition("://")
    rest = rest.partition("/")[0] if is_url else rest
    host, _, port = rest.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and int(port) <= MAX_PORT
    if is_url or not is_port or not _is_host(host):
        raise InvalidInput(f"{what}: got {text!r}, expected HOST:PORT, for example {_example(rest)}", code="FN-0101")
    return Address(host=host.removeprefix("[").removesuffix("]"), port=int(port))


def check_remote(what: str, text: str) -> Address:
    """Return the address of a server to connect to. Raises InvalidInput, also for one that one can only listen on."""
    address = parse_address(what, text)
    if address.is_unspecified:
        raise InvalidInput(
            f"{what}: got {text!r}, which is no address to connect to, expected that of the coordinator's machine; "
            f"on that machine itself: {address.loopback}",
            code="FN-0102",
        )
    if not address.port:
        raise InvalidInput(
            f"{what}: got {text!r} with port 0, expected the port that the coordinator printed", code="FN-0102"
        )
    return address


def parse_page_address(what: str, text: str) -> Address:
    """Return the address of a page for this machine alone. Raises InvalidInput.

    Args:
        what: Name of the option, for the message.
        text: PORT, or HOST:PORT with a loopback address; port 0 selects a free port.
    """
    is_port = text.isascii() and text.isdecimal() and int(text) <= MAX_PORT
    address = Address(host="127.0.0.1", port=int(text)) if is_port else parse_address(what, text)
    if not address.is_loopback:
        raise InvalidInput(
            f"{what}: got {text!r}, expected PORT or 127.0.0.1:PORT: the page has no login, so only this machine may "
            f"read it; from another machine use ssh -L {address.port}:127.0.0.1:{address.port}",
            code="FN-1485",
        )
    return address


def _is_host(text: str) -> bool:
    if text.startswith("[") and text.endswith("]"):
        return isinstance(ip_of(text[1:-1]), ipaddress.IPv6Address)
    if not text or ":" in text or not text.isprintable() or " " in text or not _NOT_IN_HOSTS.isdisjoint(text):
        return False
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return True


def _example(text: str) -> str:
    """Return the address that a wrong text may mean."""
    host, _, port = text.rpartition(":")
    if ":" in host and isinstance(ip_of(host), ipaddress.IPv6Address) and port.isdecimal():
        return f"[{host}]:{port}"
    if isinstance(ip_of(text), ipaddress.IPv6Address):
        return f"[{text}]:{DEFAULT_PORT}"
    if _is_host(text):
        return f"{text}:{DEFAULT_PORT}"
    if _is_host(host):
        return f"{host}:{port if port.isdecimal() and int(port) <= MAX_PORT else DEFAULT_PORT}"
    return f"127.0.0.1:{DEFAULT_PORT}"
