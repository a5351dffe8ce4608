"""Processes that a command starts on this machine: each has a log in one folder, and all end with the command."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from fanin.clients.operator import Operator
from fanin.commands.terminal import ADDRESS_FILE
from fanin.protos.control import LoggedEvent
from fanin.protos.errors import Conflict, FaninError, Unavailable

START_S: Final = 30.0
END_S: Final = 10.0
LOOK_S: Final = 0.005
"""Between looks at whether a coordinator serves: short, for starting is timed."""
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1"}


class Children:
    """Everything that a command starts; leaving the context ends it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[tuple[str, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, *_exception: object) -> None:
        for _, process in self._started:
            process.send_signal(signal.SIGTERM)
        for _, process in self._started:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a process on one thread of numerics, with what it writes in ``name``.log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | ONE_THREAD,
                # Ctrl-C is for the command, which then ends the others in order.
                start_new_session=True,
            )
        self._started.append((name, process))
        return process

    def serve(self, state: Path, listen: str = "127.0.0.1:0") -> subprocess.Popen[bytes]:
        """Start a coordinator, on a free port of loopback, and wait until it serves."""
        (state / ADDRESS_FILE).unlink(missing_ok=True)
        process = self.start("coordinator", fanin_command(["serve", "--state", str(state), "--listen", listen]))
        until = time.monotonic() + START_S
        while not (state / ADDRESS_FILE).exists():
            if process.poll() is not None or time.monotonic() > until:
                raise Unavailable(f"the coordinator did not start: {self.tail('coordinator')}")
            time.sleep(LOOK_S)
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """SIGKILL, and no longer one of these."""
        process.kill()
        process.wait()
        self._started = [(name, one) for name, one in self._started if one is not process]

    def check(self) -> None:
        """Raise Conflict if a process has ended: whoever waits for it would wait for long."""
        for name, process in self._started:
            if process.poll() is not None:
                raise self.ended(name, process)

    def check_failed(self) -> None:
        """Raise Conflict if a process has ended otherwise than well."""
        for name, process in self._started:
            if process.poll():
                raise self.ended(name, process)

    def ended(self, name: str, process: subprocess.Popen[bytes]) -> Conflict:
        """How a process ended, as an error."""
        return Conflict(f"{name} ended with status {process.returncode}: {self.tail(name)}")

    def tail(self, name: str) -> str:
        """The last line that a process wrote."""
        return (self.folder / f"{name}.log").read_text(errors="replace").strip().rpartition("\n")[2]


def fanin_command(words: Sequence[str], python: str = sys.executable) -> list[str]:
    """How to start a subcommand."""
    return [python, "-m", "fanin.commands.main", *words]


def follow_run(operator: Operator, run_id: str, from_sequence: int, check: Callable[[], None]) -> Iterator[LoggedEvent]:
    """What happens in a Run until it rests; while nothing does, ``check`` is asked each second and may raise."""
    inbox: queue.SimpleQueue[LoggedEvent | FaninError | None] = queue.SimpleQueue()

    def watch() -> None:
        try:
            for recorded in operator.watch(run_id, from_sequence):
                inbox.put(recorded)
            inbox.put(None)
        except FaninError as exc:
            inbox.put(exc)

    threading.Thread(target=watch, daemon=True).start()
    while True:
        try:
            found = inbox.get(timeout=1.0)
        except queue.Empty:
            check()
            continue
        if isinstance(found, FaninError):
            raise found
        if found is None:
            return
        yield found
