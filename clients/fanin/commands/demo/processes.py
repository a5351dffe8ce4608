"""The demo's processes: one coordinator, and devices in their own environment."""

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

_PROBE: Final = """
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
    """The packages of a device's Python.

    Attributes:
        python: The interpreter.
        name: The runtime's short name.
        runtime: The runtime's library and version.
        packages: The output of ``pip freeze``.
        import_torch: Standard error of ``import torch``.
        import_onnx: Standard error of ``import onnx``.
    """

    python: Path
    name: str
    runtime: str
    packages: tuple[str, ...]
    import_torch: str
    import_onnx: str


def probe(python: Path, name: str) -> DeviceEnvironment:
    """Return the packages of a device's Python. Raises InvalidInput if it cannot run a device on this runtime."""
    try:
        completed = subprocess.run([python, "-c", _PROBE, name], capture_output=True, text=True, check=False)
    except OSError as exc:
        raise InvalidInput(
            f"--device-python: {python} cannot be run ({exc.strerror}); make devices builds the devices' environments",
            code="FN-1051",
        ) from exc
    if completed.returncode:
        last = completed.stderr.strip().rpartition("\n")[2]
        raise InvalidInput(
            f"--device-python: {python} cannot run a device ({last}); pip install 'fanin[{name}]' there", code="FN-1051"
        )
    row = json.loads(completed.stdout)
    return DeviceEnvironment(
        python=python,
        name=name,
        runtime=row["runtime"],
        packages=tuple(row["packages"]),
        import_torch=row["import_torch"],
        import_onnx=row["import_onnx"],
    )


class Processes:
    """The processes of the demo; leaving the context ends them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / DEFAULT_STATE
        self._children = Children(folder)

    def __enter__(self) -> "Processes":
        self._children.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._children.__exit__(*exception)

    def serve(self) -> None:
        """Start the coordinator on a free port of loopback and wait until it serves."""
        self._children.serve(self.state)

    def join(self, index: int, environment: DeviceEnvironment, data: Path, options: Sequence[str]) -> None:
        """Start a device."""
        address = (self.state / ADDRESS_FILE).read_text(encoding="utf-8").strip()
        arguments = ["join", "--server", address, "--ca", str(self.state / CA_FILE)]
        arguments += ["--token-file", str(self.state / DEVICE_TOKEN), "--publisher", str(self.publisher_pub)]
        arguments += ["--data", str(data), "--partition", str(index), "--state", str(self._device(index))]
        arguments += ["--runtime", environment.name]
        self._children.start(f"device-{index}", fanin_command([*arguments, *options], str(environment.python)))

    @property
    def publisher_pub(self) -> Path:
        """The file with the public key that the devices trust."""
        return self.folder / "publisher.pub"

    @contextlib.contextmanager
    def operator(self) -> Iterator[Operator]:
        """Connect to the coordinator as its operator."""
        with connect(self.state) as operator:
            yield operator

    def device_names(self, num_devices: int) -> dict[str, str]:
        """Map device ids to the demo's names, for the devices that have created their key."""
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
