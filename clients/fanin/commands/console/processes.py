"""Child processes of a command. Each logs to a file in one folder, and all end with the command."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from fanin.clients.operator import Operator
from fanin.commands.console.terminal import ADDRESS_FILE
from fanin.protos.errors import Conflict, FaninError, Unavailable
from fanin.protos.messages import LoggedEvent

START_S: Final = 30.0
END_S: Final = 10.0
POLL_S: Final = 0.005
"""Interval at which the start of a coordinator is polled; short, because benchmarks time the start."""
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1"}


def _end(number: int, _frame: object) -> None:
    sys.exit(128 + number)


class Children:
    """The child processes of a command; leaving the context ends them, and SIGTERM and SIGHUP leave it.

    Use it in the main thread.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Children":
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                self._handlers[number] = signal.signal(number, _end)
        return self

    def __exit__(self, *_exception: object) -> None:
        # A second signal must not leave children behind.
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)
        try:
            self._end_children()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def _end_children(self) -> None:
        for _, process in self._started:
            process.send_signal(signal.SIGTERM)
        for _, process in self._started:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a process with one numeric thread (OMP_NUM_THREADS); its output is written to ``name``.log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | ONE_THREAD,
                # Ctrl-C must reach the command alone, which then ends its children in order.
                start_new_session=True,
            )
        self._started.append((name, process))
        return process

    def serve(self, state: Path, listen: str = "127.0.0.1:0") -> subprocess.Popen[bytes]:
        """Start a coordinator and wait until it serves. Raises Unavailable if it does not start."""
        (state / ADDRESS_FILE).unlink(missing_ok=True)
        process = self.start(
            "coordinator", fanin_command(["serve", "--state", str(state), "--listen", listen, "--no-web"])
        )
        until = time.monotonic() + START_S
        while not (state / ADDRESS_FILE).exists():
            if process.poll() is not None or time.monotonic() > until:
                raise Unavailable(f"the coordinator did not start: {self.tail('coordinator')}", code="FN-1042")
            time.sleep(POLL_S)
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Send SIGKILL, wait, and forget the process."""
        process.kill()
        process.wait()
        self._started = [(name, one) for name, one in self._started if one is not process]

    def check(self) -> None:
        """Raise Conflict if a process has ended; its caller would otherwise wait until a timeout."""
        for name, process in self._started:
            if process.poll() is not None:
                raise self.ended(name, process)

    def check_failed(self) -> None:
        """Raise Conflict if a process has ended with an exit status other than 0."""
        for name, process in self._started:
            if process.poll():
                raise self.ended(name, process)

    def ended(self, name: str, process: subprocess.Popen[bytes]) -> Conflict:
        """Return the error that describes how a process ended."""
        return Conflict(f"{name} ended with status {process.returncode}: {self.tail(name)}", code="FN-1042")

    def tail(self, name: str) -> str:
        """Return the last line of a process's log."""
        return (self.folder / f"{name}.log").read_text(errors="replace", encoding="utf-8").strip().rpartition("\n")[2]


def fanin_command(words: Sequence[str], python: str = sys.executable) -> list[str]:
    """Return the command line that starts a subcommand."""
    return [python, "-m", "fanin.commands.main", *words]


def follow_run(operator: Operator, run_id: str, from_sequence: int, check: Callable[[], None]) -> Iterator[LoggedEvent]:
    """Yield the events of a Run until it ends.

    ``check`` is called after each second without an event. An exception of it ends the iteration.
    """
    inbox: queue.SimpleQueue[LoggedEvent | FaninError | None] = queue.SimpleQueue()

    def watch() -> None:
        try:
            for entry in operator.watch(run_id, from_sequence):
                inbox.put(entry)
            inbox.put(None)
        except FaninError as exc:
            inbox.put(exc)

    threading.Thread(target=watch, daemon=True).start()
    while True:
        try:
            item = inbox.get(timeout=1.0)
        except queue.Empty:
            check()
            continue
        if isinstance(item, FaninError):
            raise item
        if item is None:
            return
        yield item
