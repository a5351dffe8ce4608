"""A client that does not reach a coordinator: one error for each cause, with the command that corrects it.

Operators and devices enter by their commands, as real processes. Permanent causes end both at once.
"""

import re
import socket
import subprocess
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from ssl import TLSVersion

import numpy as np
import pytest
from support import doors
from support.commands import fanin_in_process, uncoded, usage_line
from support.hosted import Hosted
from support.nightly import in_ci
from support.processes import start

from fanin.clients import Operator
from fanin.clients.route import EXCEPTIONS, PROXIES
from fanin.edge.bundles.keys import SigningKey
from fanin.protos.errors import InvalidInput, Unavailable, Untrusted
from fanin.server.access.authority import ServerIdentity, local_identity

NAMES = ("localhost", "127.0.0.1")
OWN_NAMES = ((), ("--name", "coordinator.example.org", "--name", "127.0.0.2"))
LISTENED = (("0.0.0.0:0", "127.0.0.1:"), ("[::]:0", "[::1]:"), ("[::1]:0", "[::1]:"), ("localhost:0", "localhost:"))
COMMAND_S = 60.0
LISTEN_ONLY = ", which is no address to connect to, expected that of the coordinator's machine; on that machine itself:"
VARIABLES = (*PROXIES, *EXCEPTIONS, "HTTP_PROXY", "all_proxy", "FANIN_OPERATOR_TOKEN", "FANIN_DEVICE_TOKEN")


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """A coordinator in this process, whose certificate is also for a name that does not resolve."""
    host = Hosted(tmp_path_factory.mktemp("host"), names=(*NAMES, "coordinator.test")).start()
    yield host
    host.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, host: Hosted) -> Path:
    """The files of an operator and of a device."""
    folder = tmp_path_factory.mktemp("client")
    (folder / "ca.pem").write_bytes(host.ca)
    (folder / "operator.token").write_text(host.operator_token)
    (folder / "device.token").write_text(host.device_token)
    (folder / "publisher.pub").write_text(SigningKey.generate().public)
    rng = np.random.default_rng(0)
    np.savez(folder / "data.npz", x=rng.random((20, 4), np.float32), y=rng.integers(0, 3, 20))
    return folder


def identity(folder: Path, names: tuple[str, ...] = NAMES, late: timedelta = timedelta()) -> ServerIdentity:
    """Return the identity that a coordinator with a wrong clock creates: late by this time, or early."""
    return local_identity(folder / "tls", names, datetime.now(UTC) - late)


@pytest.fixture(autouse=True)
def default_verbosity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that other tests ran in this process, and flwr, set a verbosity of gRPC that children would inherit."""
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)


def fanin(*words: object, environment: Mapping[str, str] | None = None, folder: Path) -> tuple[int, str]:
    """Run a command as a process. Return its exit status and its output."""
    code = "import sys\nfrom fanin.commands.main import main\nsys.exit(main(sys.argv[1:]))"
    running = start(["-c", code, *map(str, words)], folder / f"{words[0]}.log", environment)
    status = running.wait(COMMAND_S)
    text = uncoded(running.text())
    running.log.unlink()
    return status, text


def operator_options(folder: Path, server: str) -> list[object]:
    """Return the options of an operator's command."""
    return ["--server", server, "--ca", folder / "ca.pem", "--token-file", folder / "operator.token"]


def device_options(folder: Path, server: str) -> list[object]:
    """Return the options of a device."""
    files = {"ca": "ca.pem", "publisher": "publisher.pub", "token-file": "device.token", "data": "data.npz"}
    options = [word for name, file in files.items() for word in (f"--{name}", folder / file)]
    return ["--server", server, *options, "--state", folder / "device"]


def runs(folder: Path, server: str, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """List the Runs of a coordinator."""
    return fanin("runs", *operator_options(folder, server), environment=environment, folder=folder)


def joined(folder: Path, server: str) -> tuple[int, str]:
    """Take part as a device, which must end by itself."""
    return fanin("join", *device_options(folder, server), folder=folder)


def check_both(folder: Path, server: str, text: str) -> None:
    """Check that a permanent cause ends an operator's command and a device, each with one line."""
    status, out = runs(folder, server)
    assert (status, out.count("\n")) == (1, 1), out
    assert re.fullmatch(rf"fanin runs: {text}\n", out), out
    status, out = joined(folder, server)
    assert status == 1, out
    assert re.search(rf"^fanin join: {text}$", out, re.MULTILINE), out
    assert out.count(": enroll: ") <= 1, out


# Addresses to listen on.


@pytest.mark.parametrize("pair", in_ci(LISTENED, LISTENED[:2]))
@pytest.mark.parametrize("names", in_ci(OWN_NAMES, OWN_NAMES[1:]))
def test_operators_of_the_same_machine_reach_a_coordinator_on_any_address(
    tmp_path: Path, pair: tuple[str, str], names: tuple[str, ...]
) -> None:
    listen, address = pair
    words = ["serve", "--state", str(tmp_path / "state"), "--listen", listen, *names]
    code = f"import sys\nfrom fanin.commands.main import main\nsys.exit(main({words!r}))"
    serving = start(["-c", code], tmp_path / "serve.log")
    try:
        while "serving on" not in serving.text():
            assert serving.process.poll() is None, serving.text()
        assert serving.text().partition("serving on ")[2].startswith(listen[:-1])
        assert (tmp_path / "state" / "address").read_text().startswith(address)
        assert fanin("runs", "--state", tmp_path / "state", folder=tmp_path) == (
            0,
            "no runs yet; start one with: fanin run PLAN.toml\n",
        )
    finally:
        serving.kill()


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ("::1:7443", "'::1:7443', expected HOST:PORT, for example [::1]:7443"),
        ("::1", "'::1', expected HOST:PORT, for example [::1]:7443"),
        ("fe80::1:2:7443", "'fe80::1:2:7443', expected HOST:PORT, for example [fe80::1:2]:7443"),
        ("[::1]", "'[::1]', expected HOST:PORT, for example [::1]:7443"),
        ("https://a.example:7443", "'https://a.example:7443', expected HOST:PORT, for example a.example:7443"),
        ("https://a.example/x", "'https://a.example/x', expected HOST:PORT, for example a.example:7443"),
        ("dns:///a.example:1", "'dns:///a.example:1', expected HOST:PORT, for example 127.0.0.1:7443"),
        ("a.example", "'a.example', expected HOST:PORT, for example a.example:7443"),
        ("a.example:", "'a.example:', expected HOST:PORT, for example a.example:7443"),
        ("a.example:99999", "'a.example:99999', expected HOST:PORT, for example a.example:7443"),
        ("a..b:1", "'a..b:1', expected HOST:PORT, for example 127.0.0.1:7443"),
        ("a b:1", "'a b:1', expected HOST:PORT, for example 127.0.0.1:7443"),
        ("a,b:1", "'a,b:1', expected HOST:PORT, for example 127.0.0.1:7443"),
        (
            "0.0.0.0:7443",
            f"'0.0.0.0:7443'{LISTEN_ONLY} 127.0.0.1:7443",
        ),
        (
            "[::]:7443",
            f"'[::]:7443'{LISTEN_ONLY} [::1]:7443",
        ),
        ("a.example:0", "'a.example:0' with port 0, expected the port that the coordinator printed"),
    ],
)
def test_an_ambiguous_address_is_refused_with_the_right_form(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, server: str, reason: str
) -> None:
    fanin, line = fanin_in_process(capsys, monkeypatch), f"--server: got {reason}"
    assert usage_line(fanin("runs", *operator_options(folder, server)), "runs") == line
    assert usage_line(fanin("join", *device_options(folder, server)), "join") == line
    ca = (folder / "ca.pem").read_bytes()
    with pytest.raises(InvalidInput) as excinfo, Operator.connect(server, ca, "token"):
        pass
    assert str(excinfo.value) == line.removeprefix("--")
    if " no address to " not in line and "port 0" not in line:
        outcome = fanin("serve", "--state", folder / "none", "--listen", server)
        assert usage_line(outcome, "serve") == line.replace("--server", "listen", 1)


# Certificates.


def test_a_certificate_for_another_name(folder: Path, tmp_path: Path, host: Hosted) -> None:
    with doors.proxy(host.address) as (proxy, _):
        # Only the name is wrong: the route leads to the coordinator.
        status, out = runs(folder, f"other.test:{host.port}", {"https_proxy": f"http://{proxy}"})
    assert status == 1
    assert out == (
        f"fanin runs: other.test:{host.port}: its certificate is for 127.0.0.1, coordinator.test, localhost, and not "
        "for other.test; connect by a name of the certificate, or start the coordinator with this one: fanin serve "
        f"--name other.test (the connection goes through the proxy {proxy} of $https_proxy)\n"
    )
    with doors.tls(identity(tmp_path, ("a.example", "10.0.0.1")), tmp_path) as address:
        operator = replace_ca(folder, tmp_path)
        check_both(
            operator,
            address,
            rf"{address}: its certificate is for 10\.0\.0\.1, a\.example, and not for 127\.0\.0\.1; connect by a name "
            r"of the certificate, or start the coordinator with this one: fanin serve --name 127\.0\.0\.1",
        )


def replace_ca(folder: Path, tmp_path: Path) -> Path:
    """Return a copy of a client's folder that trusts the authority in ``tmp_path``."""
    copy = tmp_path / "client"
    copy.mkdir()
    for path in folder.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    (copy / "ca.pem").write_bytes((tmp_path / "tls" / "ca.pem").read_bytes())
    return copy


TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d"


@pytest.mark.parametrize("late", [timedelta(days=-1), timedelta(days=400)], ids=["clock behind", "clock ahead"])
def test_a_certificate_that_the_clock_does_not_allow(folder: Path, tmp_path: Path, late: timedelta) -> None:
    with doors.tls(identity(tmp_path, late=late), tmp_path) as address:
        check_both(
            replace_ca(folder, tmp_path),
            address,
            rf"{address}: its certificate is valid from {TIME} to {TIME} UTC, but the clock of this machine shows "
            rf"{TIME} UTC; set the clock, or if it is right: the coordinator did not renew it; its log has the cause",
        )


def test_an_authority_that_is_no_longer_valid(folder: Path, tmp_path: Path) -> None:
    early = identity(tmp_path, late=timedelta(days=3700))
    with doors.tls(early, tmp_path) as address:
        # The same key has issued the server a certificate that is valid now.
        (tmp_path / "tls" / "ca.pem").rename(tmp_path / "old.pem")
        (tmp_path / "tls" / "server.pem").unlink()
        current = identity(tmp_path)
        (tmp_path / "tls" / "ca.pem").write_bytes((tmp_path / "old.pem").read_bytes())
    with doors.tls(current, tmp_path) as address:
        check_both(
            replace_ca(folder, tmp_path),
            address,
            rf"{address}: the certificate of its authority \(--ca\) is valid from {TIME} to {TIME} UTC, but the clock "
            rf"of this machine shows {TIME} UTC; set the clock, or if it is right: give --ca the coordinator's current "
            r"tls/ca\.pem",
        )


def test_a_certificate_by_another_authority(folder: Path, tmp_path: Path) -> None:
    def key_of(path: Path) -> str:
        words = ("openssl", "x509", "-in", path, "-noout", "-ext", "subjectKeyIdentifier")
        text = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[-1].strip()
        return text[: 8 * 3]

    other = identity(tmp_path)
    signer, expected = key_of(tmp_path / "tls" / "ca.pem"), key_of(folder / "ca.pem")
    with doors.tls(other, tmp_path) as address:
        check_both(
            folder,
            address,
            rf"{address}: its certificate is not by the authority of --ca: it is signed by the key {signer}\.\., "
            rf"expected {expected}\.\.; give --ca the tls/ca\.pem of the folder of this very coordinator\. If that is "
            "the one, another program answers here",
        )


# Other programs.

NOT_OURS = r"so it is no coordinator; check the address and the port"


def test_a_program_without_tls(folder: Path) -> None:
    with doors.listening(doors.in_clear) as address:
        check_both(folder, address, f"{address}: the program there does not speak TLS, {NOT_OURS}")
    with doors.grpc_in_clear() as address:
        check_both(folder, address, f"{address}: the program there does not speak TLS, {NOT_OURS}")


def test_a_program_with_an_old_version_of_tls(folder: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # ssl warns that TLS 1.1 is obsolete, and it is.
        warnings.filterwarnings("ignore", "ssl.TLSVersion.TLSv1_1 is deprecated", DeprecationWarning)
        address = stack.enter_context(doors.tls(identity(tmp_path), tmp_path, newest=TLSVersion.TLSv1_1))
        text = f"{address}: the program there speaks no TLS version or cipher of this client, expected TLS 1.2 or newer"
        check_both(replace_ca(folder, tmp_path), address, f"{text}, {NOT_OURS}")


@pytest.mark.parametrize("protocols", [(), ("http/1.1",)], ids=["none", "HTTP/1.1"])
def test_a_web_server_with_tls(folder: Path, tmp_path: Path, protocols: tuple[str, ...]) -> None:
    with doors.tls(identity(tmp_path), tmp_path, protocols) as address:
        text = f"{address}: the program there speaks TLS, but not HTTP/2, {NOT_OURS}"
        check_both(replace_ca(folder, tmp_path), address, text)


# Causes that may pass.


def unused_address() -> str:
    """Return an address of this machine on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_a_port_without_a_program(folder: Path) -> None:
    address = unused_address()
    text = f"fanin runs: {address}: cannot be reached (Connection refused); is the coordinator running there?\n"
    assert runs(folder, address) == (1, text)


def test_a_coordinator_that_ends_connections_may_be_tried_again(host: Hosted) -> None:
    with (
        doors.listening(doors.hanging_up) as address,
        Operator.connect(address, host.ca, "token") as operator,
        pytest.raises(Unavailable, match=f"{address}: the connection ended before it was secure ") as excinfo,
    ):
        operator.runs()
    assert type(excinfo.value) is Unavailable


# Proxies.


def test_a_loopback_address_is_reached_without_a_proxy(folder: Path, host: Hosted) -> None:
    proxy = {name: f"http://{unused_address()}" for name in (*PROXIES, "HTTP_PROXY", "all_proxy")}
    for name in ("127.0.0.1", "localhost"):
        status, out = runs(folder, f"{name}:{host.port}", proxy)
        assert (status, out) == (0, "no runs yet; start one with: fanin run PLAN.toml\n")


@pytest.mark.parametrize("variable", PROXIES)
def test_a_proxy_of_the_environment_carries_the_connection(folder: Path, host: Hosted, variable: str) -> None:
    with doors.proxy(host.address) as (proxy, requests):
        environment = {variable: f"http://user:p%40ss@{proxy}"}
        status, out = runs(folder, f"coordinator.test:{host.port}", environment)
    assert (status, out) == (0, "no runs yet; start one with: fanin run PLAN.toml\n")
    assert requests and all(f"CONNECT coordinator.test:{host.port} HTTP/1.1" in request for request in requests)
    assert all("Proxy-Authorization: Basic dXNlcjpwQHNz" in request for request in requests)


@pytest.mark.parametrize("variable", PROXIES)
def test_a_proxy_that_cannot_be_reached_is_named(folder: Path, variable: str) -> None:
    proxy = unused_address()
    text = (
        f"fanin runs: coordinator.test:7443: the proxy {proxy} of ${variable}: cannot be reached (Connection refused); "
        f"correct ${variable}, or to connect without a proxy set NO_PROXY=coordinator.test\n"
    )
    assert runs(folder, "coordinator.test:7443", {variable: f"http://user:secret@{proxy}"}) == (1, text)


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (
            b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n",
            "does not connect to it (HTTP 407 Proxy Authentication Required); it expects a user and a password: https_",
        ),
        (
            b"HTTP/1.1 403 Forbidden\r\n\r\n",
            "does not connect to it (HTTP 403 Forbidden); its rules forbid this connection: let its administrator ",
        ),
        (
            b"HTTP/1.1 502 Bad Gateway\r\n\r\n",
            "does not connect to it (HTTP 502 Bad Gateway); is the coordinator running, and may the proxy reach it? ",
        ),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "is no HTTP proxy; correct $https_proxy, or to connect without a proxy set "),
    ],
    ids=["407", "403", "502", "SSH"],
)
def test_a_proxy_that_refuses_is_named(folder: Path, host: Hosted, reply: bytes, text: str) -> None:
    with doors.proxy(host.address, reply) as (proxy, _):
        status, out = runs(folder, "coordinator.test:7443", {"https_proxy": f"http://{proxy}"})
    assert (status, out.count("\n")) == (1, 1), out
    assert out.startswith(f"fanin runs: coordinator.test:7443: the proxy {proxy} of $https_proxy {text}"), out


def test_a_wrong_authority_behind_a_proxy_names_the_proxy(tmp_path: Path, host: Hosted) -> None:
    foreign = identity(tmp_path).ca_certificate
    with doors.proxy(host.address) as (proxy, _), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("https_proxy", f"http://{proxy}")
        with (
            Operator.connect(f"coordinator.test:{host.port}", foreign, "token") as operator,
            pytest.raises(
                Untrusted, match=rf"not by the authority of --ca.*through the proxy {proxy} of \$https_proxy"
            ),
        ):
            operator.runs()


@pytest.mark.parametrize("value", ["socks5://user:secret@proxy.test:1080", "https://proxy.test:1", "proxy.test"])
def test_a_proxy_of_another_kind_is_refused_by_the_name_of_its_variable(folder: Path, value: str) -> None:
    status, out = runs(folder, "coordinator.test:7443", {"https_proxy": value})
    assert (status, out.count("\n")) == (1, 1)
    shown = value.replace("user:secret@", "")
    assert out.startswith(f"fanin runs: $https_proxy: got {shown}, expected http://HOST:PORT of an HTTP proxy; "), out
    assert out.endswith("set NO_PROXY=coordinator.test\n")
