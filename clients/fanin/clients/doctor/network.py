"""The checks of the way to a coordinator: the proxy, the name, the port, TLS.

    proxy -> name -> port -> tls         of the proxy instead of the coordinator, if one applies

Each names the cause by the same error as ``fanin join`` (``clients.probe``).
"""

import errno
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Final

from fanin.clients.doctor.checks import CheckResult, fail, failed, ok, skip, warn, within
from fanin.clients.probe import OTHER_FAMILY, cause_of_failure, other_loopback, served_chain
from fanin.clients.route import EXCEPTIONS, PROXIES, Route, route_to
from fanin.protos.addresses import Address, ip_of
from fanin.protos.errors import FaninError, InvalidInput

CONNECT_S: Final = 3.0
"""Seconds until a port that does not answer counts as filtered."""
MAX_ADDRESSES: Final = 8
IGNORED: Final = ("HTTP_PROXY", "all_proxy", "ALL_PROXY")
"""Variables of proxies that other programs read and fanin does not."""
SLOW_S: Final = 1.0
UNREACHABLE: Final = "FN-0811"
"""The code with which ``fanin join`` reports a name or a port that leads nowhere."""
_REFUSED: Final = (errno.ECONNREFUSED, errno.ECONNRESET)
_NO_ROUTE: Final = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A connection to one address: ``open``, ``refused``, ``no answer``, ``no route`` or the system's error."""

    host: str
    outcome: str

    @property
    def is_open(self) -> bool:
        """Whether the port is open."""
        return self.outcome == "open"

    @property
    def is_ipv6(self) -> bool:
        """Whether it is an IPv6 address."""
        return ":" in self.host


def network_findings(
    target: Address, ca_certificate: bytes | None, environment: Mapping[str, str] | None = None
) -> list[CheckResult]:
    """Return the findings about the way to a coordinator.

    Args:
        target: Its address.
        ca_certificate: The authority that the client trusts (PEM); None if it has none yet.
        environment: The variables of proxies; default: those of this process.
    """
    variables = os.environ if environment is None else environment
    try:
        route = route_to(target, variables)
    except InvalidInput as exc:
        return [failed("proxy", exc), *(skip(name, "the proxy is not usable") for name in ("name", "port", "tls"))]
    peer = target if route.proxy is None else route.proxy.address
    findings = [_proxy(route, variables)]
    hosts, name = _name(peer, route)
    findings.append(name)
    if not hosts:
        return [*findings, skip("port", "the name does not resolve"), skip("tls", "the name does not resolve")]
    with ThreadPoolExecutor(MAX_ADDRESSES) as pool:
        attempts = list(pool.map(partial(attempt, port=peer.port), hosts[:MAX_ADDRESSES]))
    findings += _port(peer, route, attempts)
    if not any(each.is_open for each in attempts):
        return [*findings, skip("tls", "the port is not open")]
    return [*findings, _tls(route, ca_certificate)]


def _proxy(route: Route, environment: Mapping[str, str]) -> CheckResult:
    ignored = [name for name in IGNORED if environment.get(name)]
    read = [name for name in PROXIES if environment.get(name)]
    if route.proxy is not None:
        exception = f"to connect without it: export NO_PROXY={route.target.host}"
        if route.proxy.address.is_unspecified:
            return fail("proxy", f"{route.proxy} is an address to listen on, not to connect to", exception)
        return ok("proxy", f"{route.target} is reached through {route.proxy}; {exception}")
    if read:
        why = "a loopback address" if route.target.is_loopback else f"listed in {_exceptions(environment)}"
        return ok("proxy", f"${read[0]} is set, but {route.target.host} is {why}: the connection is direct")
    if ignored:
        return warn(
            "proxy",
            f"${ignored[0]} is set, which fanin does not read: the connection is direct",
            "if this network needs the proxy: export https_proxy=http://HOST:PORT",
        )
    return ok("proxy", "none is set: the connection is direct")


def _exceptions(environment: Mapping[str, str]) -> str:
    return next((f"${name}" for name in EXCEPTIONS if name in environment), "no variable")


def _name(peer: Address, route: Route) -> tuple[list[str], CheckResult]:
    """Return the addresses of a host, and the finding about its name."""
    if ip_of(peer.host) is not None:
        return [peer.host], ok("name", f"{peer.host} is an address: no name to resolve")
    began_s = time.monotonic()
    try:
        hosts: list[str] = within(partial(_addresses, peer), late=list[str]())
    except OSError as exc:
        text = f"the name {peer.host} does not resolve ({exc.strerror or exc})"
        return [], fail("name", text, f"check the name; getent ahosts {peer.host}; or use the address", UNREACHABLE)
    if not hosts:
        fix = "check this machine's network and /etc/resolv.conf"
        return [], fail("name", f"{peer.host}: no name server answers", fix, UNREACHABLE)
    seconds = time.monotonic() - began_s
    text = f"{peer.host} resolves to {', '.join(hosts)}"
    remote = (ip for host in hosts if (ip := ip_of(host)) is not None and not (ip.is_loopback or ip.is_unspecified))
    if not peer.is_loopback and not any(remote):
        return hosts, warn(
            "name",
            f"{text}: this machine itself",
            f"on another machine than the coordinator, correct the entry: grep {peer.host} /etc/hosts",
        )
    if seconds > SLOW_S:
        return hosts, warn("name", f"{text}, after {seconds:.1f} s", "check the name servers of /etc/resolv.conf")
    through = "" if route.proxy is None else f"; the proxy resolves {route.target.host} itself"
    return hosts, ok("name", f"{text}{through}")


def _addresses(peer: Address) -> list[str]:
    rows = socket.getaddrinfo(peer.host, peer.port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(row[4][0]) for row in rows))


def attempt(host: str, port: int) -> Attempt:
    """Connect to a port, and return the outcome."""
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except TimeoutError:
        return Attempt(host=host, outcome="no answer")
    except OSError as exc:
        if exc.errno in _REFUSED:
            return Attempt(host=host, outcome="refused")
        if exc.errno in _NO_ROUTE:
            return Attempt(host=host, outcome="no route")
        return Attempt(host=host, outcome=exc.strerror or str(exc))
    return Attempt(host=host, outcome="open")


def _port(peer: Address, route: Route, attempts: Sequence[Attempt]) -> Iterator[CheckResult]:
    outcomes = ", ".join(f"{each.host}: {each.outcome}" for each in attempts)
    closed = {each.outcome for each in attempts if not each.is_open}
    what = "the coordinator" if route.proxy is None else str(route.proxy)
    if any(each.is_open for each in attempts):
        yield ok("port", f"port {peer.port} of {what} is open ({outcomes})")
    elif (other := other_loopback(peer)) is not None and attempt(other.host, other.port).is_open:
        text = f"no program listens on {peer}, but one does on {other}"
        fix = f"connect to {other}, or let the coordinator listen on both: fanin serve --listen [::]:{peer.port}"
        yield fail("port", text, fix, OTHER_FAMILY)
    elif "refused" in closed:
        text = f"the machine of {what} answers, but no program listens on port {peer.port} ({outcomes})"
        yield fail("port", text, _start(peer, route), UNREACHABLE)
    elif "no route" in closed:
        text = f"no route leads to {peer.host} ({outcomes})"
        yield fail("port", text, f"check the network: ip route get {attempts[0].host}", UNREACHABLE)
    else:
        text = f"nothing answers on port {peer.port} within {CONNECT_S:g} s ({outcomes})"
        reason = "the machine is off, or a firewall drops the connection"
        fix = f"let the firewalls of both machines pass TCP port {peer.port}, for example: ufw allow {peer.port}/tcp"
        yield fail("port", f"{text}: {reason}", fix, UNREACHABLE)
    yield _ipv6(attempts)


def _start(peer: Address, route: Route) -> str:
    if route.proxy is not None:
        return f"correct ${route.proxy.variable}, or export NO_PROXY={route.target.host}"
    if peer.is_loopback:
        return f"fanin serve --listen {peer}"
    return f"on its machine: fanin serve --listen 0.0.0.0:{peer.port} --name {peer.host}"


def _ipv6(attempts: Sequence[Attempt]) -> CheckResult:
    new = [each for each in attempts if each.is_ipv6]
    if not new:
        return ok("ipv6", "not used: there is no IPv6 address")
    if any(each.is_open for each in new):
        return ok("ipv6", f"{new[0].host} can be reached")
    if any(each.is_open for each in attempts):
        return warn(
            "ipv6",
            f"{new[0].host}: {new[0].outcome}; IPv4 works, but each connection may try IPv6 first",
            "remove the AAAA record, or let the coordinator listen on [::]",
        )
    if new[0].outcome == "refused":
        return ok("ipv6", f"{new[0].host} answers; see port")
    return fail("ipv6", f"{new[0].host}: {new[0].outcome}", "check it with: ip -6 route")


def _tls(route: Route, ca_certificate: bytes | None) -> CheckResult:
    if ca_certificate is None:
        return _unverified(route)
    try:
        cause = cause_of_failure(route, ca_certificate)
    except ValueError:
        return fail("tls", "--ca has no PEM certificate", "copy tls/ca.pem from the coordinator's folder")
    if cause is None:
        return ok("tls", f"the certificate is for {route.target.host}, by the authority of --ca, and valid now")
    return failed("tls", cause)


def _unverified(route: Route) -> CheckResult:
    try:
        chain = served_chain(route)
    except FaninError as exc:
        return failed("tls", exc)
    digest = sha256(chain[-1]).hexdigest()
    return warn(
        "tls",
        f"not verified, because --ca is missing; the authority that answers has the fingerprint {digest}",
        "compare it with the line of fanin serve, then join with --ca-fingerprint",
    )
