"""Signals to a coordinator and to a device, each in a process of its own."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.processes import Site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A site whose processes are killed at the end."""
    site = Site(tmp_path)
    yield site
    site.close()


def test_sighup_does_not_end_a_coordinator_and_sigterm_does(site: Site) -> None:
    running = site.serve()
    running.process.send_signal(signal.SIGHUP)
    until = time.monotonic() + 10.0
    while "SIGHUP: the certificate is read again" not in running.text():
        assert running.process.poll() is None and time.monotonic() < until, running.text()
        time.sleep(0.02)
    with site.operator() as operator:
        assert operator.runs() == ()
    running.process.send_signal(signal.SIGTERM)
    assert running.wait(20.0) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_device_ends_at_a_signal_with_status_0(site: Site, number: signal.Signals) -> None:
    device = join(site)
    device.send_signal(number)
    assert device.wait(20.0) == 0


def test_a_device_that_nohup_started_ignores_sighup(site: Site) -> None:
    device = join(site, "nohup")
    device.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        device.wait(1.0)
    device.terminate()
    assert device.wait(20.0) == 0


def join(site: Site, *before: str) -> "subprocess.Popen[bytes]":
    """Start ``fanin join``, and wait until it has enrolled."""
    site.serve()
    rng = np.random.default_rng(0)
    np.savez(site.folder / "data.npz", x=rng.normal(size=(8, 4)).astype(np.float32), y=np.zeros(8, np.int32))
    (site.folder / "publisher.pub").write_text("ab" * 32)
    options = {
        "--server": site.address,
        "--ca": site.state / "tls" / "ca.pem",
        "--token-file": site.state / "tokens" / "device.token",
        "--publisher": "publisher.pub",
        "--data": "data.npz",
    }
    words = [str(word) for pair in options.items() for word in pair]
    command = [*before, sys.executable, "-m", "fanin.commands.main", "join", *words]
    log = site.folder / "join.log"
    with log.open("wb") as out:
        # The tests themselves may run below nohup, and a child inherits that SIGHUP is ignored.
        heard = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
        files = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        device = subprocess.Popen(command, cwd=site.folder, preexec_fn=heard, **files)
    until = time.monotonic() + 60.0
    while "enrolled" not in log.read_text():
        assert device.poll() is None and time.monotonic() < until, log.read_text()
        time.sleep(0.02)
    return device


def test_a_command_that_is_terminated_ends_its_children(tmp_path: Path) -> None:
    words = ("bench", "checkins", "--devices", "20000")
    files = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = subprocess.Popen([sys.executable, "-m", "fanin.commands.main", *words], cwd=tmp_path, **files)
    until = time.monotonic() + 60.0
    while not (children := children_of(command.pid)):
        assert command.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    command.terminate()
    assert command.wait(30.0) == 128 + signal.SIGTERM
    assert [child for child in children if Path(f"/proc/{child}").exists()] == []


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    stats = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat") if path.exists()]
    # The name of a program may have spaces and brackets; after it come its state and the process that started it.
    rows = [(text.partition(" ")[0], text.rpartition(")")[2].split()[1]) for text in stats]
    return [int(child) for child, parent in rows if int(parent) == pid]
