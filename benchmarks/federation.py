"""A real federation for benchmarks: a coordinator and devices, each in its own process, over TLS on loopback."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from fanin.clients.data.examples import Examples
from fanin.clients.operator import Operator
from fanin.clients.textfiles import read_token
from fanin.clients.transport import Connection

START_S: Final = 30.0
END_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Device:
    """A device to start: its examples, the flags of ``fanin join``, and its Python interpreter."""

    examples: Examples
    flags: tuple[str, ...] = ()
    python: Path = Path(sys.executable)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Federation:
    """A running federation: the operator's client, and the processes of the devices in their order."""

    operator: Operator
    devices: tuple[subprocess.Popen[bytes], ...]

    def check(self) -> None:
        """Raise RuntimeError if a device has ended, because its Round would wait for it until the deadline."""
        for index, process in enumerate(self.devices):
            if process.poll() is not None:
                raise RuntimeError(f"device {index} ended with status {process.returncode}")


@contextmanager
def running(folder: Path, devices: Sequence[Device]) -> Iterator[Federation]:
    """Run a coordinator and devices while the context is open.

    All files are in ``folder``: the key that they trust (``publisher.pub``) and the logs (``coordinator.log``,
    ``device-N.log``).
    """
    state = folder / "state"
    started: list[subprocess.Popen[bytes]] = []
    line: Connection | None = None
    try:
        words = ["serve", "--state", str(state), "--listen", "127.0.0.1:0", "--no-web"]
        started.append(start(words, folder / "coordinator.log"))
        address, ca = _address(state, started[0]), state / "tls" / "ca.pem"
        for index, device in enumerate(devices):
            data = folder / f"{index}.npz"
            np.savez(data, x=device.examples.inputs["x"], y=device.examples.y)
            words = ["join", "--server", address, "--ca", str(ca), "--publisher", str(folder / "publisher.pub")]
            words += ["--token-file", str(state / "tokens" / "device.token"), "--data", str(data)]
            words += ["--partition", str(index), "--state", str(folder / f"device-{index}"), *device.flags]
            started.append(start(words, folder / f"device-{index}.log", device))
        line = Connection(address, ca.read_bytes())
        operator = Operator(line, read_token(state / "tokens" / "operator.token", ""))
        yield Federation(operator=operator, devices=tuple(started[1:]))
    finally:
        if line is not None:
            line.close()
        for process in started:
            process.terminate()
        for process in started:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start(words: Sequence[str], log: Path, device: Device | None = None) -> subprocess.Popen[bytes]:
    """Start a ``fanin`` process on one thread."""
    python, more = (Path(sys.executable), {}) if device is None else (device.python, device.environment)
    command = [str(python), "-m", "fanin.commands.main", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict(more)
    with log.open("ab") as out:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)


def _address(state: Path, coordinator: subprocess.Popen[bytes]) -> str:
    """Wait until the coordinator serves. Return its address."""
    until = time.monotonic() + START_S
    while not (state / "address").exists():
        if coordinator.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the coordinator did not start; see {state.parent / 'coordinator.log'}")
        time.sleep(0.05)
    return (state / "address").read_text().strip()
