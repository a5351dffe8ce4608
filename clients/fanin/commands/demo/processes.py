"""The demo's processes: one coordinator, and devices in an environment of their own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fanin.clients.operator import Operator
from fanin.commands.terminal import ADDRESS_FILE, CA_FILE, DEFAULT_STATE, DEVICE_TOKEN, connect
from fanin.edge.keys import load_or_create_key
from fanin.protos.calls import device_id_of
from fanin.protos.errors import Conflict, InvalidInput, Unavailable

START_S: Final = 30.0
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1"}
_TELL: Final = """
import json, subprocess, sys
from fanin.edge.runtimes.available import open_runtime
def failure(name):
    return subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, text=True).stderr
freeze = subprocess.run([sys.executable, "-m", "pip", "freeze"], capture_output=True, text=True)
print(json.dumps({"runtime": open_runtime(sys.argv[1]).name, "packages": freeze.stdout.split("\\n")[:-1],
                  "import_torch": failure("torch"), "import_onnx": failure("onnx")}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEnvironment:
    """What a device's Python has: the runtime by its short name, and the library behind it; ``import_torch`` and
    ``import_onnx`` are the stderr of trying."""

    python: Path
    name: str
    runtime: str
    packages: tuple[str, ...]
    import_torch: str
    import_onnx: str


def look_at(python: Path, name: str) -> DeviceEnvironment:
    """Ask a device's Python what it has. Raises InvalidInput if it cannot run a device on this runtime."""
    try:
        told = subprocess.run([python, "-c", _TELL, name], capture_output=True, text=True, check=False)
    except OSError as exc:
        raise InvalidInput(
            f"--device-python: {python} cannot be run ({exc.strerror}); make devices builds the devices' environments"
        ) from exc
    if told.returncode:
        last = told.stderr.strip().rpartition("\n")[2]
        raise InvalidInput(f"--device-python: {python} cannot run a device ({last}); pip install 'fanin[{name}]' there")
    row = json.loads(told.stdout)
    return DeviceEnvironment(
        python=python,
        name=name,
        runtime=row["runtime"],
        packages=tuple(row["packages"]),
        import_torch=row["import_torch"],
        import_onnx=row["import_onnx"],
    )


class Processes:
    """Everything that the demo starts; leaving the context ends it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / DEFAULT_STATE
        self._started: list[tuple[str, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_exception: object) -> None:
        for _, process in self._started:
            process.send_signal(signal.SIGTERM)
        for _, process in self._started:
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def serve(self) -> None:
        """Start the coordinator on a free port of loopback and wait until it serves."""
        (self.state / ADDRESS_FILE).unlink(missing_ok=True)
        process = self._start(
            "coordinator", sys.executable, ["serve", "--state", str(self.state), "--listen", "127.0.0.1:0"]
        )
        until = time.monotonic() + START_S
        while not (self.state / ADDRESS_FILE).exists():
            if process.poll() is not None or time.monotonic() > until:
                raise Unavailable(f"the coordinator did not start: {self.tail('coordinator')}")
            time.sleep(0.02)

    def join(self, index: int, environment: DeviceEnvironment, data: Path, options: Sequence[str]) -> None:
        """Start a device."""
        address = (self.state / ADDRESS_FILE).read_text().strip()
        arguments = ["join", "--server", address, "--ca", str(self.state / CA_FILE)]
        arguments += ["--token-file", str(self.state / DEVICE_TOKEN), "--publisher", str(self.publisher_pub)]
        arguments += ["--data", str(data), "--partition", str(index), "--state", str(self._device(index))]
        arguments += ["--runtime", environment.name]
        self._start(f"device-{index}", str(environment.python), [*arguments, *options])

    @property
    def publisher_pub(self) -> Path:
        """The public key that the devices trust."""
        return self.folder / "publisher.pub"

    @contextlib.contextmanager
    def operator(self) -> Iterator[Operator]:
        """The operator's side of the coordinator."""
        line, operator = connect(self.state, "", None, None)
        try:
            yield operator
        finally:
            line.close()

    def device_names(self, num_devices: int) -> dict[str, str]:
        """From device ids to the demo's names, of the devices that have made their key."""
        names = {}
        for index in range(num_devices):
            path = self._device(index) / "device.key"
            if path.exists():
                names[device_id_of(load_or_create_key(path).public)] = f"device-{index}"
        return names

    def check(self) -> None:
        """Raise Conflict if a process has ended: the Run would wait for it until the deadline."""
        for name, process in self._started:
            if process.poll() is not None:
                raise Conflict(f"{name} ended with status {process.returncode}: {self.tail(name)}")

    def tail(self, name: str) -> str:
        """The last line that a process wrote."""
        return (self.folder / f"{name}.log").read_text(errors="replace").strip().rpartition("\n")[2]

    def _device(self, index: int) -> Path:
        return self.folder / f"device-{index}"

    def _start(self, name: str, python: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [python, "-m", "fanin.commands.main", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | ONE_THREAD,
                # Ctrl-C is for the demo, which then ends the others in order.
                start_new_session=True,
            )
        self._started.append((name, process))
        return process
