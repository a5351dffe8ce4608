"""Machines on the loopback address that join and leave: launchers of one job, and the files that they share."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fanin.clients.data.digits import split_digits

APPS = Path(__file__).with_name("apps.py")
NUM_STEPS, EVERY = 80, 4
CONFIG = """
[model]
app = "{app}"
[data]
examples = "{data}"
held_fraction = 0.2
[training]
batch_size = 16
learning_rate = 0.05
optimizer = "sgd"
[stop]
steps = {num_steps}
[evaluation]
every = 40
num_samples = 32
[parallel]
mesh = "dp_replicate=2"
[checkpoints]
folder = "{folder}/checkpoints"
every = {every}
"""
WAIT_S = 800.0
"""The loss of a machine is detected after 15 s, and the others wait 10 s for newcomers. The rest is for starting."""


class Machine:
    """A launcher and all processes that it starts."""

    def __init__(self, place: Path, name: str, port: int, *options: str) -> None:
        self.out = place / f"{name}.json"
        command = [sys.executable, "-m", "fanin.commands.main", "train", place / "train.toml", "--json", self.out]
        command += ["--nodes", "1:2", "--endpoint", f"127.0.0.1:{port}", "--restarts", "2", "--state", place / "state"]
        command += options
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def kill(self) -> None:
        """Kill the launcher and all its processes at once, like a machine that loses its power."""
        for pid in (self._process.pid, *family(self._process.pid)):
            os.kill(pid, signal.SIGKILL)
        self._process.communicate()

    def stop(self) -> None:
        """Send the launcher SIGTERM, as if the machine were needed elsewhere."""
        self._process.send_signal(signal.SIGTERM)

    def fail(self) -> str:
        """Wait for the command to end with an error, and return its message."""
        _, err = self._process.communicate(timeout=WAIT_S)
        assert self._process.returncode == 1, err
        return err

    def end(self) -> dict[str, object]:
        """Wait for the command to succeed, and return its JSON output."""
        _, err = self._process.communicate(timeout=WAIT_S)
        assert (self._process.returncode, err) == (0, "")
        report = json.loads(self.out.read_text())
        assert isinstance(report, dict)
        return report

    @property
    def is_running(self) -> bool:
        """Whether the command is still running."""
        return self._process.poll() is None


def family(parent: int) -> Iterator[int]:
    """Yield all descendants of a process, each after its own descendants."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == parent:
            pid = int(path.parent.name)
            yield from family(pid)
            yield pid


class Place:
    """A job's folder and the machines that share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._machines: list[Machine] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])

    def pace(self, seconds: float) -> None:
        """Set the seconds of each step from now on."""
        draft = self.folder / "pace.new"
        draft.write_text(str(seconds))
        draft.rename(self.folder / "pace")

    def start_two(self, app: str) -> tuple[Machine, Machine]:
        """Return two machines that have trained an App together for some steps. The last steps are not saved."""
        self.write(app)
        self.pace(1.0)
        machines = self.start(), self.start()
        self.wait_until(lambda: self.num_ranks() == 2)
        self.pace(0.3)
        num_steps = len(self.steps())
        self.wait_until(lambda: len(self.steps()) > num_steps + 6 and self.steps()[-1] % EVERY == 1)
        return machines

    def write(self, app: str, every: int = EVERY, num_steps: int = NUM_STEPS) -> None:
        """Write the config."""
        values = {"app": f"{APPS}:{app}", "data": self.folder / "data.npz", "folder": self.folder}
        (self.folder / "train.toml").write_text(CONFIG.format(num_steps=num_steps, every=every, **values))

    def num_ranks(self) -> int:
        """Return the number of logs that ranks have left, one for each rank and attempt."""
        return len(list(self.folder.glob("state/logs/*/*/attempt_*/*/stderr.log")))

    def start(self, *options: str) -> Machine:
        """Start one more machine. The first machine keeps the store where all of them meet."""
        machine = Machine(self.folder, f"machine-{len(self._machines)}", self.port, *options)
        self._machines.append(machine)
        self.wait_until(self._is_listening)
        return machine

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, "waited too long"
            time.sleep(0.1)

    def steps(self) -> list[int]:
        """Return the steps that all attempts have reported."""
        path = self.folder / "state" / "rows.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [int(json.loads(line)["step"]) for line in lines]

    def end(self) -> None:
        """Kill all machines that still run."""
        for machine in self._machines:
            if machine.is_running:
                machine.kill()

    def _is_listening(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1.0).close()
        except OSError:
            return False
        return True


@contextmanager
def empty_place(folder: Path) -> Iterator[Place]:
    """Yield a job's folder that has no machine yet."""
    public = split_digits(1, 1.0, 0).public
    np.savez(folder / "data.npz", x=public.inputs["x"], y=public.y)
    place = Place(folder)
    try:
        yield place
    finally:
        place.end()
