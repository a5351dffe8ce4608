"""A Flower app in a separate process, which an interruption ends at once.

``should_continue`` cannot be called inside the app, whose training may take an hour. So the app runs in a child
process, and the device calls ``should_continue`` while it waits. If the device must stop, it kills the child, and the
next training starts another one. An app that crashes, leaks or calls ``sys.exit`` does not end the device either.
"""

import logging
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Final

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.flower.project import resolved
from fanin.clients.flower.task import (
    Answer,
    AppFailed,
    AppReady,
    FlowerReply,
    FlowerSettings,
    FlowerTask,
    Words,
)

LOG = logging.getLogger("fanin.clients")
POLL_S: Final = 0.2
"""Seconds between two calls of ``should_continue`` while the app trains."""


class FlowerProcess:
    """A child process that runs one app. See FlowerRunner. ``close`` ends it; a context manager calls it.

    Raises:
        AppFailed: The app cannot be imported, or flwr is not installed.
    """

    def __init__(self, settings: FlowerSettings) -> None:
        self._settings = resolved(settings)
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Words, Answer] | None = None
        self._ready = AppReady(name="", warnings=())
        self._logged = ""
        self._start()

    def __enter__(self) -> "FlowerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """See FlowerRunner."""
        return self._ready.name

    @property
    def warnings(self) -> tuple[str, ...]:
        """See FlowerRunner."""
        return self._ready.warnings

    def run(self, task: FlowerTask, should_continue: ShouldContinue) -> FlowerReply:
        """Run a task in the child. See FlowerRunner."""
        if self._child is None or self._child.poll() is not None:
            self._start()
        try:
            should_continue()
            pipe = self._open_pipe()
            pipe.send(task)
            while not pipe.poll(POLL_S):
                should_continue()
        except OSError:
            raise self._crash() from None
        except BaseException:
            # Also for a signal: no process would receive the result of a child that continues.
            self.close()
            raise
        return self._reply(task)

    def close(self) -> None:
        """Kill the child."""
        if self._pipe is not None:
            self._pipe.close()
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._child = self._pipe = None

    def _start(self) -> None:
        self.close()
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "fanin.clients.flower.child", str(theirs.fileno())]
            # The app's prints belong in the log, because the output of the device has another format.
            self._child = subprocess.Popen(
                command, cwd=self._settings.folder, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=2
            )
        self._pipe = Connection(ours.detach())
        try:
            self._pipe.send(self._settings)
            answer = self._receive()
        except OSError:
            raise self._crash() from None
        except BaseException:
            self.close()
            raise
        if isinstance(answer, AppFailed):
            self.close()
            raise answer
        assert isinstance(answer, AppReady), "the child answers the settings"
        self._ready = answer

    def _reply(self, task: FlowerTask) -> FlowerReply:
        answer = self._receive()
        if isinstance(answer, AppFailed):
            # The error itself has no traceback of the child. The device trains again, and the same one is logged once.
            if answer.trace and answer.trace != self._logged:
                self._logged = answer.trace
                LOG.error("round %d of run %s: %s\n%s", task.round, task.run_id, answer, answer.trace.rstrip())
            raise answer
        assert isinstance(answer, FlowerReply), "the child answers a task"
        return answer

    def _receive(self) -> Answer:
        try:
            return self._open_pipe().recv()
        except (EOFError, OSError):
            raise self._crash() from None

    def _open_pipe(self) -> "Connection[Words, Answer]":
        assert self._pipe is not None, "a started process has a pipe"
        return self._pipe

    def _crash(self) -> AppFailed:
        status: int | None = None
        if self._child is not None:
            with suppress(subprocess.TimeoutExpired):
                status = self._child.wait(1.0)
        self.close()
        return AppFailed(
            f"flower app {self._settings.app}: its process ended with status {status}, expected a reply; run the app "
            "with flwr run to see why",
            code="FN-0906",
        )
