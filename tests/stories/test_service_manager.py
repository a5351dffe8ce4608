"""A coordinator under a service manager: it says when it serves, gives signs of life, and says when it stops."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import Running, start

UNIT = Path(__file__).parents[2] / "examples" / "operations" / "fanin.service"
WATCHDOG_S = 1.0


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """The socket of a service manager."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(tmp_path / "notify"))
        line.settimeout(30.0)
        yield line


@pytest.fixture
def coordinator(tmp_path: Path, manager: socket.socket) -> Iterator[Running]:
    """A coordinator that the manager started, with its log in a file."""
    options = ["--state", str(tmp_path / "state"), "--listen", "127.0.0.1:0", "--log-file", str(tmp_path / "fanin.log")]
    running = start(
        ["-m", "fanin.commands.main", "serve", *options],
        tmp_path / "output",
        {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6))},
    )
    yield running
    running.kill()


def messages(manager: socket.socket, seconds: float) -> list[str]:
    """Return the messages that arrive within some seconds."""
    until, received = time.monotonic() + seconds, []
    while (left := until - time.monotonic()) > 0:
        manager.settimeout(left)
        try:
            received.append(manager.recv(4096).decode())
        except TimeoutError:
            break
    return received


@pytest.mark.nightly
def test_signs_of_life_end_with_the_event_loop(tmp_path: Path, manager: socket.socket, coordinator: Running) -> None:
    text = manager.recv(4096).decode()
    while not text.startswith("READY=1"):
        assert text == "WATCHDOG=1"
        text = manager.recv(4096).decode()
    assert (tmp_path / "state" / "address").exists()
    assert "WATCHDOG=1" in messages(manager, 3 * WATCHDOG_S)
    os.kill(coordinator.process.pid, signal.SIGSTOP)
    # What was sent before the stop is read first.
    messages(manager, 0.2)
    assert messages(manager, 3 * WATCHDOG_S) == []
    os.kill(coordinator.process.pid, signal.SIGCONT)
    manager.settimeout(30.0)
    assert manager.recv(4096) == b"WATCHDOG=1"
    os.kill(coordinator.process.pid, signal.SIGTERM)
    manager.settimeout(30.0)
    while (text := manager.recv(4096).decode()) != "STOPPING=1":
        assert text == "WATCHDOG=1"
    assert coordinator.wait(30.0) == 0
    assert (tmp_path / "fanin.log").exists()


def test_the_unit_of_the_examples_is_valid(tmp_path: Path) -> None:
    text = UNIT.read_text()
    for line in ("Type=notify", "WatchdogSec=60", "ExecReload=/bin/kill -HUP $MAINPID", "LimitNOFILE=65536"):
        assert f"\n{line}\n" in text
    if (analyze := shutil.which("systemd-analyze")) is None:
        return
    unit = tmp_path / "fanin.service"
    unit.write_text(text.replace("/opt/fanin/bin/fanin", "/bin/true"))
    completed = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
