"""A device that cannot connect: its log, ``fanin status`` and ``fanin doctor`` name one cause by one code.

The device is a process over real TLS. Its folder keeps the cause after its end.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from support import doors
from support.commands import Fanin, fanin_in_process
from support.hosted import Hosted
from support.joining import WAIT_S, Device, device_of, unused_port

from fanin.clients.pins import fingerprints_of
from fanin.clients.route import EXCEPTIONS, PROXIES
from fanin.server.access.authority import ServerIdentity, local_identity

LASTING = ("FN-0814", "FN-1481", "FN-0670", "FN-1498")
"""The causes with which a device ends."""
PIN = "--ca-fingerprint"
NAMES = ("localhost", "127.0.0.1")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*PROXIES, *EXCEPTIONS, "FANIN_DEVICE_TOKEN", "FANIN_OPERATOR_TOKEN", "GRPC_VERBOSITY"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """A coordinator, whose certificate is also for a name that does not resolve."""
    host = Hosted(tmp_path_factory.mktemp("host"), names=(*NAMES, "coordinator.test")).start()
    yield host
    host.stop()


@pytest.fixture
def device(tmp_path: Path, host: Hosted) -> Device:
    """A device of the coordinator."""
    return device_of(tmp_path, host)


def check_cause(
    fanin: Fanin, device: Device, server: str, code: str, check: str, environment: Mapping[str, str] | None = None
) -> str:
    """Check that log, status and doctor name the cause by this code. Return the doctor's text of the failed check."""
    with device.joining(server, environment) as running:
        device.await_link(running, is_connected=False)
        cause = re.compile(rf"^.*{re.escape(server)}.*\[{code}\]$", re.MULTILINE)
        until = time.monotonic() + WAIT_S
        while not cause.search(running.text()):
            assert time.monotonic() < until, running.text()
            time.sleep(0.05)
        lasts = code in LASTING
        if lasts:
            assert running.wait(WAIT_S) == 1
        log = running.text()
    # The cause of a device that ends is printed once. A device that tries again logs each try.
    assert len(cause.findall(log)) == 1 or not lasts, log
    assert log.count(f"{server}: ") == 1 or not lasts, log
    status = fanin("status", "--state", device.state, "--json")
    assert status.status == 3
    document = json.loads(status.out)
    assert (document["state"], document["link"]["is_connected"], document["link"]["code"]) == ("stopped", False, code)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in (environment or {}).items():
            monkeypatch.setenv(name, value)
        outcome = fanin("doctor", "--state", device.state, "--json")
    assert outcome.status == 1, outcome
    failed = [each for each in json.loads(outcome.out)["findings"] if each["level"] == "fail"]
    assert [(each["check"], each["code"]) for each in failed] == [(check, code)], failed
    assert failed[0]["fix"]
    text: str = failed[0]["text"] + failed[0]["fix"]
    return text


def identity(folder: Path, names: tuple[str, ...] = NAMES, late: timedelta = timedelta()) -> ServerIdentity:
    """Return the identity of another coordinator, or of one with another clock."""
    return local_identity(folder / "tls", names, datetime.now(UTC) - late)


def corporate(names: tuple[str, ...]) -> ServerIdentity:
    """Return an identity for the coordinator's names by the authority of a proxy."""
    now, hour = datetime.now(UTC), timedelta(hours=1)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Example Inspection CA")])
    blank = x509.CertificateBuilder().issuer_name(issuer).not_valid_before(now - hour).not_valid_after(now + hour)
    ca = (
        blank.subject_name(issuer)
        .public_key(ca_key.public_key())
        .serial_number(1)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    certificate = (
        blank.subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])]))
        .public_key(key.public_key())
        .serial_number(2)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return ServerIdentity(
        key=key.private_bytes(pem, *form),
        certificate=certificate.public_bytes(pem),
        ca_certificate=ca.public_bytes(pem),
    )


def test_a_closed_port(fanin: Fanin, device: Device) -> None:
    port = unused_port()
    text = check_cause(fanin, device, f"127.0.0.1:{port}", "FN-0811", "port")
    assert "no program listens" in text and "fanin serve" in text


def test_a_name_that_does_not_resolve(fanin: Fanin, device: Device) -> None:
    assert "does not resolve" in check_cause(fanin, device, "nowhere.invalid:7443", "FN-0811", "name")


def test_a_certificate_for_another_name(fanin: Fanin, device: Device, tmp_path: Path) -> None:
    other = identity(tmp_path, ("a.example",))
    (tmp_path / "ca.pem").write_bytes(other.ca_certificate)
    with doors.tls(other, tmp_path) as address:
        assert "fanin serve --name 127.0.0.1" in check_cause(fanin, device, address, "FN-0814", "tls")


def test_another_authority(fanin: Fanin, device: Device, tmp_path: Path) -> None:
    with doors.tls(identity(tmp_path), tmp_path) as address:
        assert "give --ca the tls/ca.pem" in check_cause(fanin, device, address, "FN-0814", "tls")


def test_a_clock_that_is_wrong(fanin: Fanin, device: Device, tmp_path: Path) -> None:
    late = identity(tmp_path, late=timedelta(days=-500))
    (tmp_path / "ca.pem").write_bytes(late.ca_certificate)
    with doors.tls(late, tmp_path) as address:
        assert "set the clock" in check_cause(fanin, device, address, "FN-0814", "tls")


def test_a_proxy_that_is_down(fanin: Fanin, device: Device) -> None:
    proxy = f"127.0.0.1:{unused_port()}"
    # The address of the proxy is loopback, that of the coordinator is not.
    with device.joining("coordinator.test:7443", {"https_proxy": f"http://{proxy}"}) as running:
        device.await_link(running, is_connected=False)
        assert f"the proxy {proxy} of $https_proxy: cannot be reached" in running.text()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("https_proxy", f"http://{proxy}")
        outcome = fanin("doctor", "--state", device.state)
    assert outcome.status == 1
    assert f"the proxy {proxy} of $https_proxy answers, but no program listens" in outcome.out
    assert "export NO_PROXY=coordinator.test" in outcome.out


def test_a_proxy_that_inspects_tls_is_named_with_two_ways_out(
    fanin: Fanin, device: Device, host: Hosted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = corporate(("coordinator.test",))
    server = f"coordinator.test:{host.port}"
    with doors.inspecting(host.address, theirs, host.ca, tmp_path) as proxy:
        environment = {"https_proxy": f"http://{proxy}"}
        text = check_cause(fanin, device, server, "FN-1481", "tls", environment)
        assert "Example Inspection CA" in text and "exempt" in text and "append" in text and "its token" in text
        # The second way out: the inspecting authority beside that of the coordinator.
        (tmp_path / "ca.pem").write_bytes(host.ca + theirs.ca_certificate)
        with device.joining(server, environment) as running:
            device.await_link(running, is_connected=True)
        monkeypatch.setenv("https_proxy", f"http://{proxy}")
        # The doctor knows the own authority by its place in the file, or by the fingerprint of the join line.
        (own,) = fingerprints_of(host.ca)
        for order, more in ((host.ca + theirs.ca_certificate, ()), (theirs.ca_certificate + host.ca, (PIN, own))):
            (tmp_path / "ca.pem").write_bytes(order)
            outcome = fanin("doctor", "--state", device.state, *more, "--json")
            (tls,) = (each for each in json.loads(outcome.out)["findings"] if each["check"] == "tls")
            assert (tls["level"], tls["code"]) == ("warn", "FN-1511"), tls
            assert (
                "Example Inspection CA" in tls["text"]
                and f"not by the coordinator's own authority ({own})" in tls["text"]
            )
            assert f"exempt {server}" in tls["fix"]
            levels = {each["check"]: each["level"] for each in json.loads(outcome.out)["findings"]}
            assert levels["device"] == "ok", "the checks of the calls follow"
    monkeypatch.delenv("https_proxy")
    direct = fanin("doctor", "--state", device.state, "--server", host.address, PIN, own, "--json")
    assert [each["level"] for each in json.loads(direct.out)["findings"] if each["check"] == "tls"] == ["ok"]


def test_a_token_that_the_coordinator_does_not_know(fanin: Fanin, device: Device, host: Hosted) -> None:
    (device.folder / "token").write_text("wrong")
    text = check_cause(fanin, device, host.address, "FN-0670", "token")
    assert "no token with this secret" in text


@pytest.mark.parametrize(("listen", "other"), [("127.0.0.1", "[::1]"), ("[::1]", "127.0.0.1")])
def test_a_coordinator_that_listens_on_the_other_family(fanin: Fanin, tmp_path: Path, listen: str, other: str) -> None:
    host = Hosted(tmp_path / "host", names=(*NAMES, "::1"), listen=listen).start()
    try:
        device = device_of(tmp_path, host)
        server = f"{other}:{host.port}"
        text = check_cause(fanin, device, server, "FN-1498", "port")
        assert f"{listen}:{host.port}" in text
        outcome = fanin("runs", "--server", server, "--ca", tmp_path / "ca.pem", "--token-file", tmp_path / "token")
        assert outcome.status == 1 and "[FN-1498]" in outcome.err
    finally:
        host.stop()


def test_the_doctor_uses_no_token_up_and_knows_the_device(fanin: Fanin, device: Device, host: Hosted) -> None:
    with device.joining(host.address) as running:
        device.await_link(running, is_connected=True)
        assert fanin("status", "--state", device.state).status == 0
        outcome = fanin("doctor", "--state", device.state, "--json")
    assert outcome.status == 0, outcome
    levels = {each["check"]: each["level"] for each in json.loads(outcome.out)["findings"]}
    checks = ("process", "tls", "clock", "protocol", "token", "device")
    assert {name: levels[name] for name in checks} == dict.fromkeys(checks, "ok")
    # An enrolled device needs no token, and without its file the doctor has nothing to complain about.
    (device.folder / "token").unlink()
    with device.joining(host.address) as running:
        device.await_link(running, is_connected=True)
        assert fanin("doctor", "--state", device.state).status == 0
    # The process was killed: the file says connected, the lock says stopped.
    outcome = fanin("status", "--state", device.state)
    assert outcome.status == 3 and "it was killed, or the machine lost power" in outcome.out


def test_a_device_trusts_an_authority_by_its_fingerprint(fanin: Fanin, device: Device, host: Hosted) -> None:
    digest = local_identity(host.state / "tls", host.names, datetime.now(UTC)).fingerprint
    wrong = "0" * 64
    with device.joining(host.address, None, "--ca-fingerprint", wrong) as running:
        assert running.wait(WAIT_S) == 1
        assert re.search(rf"received {digest}, expected {wrong}.*\[FN-1480\]$", running.text(), re.MULTILINE)
    assert not (device.state / "ca.pem").exists()
    colons = ":".join(digest[index : index + 2] for index in range(0, 64, 2)).upper()
    with device.joining(host.address, None, "--ca-fingerprint", colons) as running:
        device.await_link(running, is_connected=True)
    assert (device.state / "ca.pem").read_bytes().strip() == host.ca.strip()
    with device.joining(host.address, None, "--ca-fingerprint", wrong) as running:
        assert running.wait(WAIT_S) == 1
        assert "[FN-1483]" in running.text()
    assert fanin("join", "--server", host.address, "--ca-fingerprint", "ab", "--publisher", "x").status == 2
