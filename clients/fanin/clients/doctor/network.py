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
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.hashes import SHA256

from fanin.clients.doctor.checks import CheckResult, fail, failed, ok, skip, warn, within
from fanin.clients.pins import pinned_authority
from fanin.clients.probe import OTHER_FAMILY, any_address, cause_of_failure, other_loopback, served_chain
from fanin.clients.route import EXCEPTIONS, PROXIES, Route, route_to
from fanin.protos.addresses import Address, ip_of
from fanin.protos.errors import FaninError, InvalidInput

CONNECT_S: Final = 3.0
"""Seconds until a port that does not answer counts as filtered."""
MAX_ADDRESSES: Final = 8
MAX_ISSUER_CHARS: Final = 200
IGNORED: Final = ("HTTP_PROXY", "all_proxy", "ALL_PROXY")
"""Variables of proxies that other programs read and fanin does not."""
SLOW_S: Final = 1.0
THIRD_PARTY: Final = "FN-1511"
"""The code of a certificate by another authority than the coordinator's, which the client trusts, too."""
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
    target: Address,
    ca_certificate: bytes | None,
    environment: Mapping[str, str] | None = None,
    *,
    fingerprint: str = "",
) -> list[CheckResult]:
    """Return the findings about the way to a coordinator.

    Args:
        target: Its address.
        ca_certificate: The authority that the client trusts (PEM); None if it has none yet.
        environment: The variables of proxies; default: those of this process.
        fingerprint: That of the coordinator's own authority; "" if it is unknown.
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
    return [*findings, _tls(route, ca_certificate, fingerprint)]


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
        yield fail("port", text, _listen(peer, route, attempts), UNREACHABLE)
    elif "no route" in closed:
        text = f"no route leads to {peer.host} ({outcomes})"
        yield fail("port", text, f"check the network: ip route get {attempts[0].host}", UNREACHABLE)
    else:
        text = f"nothing answers on port {peer.port} within {CONNECT_S:g} s ({outcomes})"
        reason = "the machine is off, or a firewall drops the connection"
        fix = f"let the firewalls of both machines pass TCP port {peer.port}, for example: ufw allow {peer.port}/tcp"
        yield fail("port", f"{text}: {reason}", fix, UNREACHABLE)
    yield _ipv6(attempts)


def _listen(peer: Address, route: Route, attempts: Sequence[Attempt]) -> str:
    """Return what to do about a port on which no program listens. Only its operator can start the coordinator."""
    if route.proxy is not None:
        return f"correct ${route.proxy.variable}, or export NO_PROXY={route.target.host}"
    if peer.is_loopback:
        return f"fanin serve --listen {peer}"
    return (
        f"compare {peer} with the join line that the operator of the coordinator has, and ask the operator whether it "
        f"runs and listens there, as with --listen {any_address(each.host for each in attempts)}:{peer.port}"
    )


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


def _tls(route: Route, ca_certificate: bytes | None, fingerprint: str) -> CheckResult:
    if ca_certificate is None:
        return _pinned(route, fingerprint) if fingerprint else _unverified(route)
    try:
        cause = cause_of_failure(route, ca_certificate)
    except ValueError:
        return fail("tls", "--ca has no PEM certificate", "copy tls/ca.pem from the coordinator's folder")
    return _issued(route, ca_certificate, fingerprint) if cause is None else failed("tls", cause)


def _issued(route: Route, ca_certificate: bytes, fingerprint: str) -> CheckResult:
    """Return the finding about a certificate that verifies: another authority of --ca than the coordinator's reads all.

    The coordinator's own one has the fingerprint, or it is the first in the file, to which the owner appended others.
    """
    own_one = ok("tls", f"the certificate is for {route.target.host}, by the authority of --ca, and valid now")
    try:
        chain = served_chain(route)
        served = [x509.load_der_x509_certificate(each) for each in chain]
        authorities = x509.load_pem_x509_certificates(ca_certificate)
    except FaninError as exc:
        return failed("tls", exc)
    except ValueError:
        # OpenSSL reads certificates that cryptography does not.
        return own_one
    issuers = [each.fingerprint(SHA256()).hex() for each in authorities if _has_issued(each, served)]
    own = fingerprint or authorities[0].fingerprint(SHA256()).hex()
    if not issuers or own in issuers:
        return own_one
    text = (
        f"the certificate is issued by {_issuer_of(chain)!r} (fingerprint {issuers[0]}), which --ca trusts, and not by "
        f"the coordinator's own authority ({own}): a third party, which holds that key, reads and can change what this "
        "machine exchanges with the coordinator, also its token"
    )
    fix = f"ask the administrator of the proxy to exempt {route.target}, then remove that certificate from --ca"
    sure = "" if fingerprint else "; to be sure which authority is the own one, pass --ca-fingerprint of the join line"
    return replace(warn("tls", text, f"{fix}{sure}"), code=THIRD_PARTY)


def _issuer_of(chain: Sequence[bytes]) -> str:
    """Return the name of the authority that issued the first certificate of a chain, in DER."""
    with suppress(ValueError, IndexError):
        return x509.load_der_x509_certificate(chain[0]).issuer.rfc4514_string()[:MAX_ISSUER_CHARS]
    return "an authority whose name cannot be read"


def _has_issued(authority: x509.Certificate, chain: Sequence[x509.Certificate]) -> bool:
    for each in chain:
        with suppress(ValueError, TypeError, InvalidSignature):
            each.verify_directly_issued_by(authority)
            return True
    return False


def _pinned(route: Route, fingerprint: str) -> CheckResult:
    try:
        pinned_authority(route, fingerprint)
    except FaninError as exc:
        issuer = ""
        with suppress(FaninError):
            issuer = f"; the certificate there is issued by {_issuer_of(served_chain(route))!r}"
        return replace(failed("tls", exc), text=f"{exc}{issuer}")
    return ok("tls", f"the certificate is for {route.target.host}, by the authority of --ca-fingerprint, and valid now")


def _unverified(route: Route) -> CheckResult:
    try:
        chain = served_chain(route)
    except FaninError as exc:
        return failed("tls", exc)
    digest = sha256(chain[-1]).hexdigest()
    return warn(
        "tls",
        f"not verified: --ca and --ca-fingerprint are missing; the authority there has the fingerprint {digest}",
        "compare it with the line of the coordinator's operator, then pass it as --ca-fingerprint",
    )
