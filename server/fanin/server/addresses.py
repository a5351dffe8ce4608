"""The addresses of this machine, and which of them the coordinator's certificate covers.

``fanin serve`` prints them when it starts. The address to listen on is often 0.0.0.0, which no client can connect to.
"""

import fcntl
import ipaddress
import shlex
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFiles:
    """What a device needs of the coordinator's folder.

    Attributes:
        token: The file with an enrollment token.
        authority: The file with the certificate of the local authority; None if the authority is the operator's own.
        fingerprint: SHA-256 of that certificate, hexadecimal; "" to pass the file itself.
    """

    token: Path
    authority: Path | None
    fingerprint: str = ""


def announcement(listen: Address, names: Collection[str], files: DeviceFiles) -> str:
    """Return the lines that tell an operator how devices reach this coordinator, and the command of a device.

    Args:
        listen: The address that it listens on, with the real port.
        names: The names and addresses that its certificate covers.
        files: The files of its folder that a device needs.
    """
    places = reachable(listen, names, machine_addresses())
    lines = []
    if places.covered:
        lines.append(f"  addresses for clients  {', '.join(map(str, places.covered))}")
    if places.uncovered:
        lines.append(_uncovered(places))
    if places.is_local:
        lines.append(
            f"  only this machine can connect; for others: fanin serve --listen 0.0.0.0:{listen.port} --name HOST"
        )
    label = "a device joins with   " if places.covered else "a device here joins by"
    lines.append(f"  {label} {join_command(listen, names, files)}")
    if places.covered:
        copies = [files.token] if files.fingerprint or files.authority is None else [files.token, files.authority]
        lines.append(f"  copy to it first       {', '.join(map(str, copies))}, and the publisher.pub of the publisher")
    return "".join(f"{line}\n" for line in lines)


def join_command(listen: Address, names: Collection[str], files: DeviceFiles) -> str:
    """Return the command of a device: on another machine if one can connect, else on this one, with paths of here."""
    places = reachable(listen, names, ())
    is_here = not places.covered
    if files.fingerprint:
        trust = f"--ca-fingerprint {files.fingerprint}"
    elif files.authority is None:
        trust = "--ca CA.pem"
    else:
        trust = f"--ca {shlex.quote(str(files.authority.absolute())) if is_here else files.authority.name}"
    token = shlex.quote(str(files.token.absolute())) if is_here else files.token.name
    server = listen.loopback if is_here else places.covered[0]
    return f"fanin join --server {server} {trust} --token-file {token} --publisher publisher.pub --data FILE.npz"


def page_announcement(url: str, listen: Address | None, names: Collection[str]) -> str:
    """Return the lines with the addresses of the page for browsers.

    Args:
        url: Its address on this machine.
        listen: The address that it listens on, with the real port; None: loopback.
        names: The names and addresses that its certificate covers, and under which it answers.
    """
    lines = [f"  page for browsers      {url}"]
    if listen is not None and not listen.is_loopback:
        places = reachable(listen, names, machine_addresses())
        lines += [f"                         https://{each}/" for each in places.covered if f"https://{each}/" != url]
        if places.uncovered:
            lines.append(_uncovered(places))
    return "".join(f"{line}\n" for line in lines)


def _uncovered(places: Reachable) -> str:
    hosts = [address.host for address in places.uncovered]
    options = " ".join(f"--name {host}" for host in hosts)
    return f"  not in the certificate {', '.join(hosts)}: clients refuse these addresses; restart with {options}"
