"""The demo's processes: one coordinator, and devices in an environment of their own."""

import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fanin.clients.operator import Operator
from fanin.commands.console.processes import Children, fanin_command
from fanin.commands.console.terminal import ADDRESS_FILE, CA_FILE, DEFAULT_STATE, DEVICE_TOKEN, connect
from fanin.edge.bundles.keys import load_or_create_key
from fanin.protos.calls import device_id_of
from fanin.protos.errors import InvalidInput

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
        self._children = Children(folder)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *exception: object) -> None:
        self._children.__exit__(*exception)

    def serve(self) -> None:
        """Start the coordinator on a free port of loopback and wait until it serves."""
        self._children.serve(self.state)

    def join(self, index: int, environment: DeviceEnvironment, data: Path, options: Sequence[str]) -> None:
        """Start a device."""
        address = (self.state / ADDRESS_FILE).read_text().strip()
        arguments = ["join", "--server", address, "--ca", str(self.state / CA_FILE)]
        arguments += ["--token-file", str(self.state / DEVICE_TOKEN), "--publisher", str(self.publisher_pub)]
        arguments += ["--data", str(data), "--partition", str(index), "--state", str(self._device(index))]
        arguments += ["--runtime", environment.name]
        self._children.start(f"device-{index}", fanin_command([*arguments, *options], str(environment.python)))

    @property
    def publisher_pub(self) -> Path:
        """The public key that the devices trust."""
        return self.folder / "publisher.pub"

    @contextlib.contextmanager
    def operator(self) -> Iterator[Operator]:
        """The operator's side of the coordinator."""
        with connect(self.state) as operator:
            yield operator

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
        self._children.check()

    def _device(self, index: int) -> Path:
        return self.folder / f"device-{index}"
