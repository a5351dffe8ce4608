"""The cause of a failed connection, which gRPC hides: one more connection on the same route, with ``ssl``.

    TCP -> [CONNECT] -> TLS, verified -> HTTP/2 -> None: the coordinator can be reached now
     |         |            |              |
     +---------+------------+--------------+-----> the error, with its cause and remedy

A probe sends no request and no credential. ``Untrusted`` is a permanent cause: the peer answered, but is no coordinator
that this client can trust. ``Unavailable`` may pass. Codes decide, never texts: those of ``errno``, of HTTP and of
OpenSSL (``X509_V_ERR_..`` and the reason names of ``ssl.SSLError``).
"""

import logging
import socket
import ssl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from threading import Timer
from typing import TYPE_CHECKING, Final

from fanin.clients.route import Proxy, Route
from fanin.protos.addresses import Address, ip_of
from fanin.protos.errors import FaninError, Unavailable, Untrusted

if TYPE_CHECKING:
    from cryptography import x509

LOG = logging.getLogger("fanin.clients")
PROBE_S: Final = 5.0
"""Seconds for each step of a probe. The caller of a failed call waits for it."""
CONNECT_S: Final = 10.0
"""Seconds until a connection that neither opens nor fails counts as failed. gRPC's default is 20."""
SILENT_S: Final = 3.0
"""Seconds after which a first call without an answer is logged."""
OTHER_FAMILY: Final = "FN-1498"
"""The code of a coordinator that listens on the other one of IPv4 and IPv6 alone."""
IPV6: Final = 6
IPV6_ANY: Final = "[::]"
MAX_HEADER_BYTES: Final = 16 << 10
"""Longest header of a proxy's reply."""
_MAX_ISSUER_CHARS: Final = 200
READ_BYTES: Final = 16 << 10
"""Bytes of a handshake that are read at a time: a TLS record."""
_OUTDATED: Final = (9, 10)
"""The codes of OpenSSL for certificates that are not valid yet or no longer.

Reference:
    https://docs.openssl.org/3.0/man3/X509_STORE_CTX_get_error/
"""
_OTHER_NAME: Final = (62, 64)
"""HOSTNAME_MISMATCH and IP_ADDRESS_MISMATCH."""
_OTHER_AUTHORITY: Final = (2, 7, 18, 19, 20, 21)
"""No issuer among the trusted ones, a wrong signature, and self-signed certificates."""
_INNER: Final = "_sslobj"
"""The object inside an ``SSLObject``."""
_DER: Final = 2
"""ENCODING_DER of ``_ssl``."""
_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")
_OTHER_TLS: Final = (
    *("UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION", "WRONG_SSL_VERSION"),
    *("SSLV3_ALERT_HANDSHAKE_FAILURE", "TLSV1_ALERT_INSUFFICIENT_SECURITY"),
)


@contextmanager
def reported_silence(address: str) -> Iterator[None]:
    """Log what is tried if the first call to an address, in this context, takes long. Its cause follows at its end."""
    tried = f"no answer for {SILENT_S:g} s; still trying TCP, TLS and HTTP/2. If it stays so, the cause follows in"
    waiting = Timer(SILENT_S, LOG.warning, ("%s: %s %g s", address, tried, CONNECT_S + PROBE_S - SILENT_S))
    waiting.daemon = True
    waiting.start()
    try:
        yield
    finally:
        waiting.cancel()


def cause_of_failure(route: Route, ca_certificate: bytes) -> FaninError | None:
    """Connect once. Return the cause of the failure; None if this connection succeeds."""
    try:
        with _explained(route), _connection(route) as sock:
            if _verified(route, _authority(ca_certificate), sock).selected_alpn_protocol() == "h2":
                return None
            return _no_coordinator(route, "speaks TLS, but not HTTP/2")
    except ssl.SSLCertVerificationError as exc:
        return _certificate_problem(route, ca_certificate, exc)
    except Unavailable as exc:
        return _other_family(route, ca_certificate) or exc
    except FaninError as exc:
        return exc


def other_loopback(target: Address) -> Address | None:
    """Return the loopback address of the other family, IPv4 or IPv6; None for a name or another machine."""
    ip = ip_of(target.host)
    if ip is None or not ip.is_loopback:
        return None
    return Address(host="127.0.0.1" if ip.version == IPV6 else "::1", port=target.port)


def _other_family(route: Route, ca_certificate: bytes) -> Untrusted | None:
    """Return the error for a coordinator that serves on this port of this machine by the other family alone."""
    other = other_loopback(route.target)
    if other is None:
        return None
    try:
        with _connection(Route(target=other)) as sock:
            _verified(Route(target=other), _authority(ca_certificate), sock)
    except (OSError, FaninError):
        return None
    return Untrusted(
        f"{route.target}: no program listens there, and the coordinator listens on {other} alone; connect to {other}, "
        f"or let it listen on both: fanin serve --listen [::]:{other.port}",
        code=OTHER_FAMILY,
    )


@contextmanager
def _explained(route: Route) -> Iterator[None]:
    """Translate the errors of a handshake, except those of a certificate, to ours."""
    try:
        yield
    except ssl.SSLCertVerificationError:
        raise
    except ssl.SSLError as exc:
        if exc.reason in _NO_TLS:
            raise _no_coordinator(route, "does not speak TLS") from exc
        if exc.reason in _OTHER_TLS:
            problem = "speaks no TLS version or cipher of this client, expected TLS 1.2 or newer"
            raise _no_coordinator(route, problem) from exc
        raise _broken(route, str(exc.reason or exc)) from exc
    except TimeoutError as exc:
        raise Unavailable(
            f"{route.target}: accepts the connection, but does not answer TLS within {PROBE_S:g} s; a firewall or a "
            f"proxy probably swallows TLS, or the program there hangs: {_let_pass(route)}{_suffix(route)}",
            code="FN-1510",
        ) from exc
    except OSError as exc:
        raise _broken(route, exc.strerror or str(exc)) from exc


def unreachable(route: Route, error: OSError) -> Unavailable:
    """Return the cause of a connection below TLS that failed with an error of the operating system."""
    if route.proxy is None:
        peer, what, remedy = route.target, f"{route.target}", "is the coordinator running there?"
        if not peer.is_loopback:
            remedy = "compare it with the join line that the operator of the coordinator has, and ask whether it runs"
    else:
        peer, what = route.proxy.address, f"{route.target}: {route.proxy}"
        remedy = _other_proxy(route.proxy, route)
    match error:
        case socket.gaierror():
            problem = f"the name {peer.host} does not resolve ({error.strerror})"
            remedy = "check the name, and the network of this machine"
        case TimeoutError():
            problem = f"no answer within {PROBE_S:g} s"
            remedy = "the machine is off, or a firewall drops the packets: check the address" + (
                f", and {_let_pass(route)}" if route.proxy is None else f", and {remedy}"
            )
        case ConnectionRefusedError() if route.proxy is None and (listen := _listened(peer)) == IPV6_ANY:
            problem = f"cannot be reached ({error.strerror})"
            remedy = f"{remedy.rstrip('?')}, and listens on IPv6, as with --listen {listen}:{peer.port}"
        case _:
            problem = f"cannot be reached ({error.strerror or error})"
    return Unavailable(f"{what}: {problem}; {remedy}", code="FN-0811")


def any_address(hosts: Iterable[str]) -> str:
    """Return the address to listen on so that clients reach these addresses: that of IPv6 also serves IPv4."""
    return IPV6_ANY if any(":" in host for host in hosts) else "0.0.0.0"


def _listened(peer: Address) -> str:
    with suppress(OSError):
        return any_address(str(row[4][0]) for row in socket.getaddrinfo(peer.host, peer.port, type=socket.SOCK_STREAM))
    return ""


@contextmanager
def _connection(route: Route) -> Iterator[socket.socket]:
    """Open the connection below TLS. Raises Unavailable."""
    peer = route.target if route.proxy is None else route.proxy.address
    try:
        sock = socket.create_connection((peer.host, peer.port), PROBE_S)
    except OSError as exc:
        raise unreachable(route, exc) from exc
    with sock:
        if route.proxy is not None:
            _open_tunnel(route, route.proxy, sock)
        yield sock


def _open_tunnel(route: Route, proxy: Proxy, sock: socket.socket) -> None:
    """Ask a proxy for a connection to the coordinator. Raises Unavailable."""
    header = b""
    try:
        sock.sendall(proxy.connect_request(route.target))
        while b"\r\n\r\n" not in header and len(header) < MAX_HEADER_BYTES:
            # One byte: the next one may already belong to TLS.
            received = sock.recv(1)
            if not received:
                break
            header += received
    except OSError as exc:
        raise Unavailable(
            f"{route.target}: {proxy} does not answer ({exc.strerror or exc}); {_other_proxy(proxy, route)}",
            code="FN-0813",
        ) from exc
    version, _, status = header.partition(b"\r\n")[0].decode("ascii", "replace").partition(" ")
    if not version.startswith("HTTP/1"):
        raise Unavailable(f"{route.target}: {proxy} is no HTTP proxy; {_other_proxy(proxy, route)}", code="FN-0813")
    code = status[:3]
    if code[:1] == "2":
        return
    remedy = {
        "407": f"it expects a user and a password: {proxy.variable}=http://USER:PASSWORD@{proxy.address}",
        "403": f"its rules forbid this connection: let its administrator allow it, or {_other_proxy(proxy, route)}",
    }.get(code, f"is the coordinator running, and may the proxy reach it? Or {_other_proxy(proxy, route)}")
    shown = "".join(char for char in status[:80] if char.isprintable())
    raise Unavailable(f"{route.target}: {proxy} does not connect to it (HTTP {shown}); {remedy}", code="FN-0813")


def _verified(route: Route, context: ssl.SSLContext, sock: socket.socket) -> ssl.SSLObject:
    """Return the end of a TLS handshake.

    ``wrap_socket`` would leave its socket open if the peer resets the connection before the handshake begins.
    """
    context.set_alpn_protocols(["h2"])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname=route.target.host)
    while True:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            sock.sendall(outgoing.read())
            if data := sock.recv(READ_BYTES):
                incoming.write(data)
            else:
                incoming.write_eof()
        else:
            sock.sendall(outgoing.read())
            return tls


def _authority(ca_certificate: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=ca_certificate.decode("ascii", "ignore"))
    return context


def _certificate_problem(route: Route, ca_certificate: bytes, error: ssl.SSLCertVerificationError) -> FaninError:
    # Imported here: it would cost each device 1.4 MB.
    from cryptography import x509

    authorities = x509.load_pem_x509_certificates(ca_certificate)
    server = _served_certificate(route)
    now = datetime.now(UTC)
    code = error.verify_code
    if server is not None and code in _OTHER_NAME:
        problem = _name_problem(route, server)
    elif server is not None and code in _OTHER_AUTHORITY:
        return _authority_problem(route, server, authorities)
    elif server is not None and code in _OUTDATED and (text := _clock_problem([server, *authorities], now)):
        problem = text
    else:
        problem = f"its certificate is not valid ({error.verify_message}); check the coordinator's tls/server.pem"
    return Untrusted(f"{route.target}: {problem}{_suffix(route)}", code="FN-0814")


def served_chain(route: Route) -> tuple[bytes, ...]:
    """Return the certificates that the peer presents, in DER and unverified, its own first.

    Trust none of them: this is for a comparison with a known fingerprint, and for messages.

    Raises:
        Unavailable: The peer cannot be reached.
        Untrusted: It does not speak TLS.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with _explained(route), _connection(route) as sock:
        return _unverified_chain(_verified(route, context, sock))


def _unverified_chain(tls: ssl.SSLObject) -> tuple[bytes, ...]:
    # Public from Python 3.13 on. The older versions have the same method one object deeper.
    read = getattr(tls, "get_unverified_chain", None) or getattr(tls, _INNER).get_unverified_chain
    chain = read() or ()
    return tuple(each if isinstance(each, bytes) else each.public_bytes(_DER) for each in chain)


def _served_certificate(route: Route) -> "x509.Certificate | None":
    """Return the certificate that the peer presents, unverified. None if it does not present it again."""
    from cryptography import x509

    with suppress(OSError, FaninError, ValueError):
        return x509.load_der_x509_certificate(served_chain(route)[0])
    return None


def _name_problem(route: Route, server: "x509.Certificate") -> str:
    from cryptography import x509

    names: list[str] = []
    with suppress(x509.ExtensionNotFound, ValueError):
        covered = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = sorted(str(name.value) for name in covered)
    host = route.target.host
    return (
        f"its certificate is for {', '.join(names) or 'no name'}, and not for {host}; connect by a name of the "
        f"certificate, or start the coordinator with this one: fanin serve --name {host}"
    )


def _clock_problem(certificates: "list[x509.Certificate]", now: datetime) -> str:
    """Return the problem with the first certificate that is not valid now; empty if all are valid."""
    for index, each in enumerate(certificates):
        begins, ends = each.not_valid_before_utc, each.not_valid_after_utc
        if not begins <= now <= ends:
            what = "the certificate of its authority (--ca)" if index else "its certificate"
            remedy = (
                "give --ca the coordinator's current tls/ca.pem"
                if index
                else "the coordinator did not renew it; its log has the cause"
            )
            return (
                f"{what} is valid from {begins:%Y-%m-%d %H:%M} to {ends:%Y-%m-%d %H:%M} UTC, but the clock of this "
                f"machine shows {now:%Y-%m-%d %H:%M} UTC; set the clock, or if it is right: {remedy}"
            )
    return ""


def _authority_problem(route: Route, server: "x509.Certificate", authorities: "list[x509.Certificate]") -> FaninError:
    from cryptography import x509

    trusted = ", ".join(
        _key_text(x509.SubjectKeyIdentifier.from_public_key(each.public_key()).digest) for each in authorities
    )
    issuer = "a key that it does not name"
    with suppress(x509.ExtensionNotFound, ValueError):
        named = server.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
        issuer = issuer if named is None else f"the key {_key_text(named)}"
    problem = f"its certificate is not by the authority of --ca: it is signed by {issuer}, expected {trusted}"
    if server.issuer in {each.subject for each in authorities}:
        # An authority of the same name: that of another coordinator.
        return Untrusted(
            f"{route.target}: {problem}; give --ca the tls/ca.pem of the folder of this very coordinator. If that is "
            f"the one, another program answers here{_suffix(route)}",
            code="FN-0814",
        )
    name = server.issuer.rfc4514_string()[:_MAX_ISSUER_CHARS]
    return Untrusted(
        f"{route.target}: {problem}. The issuer is {name!r}: a proxy or a firewall that inspects TLS may have replaced "
        f"the certificate. Ask its administrator to exempt {route.target} from the inspection. Or append the "
        "certificate of that authority to the file of --ca: whoever holds its key can then read and change all that "
        f"this machine exchanges with the coordinator, also its token{_suffix(route)}",
        code="FN-1481",
    )


def _key_text(key_id: bytes) -> str:
    """Return a key's id as ``openssl x509 -ext subjectKeyIdentifier`` prints it, cut."""
    return f"{key_id[:8].hex(':').upper()}:.."


def _no_coordinator(route: Route, problem: str) -> Untrusted:
    return Untrusted(
        f"{route.target}: the program there {problem}, so it is no coordinator; check the address and the "
        f"port{_suffix(route)}",
        code="FN-0815",
    )


def _broken(route: Route, reason: str) -> Unavailable:
    """The connection broke within TLS: the coordinator stops, has too many connections, or is not permitted."""
    return Unavailable(
        f"{route.target}: the connection ended before it was secure ({reason}); the coordinator starts or is "
        "overloaded, or a firewall or a proxy closes connections of TLS; try again later, and if it stays, "
        f"{_let_pass(route)}{_suffix(route)}",
        code="FN-0816",
    )


def _let_pass(route: Route) -> str:
    """Return what to ask the people who run the networks."""
    return (
        f"ask the administrators of the networks to let TCP port {route.target.port} of {route.target.host} pass, with "
        "TLS 1.2 or newer and HTTP/2 (ALPN h2), and without inspection"
    )


def _suffix(route: Route) -> str:
    return "" if route.proxy is None else f" (the connection goes through {route.proxy})"


def _other_proxy(proxy: Proxy, route: Route) -> str:
    return f"correct ${proxy.variable}, or to connect without a proxy set NO_PROXY={route.target.host}"
