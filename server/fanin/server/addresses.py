"""The addresses of this machine, and which of them the coordinator's certificate covers.

``fanin serve`` prints them when it starts. The address to listen on is often 0.0.0.0, which no client can connect to.
"""

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fanin.protos.addresses import Address, ip_of

SIOCGIFADDR: Final = 0x8915
"""The ioctl of Linux that returns the IPv4 address of an interface (netdevice(7))."""
_IFREQ: Final = "256s"
_IPV6_OF_INTERFACES: Final = Path("/proc/net/if_inet6")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachable:
    """The addresses under which clients can connect.

    Attributes:
        covered: Names and addresses that the certificate covers, the best one for a client first.
        uncovered: Addresses of this machine that the certificate does not cover: clients would refuse them.
        is_local: Whether only programs on this machine can connect.
    """

    covered: tuple[Address, ...]
    uncovered: tuple[Address, ...]
    is_local: bool


def machine_addresses() -> tuple[str, ...]:
    """Return the addresses of this machine's interfaces, without loopback and link-local ones; none if unknown."""
    texts: list[str] = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                row = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, struct.pack(_IFREQ, name.encode()[:15]))
                texts.append(socket.inet_ntoa(row[20:24]))
    with suppress(OSError):
        rows = (line.split()[0] for line in _IPV6_OF_INTERFACES.read_text("ascii").splitlines())
        texts += [str(ipaddress.IPv6Address(bytes.fromhex(row))) for row in rows]
    if not texts:
        # Other systems: the addresses of the host's own name.
        with suppress(OSError):
            texts = [str(row[4][0]) for row in socket.getaddrinfo(socket.gethostname(), None)]
    usable = (text for text in dict.fromkeys(texts) if (ip := ip_of(text)) and not (ip.is_loopback or ip.is_link_local))
    return tuple(usable)


def reachable(listen: Address, names: Collection[str], machine: Collection[str]) -> Reachable:
    """Return the addresses of a coordinator for its clients.

    Args:
        listen: The address that it listens on, with the real port.
        names: The names and addresses that its certificate covers.
        machine: The addresses of this machine (``machine_addresses``).
    """
    if not listen.is_unspecified:
        machine = () if listen.is_loopback else (listen.host,)
    elif ":" not in listen.host:
        machine = [text for text in machine if ":" not in text]
    local = {name for name in names if Address(host=name, port=listen.port).is_loopback}
    remote = sorted(set(names) - local, key=lambda name: (ip_of(name) is not None, name))
    covered = [] if listen.is_loopback else remote
    return Reachable(
        covered=tuple(Address(host=name, port=listen.port) for name in covered),
        uncovered=tuple(Address(host=text, port=listen.port) for text in machine if text not in names),
        is_local=listen.is_loopback,
    )


def announcement(listen: Address, names: Collection[str], fingerprint: str) -> str:
    """Return the lines that tell an operator how devices reach this coordinator, and the command of a device.

    Args:
        listen: The address that it listens on, with the real port.
        names: The names and addresses that its certificate covers.
        fingerprint: SHA-256 of the local authority's certificate, hexadecimal; empty for an authority of the operator.
    """
    trust = f"--ca-fingerprint {fingerprint}" if fingerprint else "--ca ca.pem"
    places = reachable(listen, names, machine_addresses())
    lines = []
    if places.covered:
        lines.append(f"  addresses for clients  {', '.join(map(str, places.covered))}")
    if places.uncovered:
        hosts = [address.host for address in places.uncovered]
        options = " ".join(f"--name {host}" for host in hosts)
        lines.append(
            f"  not in the certificate {', '.join(hosts)}: clients refuse these addresses; restart with {options}"
        )
    if places.is_local:
        lines.append(
            f"  only this machine can connect; for others: fanin serve --listen 0.0.0.0:{listen.port} --name HOST"
        )
    server = places.covered[0] if places.covered else listen.loopback
    label = "a device joins with  " if places.covered else "a device here joins by"
    lines.append(
        f"  {label}  fanin join --server {server} {trust} "
        "--token-file device.token --publisher publisher.pub --data FILE.npz"
    )
    return "".join(f"{line}\n" for line in lines)
