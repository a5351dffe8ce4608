"""Runs the programs of this folder in processes that are forked from one process that has imported torch.

    with Programs() as programs:
        assert programs.run("parity", folder).startswith("0\n")

Importing torch and the engine takes five seconds of CPU time. The server imports them once for all programs of a test
worker. It computes nothing and has one thread, so it can be forked safely. It exempts the imported objects from garbage
collection. Otherwise each full collection of a rank would visit 300,000 objects and copy their pages.

A program is a module of this folder with a function ``main(arguments) -> status``. The program ``script`` runs any
Python code, and ``Programs.script`` calls it.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Final, NoReturn

NAMES: Final = ("parity", "matrix", "checkpoints", "quads", "traffic", "faults", "agents", "resizes", "script")
"""The programs that the server imports. ``memory`` imports torch's own tests, which only it needs."""
LIBRARIES: Final = (
    "fanin.clients.device.contract",
    "fanin.edge.export.build",
    "fanin.server.aggregation.verify",
    "fanin.server.folder",
    "fanin.simulation.federation.scenario",
)
"""Modules that the code of scripts imports."""
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

    def script(
        self, code: str, *words: object, site: Path | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run code as ``python -c CODE WORDS`` does, but in a fork of the server.

        Args:
            code: The code.
            words: Its arguments.
            site: A folder of installed distributions; None for none.
            cwd: The folder to run in; None for this process's.

        Returns:
            The status, standard output and standard error.
        """
        with tempfile.TemporaryDirectory() as folder:
            request = {"code": code, "words": [str(word) for word in words], "site": str(site or ""), "out": folder}
            outcome = self.run("script", cwd or Path.cwd(), json.dumps(request), warning_action="default")
            out, err = Path(folder, "out"), Path(folder, "err")
            assert out.exists() and err.exists(), outcome
            return subprocess.CompletedProcess(code, int(outcome.split("\n")[0]), out.read_text(), err.read_text())

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


@contextmanager
def forked_agents(programs: Programs) -> Iterator[None]:
    """Run the jobs that are launched in this context in forks of a server, without folder locks and its signals."""
    # Imported here: it imports torch, which light tests and the server's start do not need.
    from fanin.datacenter.jobs import torchrun

    def run(command: Sequence[str], logs: Path, environment: Mapping[str, str], locks: Sequence[int]) -> int:
        words = command[command.index("fanin.datacenter.jobs.ranks") + 1 :]
        outcome = programs.run("agents", Path.cwd(), json.dumps(environment), *words, warning_action="default")
        status, _, output = outcome.partition("\n")
        (logs / torchrun.TORCHRUN_LOG).write_text(output)
        return int(status)

    before = torchrun.AGENT_RUNNER.set(run)
    try:
        yield
    finally:
        torchrun.AGENT_RUNNER.reset(before)


def serve(names: Sequence[str]) -> None:
    """Import modules. Then fork a process for each line of standard input, and write its status, until its end."""
    for name in names:
        import_module(name)
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
    serve([*(f"parallel.{name}" for name in NAMES), *LIBRARIES])
