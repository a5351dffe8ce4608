"""The coordinator's certificate is renewed while it serves. One that clients would refuse is refused at the start."""

import http.client
import logging
import os
import signal
import socket
import ssl
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from stories.test_page_rules import Browser
from support.processes import Running, Site, start
from support.scrape import page_url, scrape
from support.scrape import serve as scraped_serve

from fanin.clients.operator import Operator
from fanin.clients.transport import Connection
from fanin.server.access.authority import CA_DAYS, ServerIdentity, local_identity
from fanin.server.care.certificates import Certificates, local_certificates
from fanin.server.web.listener import tls_context

NOW = datetime.now(UTC)
DAYS = timedelta(days=1)
WAIT_S = 30.0


class Authority:
    """An authority of the user, with certificates for ``localhost`` and 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._folder = folder
        self.certificate = self._certificate("authority", self._key, NOW + 90 * DAYS, is_authority=True)
        (folder / "own-ca.pem").write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, *, ends: datetime = NOW + 60 * DAYS, names: tuple[str, ...] = ("localhost",)) -> int:
        """Write a certificate and its key, and return its serial number."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._certificate("leaf", key, ends, names=names)
        self.write(key, certificate)
        return certificate.serial_number

    def write(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate | None = None) -> None:
        """Write a key, and a certificate if there is one."""
        encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
        (self._folder / "own.key").write_bytes(key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain))
        if certificate is not None:
            (self._folder / "own.pem").write_bytes(certificate.public_bytes(encoding))

    def _certificate(
        self,
        name: str,
        key: ec.EllipticCurvePrivateKey,
        ends: datetime,
        *,
        is_authority: bool = False,
        names: tuple[str, ...] = (),
    ) -> x509.Certificate:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer = subject if is_authority else self.certificate.subject
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(NOW - 30 * DAYS)
        builder = builder.not_valid_after(ends)
        builder = builder.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        if names:
            alternatives = x509.SubjectAlternativeName([x509.DNSName(each) for each in names])
            builder = builder.add_extension(alternatives, critical=False)
        return builder.sign(self._key, hashes.SHA256())


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """An authority whose files are in ``tmp_path``."""
    return Authority(tmp_path)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Return a function that starts ``fanin serve`` with the certificate of the authority."""
    started: list[Running] = []

    def begin(*words: str) -> Running:
        own = ["--tls-cert", str(tmp_path / "own.pem"), "--tls-key", str(tmp_path / "own.key")]
        command = ["-m", "fanin.commands.main", "serve", "--state", str(tmp_path / "state"), "--listen", "localhost:0"]
        started.append(start([*command, *own, *words], tmp_path / "serve.log"))
        return started[-1]

    yield begin
    for running in started:
        running.kill()


def until(what: str, is_done: Callable[[], bool]) -> None:
    """Wait for a condition."""
    limit = time.monotonic() + WAIT_S
    while not is_done():
        assert time.monotonic() < limit, what
        time.sleep(0.05)


def serial(folder: Path, address: str = "") -> int:
    """Return the serial number of the certificate that a new connection to an address gets, by default of devices."""
    host, _, port = (address or (folder / "state" / "address").read_text().strip()).rpartition(":")
    context = ssl.create_default_context(cafile=str(folder / "own-ca.pem"))
    context.set_alpn_protocols(["http/1.1" if address else "h2"])
    with (
        socket.create_connection((host.strip("[]"), int(port)), timeout=5) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as line,
    ):
        data = line.getpeercert(binary_form=True)
    assert data is not None
    return x509.load_der_x509_certificate(data).serial_number


def test_a_new_certificate_is_served_after_sighup_and_open_connections_live_on(
    tmp_path: Path, authority: Authority, serve: Callable[..., Running]
) -> None:
    first = authority.issue()
    running = serve("--name", "localhost")
    until(running.text(), (tmp_path / "state" / "address").exists)
    port = (tmp_path / "state" / "address").read_text().strip().rpartition(":")[2]
    token = (tmp_path / "state" / "tokens" / "operator.token").read_text().strip()
    line = Connection(f"localhost:{port}", (tmp_path / "own-ca.pem").read_bytes())
    try:
        operator = Operator(line, token)
        assert operator.runs() == ()
        assert serial(tmp_path) == first
        second = authority.issue()
        os.kill(running.process.pid, signal.SIGHUP)
        until("the new certificate is not served", lambda: serial(tmp_path) == second)
        assert operator.runs() == ()
        # A renewal that is half done changes nothing.
        authority.write(ec.generate_private_key(ec.SECP256R1()))
        os.kill(running.process.pid, signal.SIGHUP)
        until("the mistake is not logged", lambda: "FN-1446" in running.text())
        assert serial(tmp_path) == second
        assert operator.runs() == ()
    finally:
        line.close()


def test_the_page_serves_a_new_certificate_and_open_streams_live_on(
    tmp_path: Path, authority: Authority, serve: Callable[..., Running]
) -> None:
    first = authority.issue()
    running = serve("--name", "localhost", "--web", "0.0.0.0:0")
    until("no page", lambda: "page for browsers" in running.text())
    address = running.text().partition("https://")[2].partition("/")[0]
    assert serial(tmp_path, address) == first
    context = ssl.create_default_context(cafile=str(tmp_path / "own-ca.pem"))
    line = http.client.HTTPSConnection("localhost", int(address.rpartition(":")[2]), timeout=10, context=context)
    line.request("GET", "/healthz")
    assert line.getresponse().read() == b"alive\n"
    second = authority.issue()
    os.kill(running.process.pid, signal.SIGHUP)
    until("the page does not serve the new certificate", lambda: serial(tmp_path, address) == second)
    assert serial(tmp_path) == second
    # A key of another certificate changes nothing.
    authority.write(ec.generate_private_key(ec.SECP256R1()))
    os.kill(running.process.pid, signal.SIGHUP)
    until("the mistake is not logged", lambda: "FN-1446" in running.text())
    assert serial(tmp_path, address) == second
    # The connection from before the renewal lives on, and no key was left behind.
    line.request("GET", "/healthz")
    assert line.getresponse().read() == b"alive\n"

    def alarms() -> str:
        line.request("GET", "/readyz")
        return line.getresponse().read().decode()

    def metric(token: str) -> bool:
        line.request("GET", "/metrics", headers={"authorization": f"Bearer {token}"})
        return b"fanin_certificate_renewal_failed 1.0\n" in line.getresponse().read()

    token = (tmp_path / "state" / "tokens" / "operator.token").read_text().strip()
    assert "The renewal of the certificate failed" in alarms() and str(tmp_path) not in alarms()
    assert metric(token)
    # A renewal that is due, but not late, raises no alarm.
    third = authority.issue(ends=NOW + 29.5 * DAYS)
    os.kill(running.process.pid, signal.SIGHUP)
    until("no new certificate", lambda: serial(tmp_path, address) == third)
    assert alarms() == "ready\n" and not metric(token)
    fourth = authority.issue(ends=NOW + 28.5 * DAYS)
    os.kill(running.process.pid, signal.SIGHUP)
    until("no new certificate", lambda: serial(tmp_path, address) == fourth)
    assert "The certificate of leaf ends on" in alarms()
    line.close()
    assert [path.name for path in (tmp_path / "state").glob("page-*")] == []
    browser = Browser("localhost", int(address.rpartition(":")[2]), context=context)
    browser.login(token)
    settings = browser.get("/settings").text
    assert ">leaf</th>" in settings and "Used by this coordinator" in settings


def handshake(server: ssl.SSLContext, ca: bytes) -> int:
    """Return the serial number of the certificate that a handshake in memory gets."""
    client = ssl.create_default_context(cadata=ca.decode())
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname="localhost"),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for end in (*ends, *ends, *ends):
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    data = ends[0].getpeercert(binary_form=True)
    assert data is not None
    return x509.load_der_x509_certificate(data).serial_number


def test_the_page_follows_the_certificate_of_the_local_authority(tmp_path: Path) -> None:
    time_now = [NOW]
    certificates = local_certificates(tmp_path / "tls", frozenset({"localhost"}), lambda: time_now[0])
    context = tls_context(lambda: certificates.current, tmp_path)
    first = handshake(context, certificates.current.ca_certificate)
    assert handshake(context, certificates.current.ca_certificate) == first
    (tmp_path / "tls" / "server.pem").unlink()
    certificates.renew()
    assert handshake(context, certificates.current.ca_certificate) != first


@pytest.mark.parametrize("code", ["FN-1446", "FN-1447", "FN-1448"])
def test_a_certificate_that_clients_would_refuse_is_refused_at_the_start(
    tmp_path: Path, authority: Authority, serve: Callable[..., Running], code: str
) -> None:
    authority.issue(ends=NOW - DAYS if code == "FN-1447" else NOW + DAYS)
    if code == "FN-1446":
        authority.write(ec.generate_private_key(ec.SECP256R1()))
    running = serve("--name", "other.example" if code == "FN-1448" else "localhost")
    assert running.wait(WAIT_S) != 0
    assert f"[{code}]" in running.text()
    assert not (tmp_path / "state" / "fanin.db").exists()


def test_the_certificate_of_the_local_authority_is_issued_again_before_its_end(tmp_path: Path) -> None:
    time_now = [NOW]
    certificates = local_certificates(tmp_path, frozenset({"localhost"}), lambda: time_now[0])
    before = certificates.current
    time_now[0] = NOW + 300 * DAYS
    certificates.renew()
    assert certificates.current is before
    time_now[0] = NOW + 370 * DAYS
    certificates.renew()
    assert certificates.current.certificate != before.certificate
    assert certificates.ends()[0].ends_at > NOW + 700 * DAYS
    assert not certificates.is_renewal_failed
    (tmp_path / "ca.key").unlink()
    certificates.renew()
    assert certificates.is_renewal_failed and not certificates.ending()
    time_now[0] = certificates.ends()[0].ends_at - 28 * DAYS
    assert len(certificates.ending()) == 1


def test_a_local_authority_that_ends_is_named_and_replaced_without_a_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names, time_now = frozenset({"localhost"}), [NOW - (CA_DAYS - 20) * DAYS]
    certificates = local_certificates(tmp_path / "tls", names, lambda: time_now[0])
    old = certificates.current.ca_certificate
    end = certificates.ends()[-1].ends_at
    counts = []
    with caplog.at_level(logging.WARNING):
        # The last certificate that it issues ends with it: it is not issued again each hour.
        for ago in (1.5 * DAYS, 1.5 * DAYS - timedelta(hours=1), timedelta()):
            time_now[0] = NOW - ago
            certificates.renew()
            certificates.warn()
            counts.append(len(caplog.records))
    assert counts == [2, 2, 3]
    assert "issued by the same authority" in caplog.messages[0]
    assert all("the local authority ends in" in text and "tls/ca.pem" in text for text in caplog.messages[1:])
    assert [each.name for each in certificates.ending()] == ["CN=fanin local authority"]
    assert handshake(tls_context(lambda: certificates.current, tmp_path), old)

    (tmp_path / "tls" / "ca.pem").unlink()
    certificates.renew()
    assert certificates.ending() == ()
    assert certificates.ends()[0].ends_at > end
    context = tls_context(lambda: certificates.current, tmp_path)
    assert handshake(context, old) == handshake(context, certificates.current.ca_certificate)


def test_the_page_and_the_metrics_name_a_local_authority_that_ends(tmp_path: Path) -> None:
    identity = local_identity(tmp_path / "state" / "tls", ("localhost", "127.0.0.1"), NOW - (CA_DAYS - 20) * DAYS)
    running = scraped_serve(site := Site(tmp_path))
    try:
        with urllib.request.urlopen(f"{page_url(running)}readyz", timeout=WAIT_S) as reply:
            alarms = reply.read().decode().splitlines()[1:]
        (alarm,) = [text for text in alarms if "disk" not in text]
        assert alarm.startswith(f"The local authority ends on {NOW + 20 * DAYS:%Y-%m-%d}.") and "tls/ca.pem" in alarm
        ends = scrape(page_url(running)).value("fanin_certificate_not_after_timestamp_seconds", role="authority")
        assert abs(ends - (NOW + 20 * DAYS).timestamp()) < 2
        assert (tmp_path / "state" / "tls" / "ca.pem").read_bytes() == identity.ca_certificate
        assert "the local authority ends in 19 days" in running.text()
    finally:
        site.close()


def test_a_warning_comes_once_a_day_after_the_renewal_was_due(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    identity: ServerIdentity = local_identity(tmp_path, frozenset({"localhost"}), NOW)
    # The renewal of the local authority is due 367 days after the issue.
    time_now = [NOW + 367.5 * DAYS]
    certificates = Certificates(lambda _: identity, lambda: time_now[0])
    with caplog.at_level(logging.WARNING, "fanin.server.care.certificates"):
        counts = []
        for passed in (timedelta(), 0.6 * DAYS, timedelta(hours=12), timedelta(hours=12)):
            time_now[0] += passed
            certificates.warn()
            counts.append(len(caplog.records))
    assert counts == [0, 1, 1, 2]
