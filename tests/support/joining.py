"""A device as a process of ``fanin join``, which stories start and kill, and its files."""

import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fanin.clients.device.site.record import read_record
from fanin.edge.bundles.keys import SigningKey
from support.hosted import Hosted
from support.processes import Running, start

JOIN = "import sys\nfrom fanin.commands.main import main\nsys.exit(main(sys.argv[1:]))"
WAIT_S = 60.0


@dataclass
class Device:
    """A device's files, and its process."""

    folder: Path

    @property
    def state(self) -> Path:
        """The device's folder."""
        return self.folder / "device"

    @contextmanager
    def joining(self, server: str, environment: Mapping[str, str] | None = None, *more: str) -> Iterator[Running]:
        """Join until the context ends."""
        files = {"ca": "ca.pem", "publisher": "publisher.pub", "token-file": "token", "data": "data.npz"}
        if not (self.folder / "token").exists():
            del files["token-file"]
        words = [str(word) for name, file in files.items() for word in (f"--{name}", self.folder / file)]
        if "--ca-fingerprint" in more:
            del words[:2]
        words += ["--server", server, "--state", str(self.state), *more]
        running = start(["-c", JOIN, "join", *words], self.folder / "join.log", environment)
        try:
            yield running
        finally:
            running.kill()

    def await_link(self, running: Running, *, is_connected: bool) -> None:
        """Wait until the device has noted its connection, or has ended."""
        until = time.monotonic() + WAIT_S
        while running.process.poll() is None:
            record = read_record(self.state)
            if record and (record.link.is_connected if is_connected else record.link.reason):
                return
            assert time.monotonic() < until, running.text()
            time.sleep(0.05)
        assert not is_connected, running.text()


def device_of(tmp_path: Path, host: Hosted) -> Device:
    """Return a device of a coordinator, with its files in a folder."""
    (tmp_path / "ca.pem").write_bytes(host.ca)
    (tmp_path / "token").write_text(host.device_token)
    (tmp_path / "token").chmod(0o600)
    (tmp_path / "publisher.pub").write_text(SigningKey.generate().public)
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", x=rng.random((20, 4), np.float32), y=rng.integers(0, 3, 20))
    return Device(tmp_path)


def unused_port() -> int:
    """Return a port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
