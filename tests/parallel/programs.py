"""Runs the programs of this folder in processes that are forked from one process that has imported torch.

    with Programs() as programs:
        assert programs.run("parity", folder).startswith("0\n")

Importing torch and the engine takes five seconds of CPU time. The server imports them once for all programs of a test
worker. It computes nothing and has one thread, so it can be forked safely. It exempts the imported objects from garbage
collection. Otherwise each full collection of a rank would visit 300,000 objects and copy their pages.

A program is a module of this folder with a function ``main(arguments) -> status``.
"""

import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Final, NoReturn

NAMES: Final = ("parity", "matrix", "checkpoints", "quads", "traffic", "faults", "agents", "resizes")
"""The programs that the server imports. ``memory`` imports torch's own tests, which only it needs."""
OUTPUT_CHARS: Final = 6000


class Programs:
    """The server of a test worker. It starts when the first program runs."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Programs":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, name: str, *arguments: object, warning_action: str = "error", timeout_s: float = 800.0) -> str:
        """Run a program until it ends, and return its status and the end of its output.

        Args:
            name: Name of the module.
            arguments: Its arguments.
            warning_action: What a warning does, as for Python's ``-W``.
            timeout_s: Seconds after which the server and the program are killed.

        Returns:
            The status, a newline, and the output: ``0\\n`` for a program that succeeded and printed nothing.
        """
        server = self._server = self._server or self._start()
        assert server.stdin is not None
        assert server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            request = {"name": name, "arguments": [str(each) for each in arguments], "log": str(log)}
            server.stdin.write(json.dumps(request | {"warnings": warning_action}) + "\n")
            server.stdin.flush()
            ready, _, _ = select.select([server.stdout], [], [], timeout_s)
            if not ready:
                os.killpg(server.pid, signal.SIGKILL)
                self._stack.close()
                self._server = None
            status = server.stdout.readline().strip() if ready else f"none after {timeout_s:.0f} s"
            output = log.read_text(errors="replace")[-OUTPUT_CHARS:] if log.exists() else ""
        return f"{status}\n{output}"

    def check(self, name: str, *arguments: object, warning_action: str = "error", timeout_s: float = 800.0) -> None:
        """Run a program as ``run`` does, and fail with its output unless its status is 0."""
        outcome = self.run(name, *arguments, warning_action=warning_action, timeout_s=timeout_s)
        assert outcome.startswith("0\n"), f"{name}: status {outcome}"

    def _start(self) -> subprocess.Popen[str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        # The server's process group includes all ranks.
        return self._stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-W", "error", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,
                text=True,
            )
        )


def serve(names: Sequence[str]) -> None:
    """Fork a process for each line of standard input, and write its status, until the end of the input."""
    for name in names:
        import_module(f"parallel.{name}")
    gc.collect()
    gc.freeze()
    while line := sys.stdin.readline():
        pid = os.fork()
        if not pid:
            run_program(**json.loads(line))
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def run_program(name: str, arguments: list[str], log: str, **options: str) -> NoReturn:
    """Run a program in this process, and exit with its status, or with 1 if it raises."""
    status = 1
    try:
        for target, path, flags in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY | os.O_CREAT)):
            os.dup2(os.open(path, flags), target)
        os.dup2(1, 2)
        warnings.resetwarnings()
        warnings.simplefilter(options["warnings"])
        status = import_module(f"parallel.{name}").main(arguments)
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    serve(NAMES)
