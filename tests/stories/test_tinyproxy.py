"""A real HTTP proxy, tinyproxy, between a coordinator and its clients: with a password, with forbidden ports, and down.

The proxy passes tunnels on to one that leads to the coordinator, so the coordinator's name need not resolve.
"""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support import doors
from support.commands import fanin_in_process, uncoded
from support.hosted import Hosted
from support.linear import NUM_CLASSES, NUM_INPUTS, linear_graphs
from support.processes import Running, start
from support.values import PUBLISHER, plan

from fanin.clients.route import EXCEPTIONS, PROXIES
from fanin.edge.assembly.assemble import assemble

COMMAND_S = 60.0
SERVER = "coordinator.test"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*PROXIES, *EXCEPTIONS, "FANIN_DEVICE_TOKEN", "FANIN_OPERATOR_TOKEN", "GRPC_VERBOSITY"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """A coordinator, and the files of its clients."""
    folder = tmp_path_factory.mktemp("proxied")
    host = Hosted(folder, names=("localhost", "127.0.0.1", SERVER)).start()
    (folder / "ca.pem").write_bytes(host.ca)
    (folder / "operator.token").write_text(host.operator_token)
    (folder / "device.token").write_text(host.device_token)
    (folder / "publisher.pub").write_text(PUBLISHER.public)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((20, NUM_INPUTS)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=rng.integers(0, NUM_CLASSES, 20).astype(np.int32))
    yield host
    host.stop()


@contextmanager
def tinyproxy(folder: Path, *lines: str) -> Iterator[str]:
    """Run tinyproxy with these lines of its configuration. Yield its address."""
    program = shutil.which("tinyproxy")
    assert program is not None, "tinyproxy is missing: apt-get install tinyproxy"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = folder / "tinyproxy.conf"
    config.write_text("\n".join([f"Port {port}", "Listen 127.0.0.1", "Timeout 600", "MaxClients 20", *lines, ""]))
    process = subprocess.Popen([program, "-d", "-c", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 10.0
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            except OSError:
                assert time.monotonic() < until and process.poll() is None, "tinyproxy does not start"
                time.sleep(0.02)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def run(host: Hosted, proxy: str, *words: object) -> tuple[int, str]:
    """Run a command through a proxy. Return its exit status and its output."""
    running = begin(host, proxy, *words)
    status = running.wait(COMMAND_S)
    text = uncoded(running.text())
    running.log.unlink()
    return status, text


def begin(host: Hosted, proxy: str, *words: object) -> Running:
    """Start a command through a proxy."""
    code = "import sys\nfrom fanin.commands.main import main\nsys.exit(main(sys.argv[1:]))"
    log = host.folder / f"{words[0]}.log"
    return start(["-c", code, *map(str, words)], log, {"https_proxy": f"http://{proxy}"})


def operator(host: Hosted) -> tuple[object, ...]:
    """Return the options of an operator."""
    folder = host.folder
    return ("--server", f"{SERVER}:{host.port}", "--ca", folder / "ca.pem", "--token-file", folder / "operator.token")


def test_run_join_and_fetch_through_a_proxy_with_a_password(host: Hosted, tmp_path: Path) -> None:
    folder = host.folder
    bundle = tmp_path / "bundle"
    assemble(linear_graphs(), bundle, PUBLISHER)
    host.start_run(plan(buffer=1, max_rounds=1), assemble(linear_graphs(), tmp_path / "other", PUBLISHER), PUBLISHER)
    with (
        doors.proxy(host.address) as (behind, requests),
        tinyproxy(tmp_path, f"upstream http {behind}", "BasicAuth site secret") as proxy,
    ):
        files = {"--ca": "ca.pem", "--token-file": "device.token", "--publisher": "publisher.pub", "--data": "data.npz"}
        words = [word for option, name in files.items() for word in (option, folder / name)]
        words += ["--server", f"{SERVER}:{host.port}", "--state", tmp_path / "device", "--max-updates", 1]
        status, out = run(host, f"site:secret@{proxy}", "join", *words)
        assert status == 0 and "update accepted (1 so far)" in out, out
        status, out = run(host, f"site:secret@{proxy}", "runs", *operator(host))
        assert status == 0 and "finished" in out, out
        status, out = run(host, f"site:secret@{proxy}", "fetch", "run", *operator(host), "--out", tmp_path / "v.npz")
        assert status == 0 and (tmp_path / "v.npz").exists(), out
        # TLS is end to end: the proxy saw the tunnels alone.
        assert requests and all(request.startswith(f"CONNECT {SERVER}:{host.port} ") for request in requests)
        status, out = run(host, proxy, "runs", *operator(host))
        assert status == 1 and f"the proxy {proxy} of $https_proxy does not connect to it (HTTP 407" in out, out
        assert "it expects a user and a password: https_proxy=http://USER:PASSWORD@" in out and "secret" not in out


def test_a_run_is_started_described_and_watched_through_a_proxy(
    host: Hosted, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assemble(linear_graphs(), tmp_path / "bundle", PUBLISHER)
    (tmp_path / "publisher.key").write_text(PUBLISHER.private_bytes().hex())
    (tmp_path / "plan.toml").write_text(
        'bundle = "bundle"\n[cohort]\nconcurrency = 1\n[training]\nlearning_rate = 0.1\n'
    )
    fanin = fanin_in_process(capsys, monkeypatch)
    with (
        doors.proxy(host.address) as (behind, requests),
        tinyproxy(tmp_path, f"upstream http {behind}", "BasicAuth site secret") as proxy,
    ):
        monkeypatch.setenv("https_proxy", f"http://site:secret@{proxy}")
        outcome = fanin(
            "run", tmp_path / "plan.toml", "--run-id", "mine", "--key", tmp_path / "publisher.key", *operator(host)
        )
        assert outcome.status == 0 and outcome.out.startswith("run mine started"), outcome
        outcome = fanin("describe", "mine", *operator(host))
        assert outcome.status == 0 and "run mine" in outcome.out, outcome
        assert fanin("stop", "mine", *operator(host)).status == 0
        outcome = fanin("watch", "mine", *operator(host))
        assert "stopped" in outcome.out, outcome
    assert len(requests) == 4 and all(each.startswith(f"CONNECT {SERVER}:{host.port} ") for each in requests)


def test_a_proxy_that_forbids_the_port(host: Hosted, tmp_path: Path) -> None:
    with tinyproxy(tmp_path, "ConnectPort 443") as proxy:
        status, out = run(host, proxy, "runs", *operator(host))
        assert status == 1 and f"the proxy {proxy} of $https_proxy does not connect to it (HTTP 403" in out, out
        assert "its rules forbid this connection" in out
        status, out = run(host, proxy, "doctor", "--server", f"{SERVER}:{host.port}", "--ca", host.folder / "ca.pem")
        assert status == 1 and "HTTP 403" in out and f"NO_PROXY={SERVER}" in out, out


def test_a_proxy_that_is_down(host: Hosted, tmp_path: Path) -> None:
    with tinyproxy(tmp_path) as proxy:
        pass
    status, out = run(host, proxy, "runs", *operator(host))
    assert status == 1 and f"the proxy {proxy} of $https_proxy: cannot be reached (Connection refused)" in out, out


@pytest.mark.nightly
def test_the_page_costs_a_waiting_device_little_memory(host: Hosted, tmp_path: Path) -> None:
    def rss_kb(*more: object) -> int:
        files = {"--ca": "ca.pem", "--token-file": "device.token", "--publisher": "publisher.pub", "--data": "data.npz"}
        words = [word for option, name in files.items() for word in (option, host.folder / name)]
        words += ["--server", host.address, "--state", tmp_path / f"device{len(more)}", *more]
        running = begin(host, "127.0.0.1:9", "join", *words)
        try:
            until = time.monotonic() + COMMAND_S
            while "waiting for work" not in running.text():
                assert time.monotonic() < until, running.text()
                time.sleep(0.1)
            time.sleep(1.5)
            text = Path(f"/proc/{running.process.pid}/status").read_text()
            return int(text.partition("VmRSS:")[2].split()[0])
        finally:
            running.kill()
            running.log.unlink()

    plain = min(rss_kb() for _ in range(2))
    assert min(rss_kb("--web", "0") for _ in range(2)) - plain < 3 << 10
