"""Real processes for stories: a coordinator and devices over TLS on loopback, which tests kill."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fanin.clients.operator import Operator
from fanin.clients.transport import Connection
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.protos.messages import LoggedEvent, RunInfo
from fanin.protos.plans import Plan

SUPPORT = Path(__file__).parent
START_S = 20.0
LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({max_descriptors}, {max_descriptors}))
del sys.argv[0]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass
class Running:
    """A child process with its output in a file."""

    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        """Kill the process by SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def text(self) -> str:
        """Return the output so far."""
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float) -> int:
        """Return the exit status. A process that does not end fails the test with its log."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.process.args} did not end within {timeout_s} s:\n{self.text()}") from None


def limit_files(running: Running, max_file_bytes: int) -> None:
    """Limit the size of all files of a running process; 0 lifts the limit.

    Only the soft limit changes, so it can be lifted again. A write then fails with EFBIG, as it fails with ENOSPC on a
    full disk. Python ignores the signal that accompanies it.
    """
    soft = max_file_bytes or resource.RLIM_INFINITY
    resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))


def start(arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Running:
    """Start ``python ARGUMENTS`` with its output in ``log``."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
        )
    return Running(process=process, log=log)


@dataclass
class Site:
    """The folder of a coordinator, and the processes that were started for it.

    ``data`` has the coordinator's data sets as NAME=PATH.
    """

    folder: Path
    listen: str = "127.0.0.1:0"
    data: tuple[str, ...] = ()
    started: list[Running] = field(default_factory=list)

    @property
    def state(self) -> Path:
        """The coordinator's folder."""
        return self.folder / "state"

    @property
    def address(self) -> str:
        """The address of the coordinator."""
        return (self.state / "address").read_text().strip()

    @property
    def ca(self) -> bytes:
        """The certificate of the coordinator's authority."""
        return (self.state / "tls" / "ca.pem").read_bytes()

    @property
    def device_token(self) -> str:
        """The token with which devices enroll."""
        return (self.state / "tokens" / "device.token").read_text().strip()

    def serve(self, *, kill_at: str = "", max_file_bytes: int = 0, max_descriptors: int = 0) -> Running:
        """Start the coordinator and wait until it serves, or until it killed itself at ``kill_at``.

        With ``max_file_bytes`` no file of it can grow beyond this size, as on a full disk. ``max_descriptors`` limits
        its open descriptors.
        """
        (self.state / "address").unlink(missing_ok=True)
        script = str(SUPPORT / "coordinator.py")
        arguments = [script, str(self.state), self.listen, kill_at, str(max_file_bytes), *self.data]
        if max_descriptors:
            arguments = ["-c", LIMITED.format(max_descriptors=max_descriptors), *arguments]
        running = start(arguments, self.folder / "coordinator.log")
        self.started.append(running)
        until = time.monotonic() + START_S
        while not (self.state / "address").exists() and running.process.poll() is None:
            assert time.monotonic() < until, running.text()
            time.sleep(0.02)
        if running.process.poll() is None:
            # From now on the coordinator restarts at the address that devices know.
            self.listen = self.address
        return running

    def device(self, index: int, *, die_at: str = "", num_values: int = 0) -> Running:
        """Start a device that does not train. With ``die_at`` it kills itself at some byte of its upload."""
        name = f"device-{index}"
        # The device gets the address as argument, because the file is missing while a coordinator restarts.
        arguments = [str(SUPPORT / "device.py"), str(self.folder), str(index), self.listen, die_at]
        running = start(arguments, self.folder / f"{name}.log")
        self.started.append(running)
        return running

    @contextlib.contextmanager
    def operator(self) -> Iterator[Operator]:
        """Yield an operator with its own connection."""
        line = Connection(self.address, self.ca)
        try:
            yield Operator(line, (self.state / "tokens" / "operator.token").read_text().strip())
        finally:
            line.close()

    def start_run(self, plan: Plan, bundle: Bundle, publisher: SigningKey) -> RunInfo:
        """Publish a Bundle and start the Run "run". Devices trust its publisher."""
        (self.folder / "publisher.pub").write_text(publisher.public)
        with self.operator() as operator:
            operator.publish_bundle(bundle)
            return operator.start_run("run", plan, bundle, publisher)

    def events(self) -> list[LoggedEvent]:
        """Wait until the Run rests. Return all its events."""
        with self.operator() as operator:
            return list(operator.watch("run"))

    def close(self) -> None:
        """Kill all remaining processes."""
        for running in self.started:
            running.kill()
