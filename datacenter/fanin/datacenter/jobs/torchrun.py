"""torchrun as a child process: its command line, its environment, its logs, and the reason of its failure.

torchrun remains the launcher: it provides rendezvous, ranks, restarts and teardown. This module starts it in a separate
process group. No process remains when the caller ends, is interrupted or is killed. On one machine all traffic uses the
loopback address by number, because a machine's own name may not resolve.

On several machines the same command runs on each of them. Machines may start, end and return at any time, so none of
them removes shared files, and each has its own log folder.
"""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fanin.datacenter.files.folders import locked_folders
from fanin.datacenter.files.jobfiles import DIGEST_CHARS, LOGS_FOLDER, THREADS, machine_name
from fanin.datacenter.ranks.elastic import OTHER_JOB, PARENT
from fanin.datacenter.watch import hangs
from fanin.protos.errors import InvalidInput
from fanin.protos.release import __version__

LOOPBACK: Final = "127.0.0.1"
LOOPBACK_INTERFACE: Final = "lo0" if sys.platform == "darwin" else "lo"
RANKS_STOP_S: Final = 60
"""Seconds that ranks get to finish their step and save; torchrun's default is 30 s."""
STOP_S: Final = RANKS_STOP_S + 10.0
"""Seconds that torchrun has to end its ranks before it is killed. Ranks without an agent end by themselves."""
LAST_CALL_S: Final = 10
"""Seconds that the required number of machines waits for more. A machine that joins later restarts all ranks."""
TORCHRUN_LOG: Final = "torchrun.log"
RANK_LOG: Final = "stderr.log"
START_FILE: Final = "begun"
"""File in a machine's log folder that marks the start of the job. Older files, by the disk's clock, belong to earlier
jobs."""
TAIL_CHARS: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """The restarts and the machines of a job.

    With several machines, run the same command on each of them, with one shared folder. A machine that joins or leaves
    within the bounds restarts all ranks.

    Attributes:
        max_restarts: Restarts allowed. Each lost rank or machine uses one.
        min_nodes: Fewest machines to run on.
        max_nodes: Most machines to run on.
        endpoint: ``host:port`` of the rendezvous of several machines, on a machine that does not leave.
    """

    max_restarts: int = 0
    min_nodes: int = 1
    max_nodes: int = 1
    endpoint: str = ""

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise InvalidInput(
                f"datacenter job: got max_restarts {self.max_restarts}, expected 0 or more", code="FN-1356"
            )
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise InvalidInput(
                f"datacenter job: got {self.min_nodes} to {self.max_nodes} nodes, expected at least 1, the fewest "
                "first",
                code="FN-1356",
            )
        host, _, port = self.endpoint.rpartition(":")
        valid = bool(host) and port.isascii() and port.isdecimal() and 0 < int(port) < 2**16
        if bool(self.endpoint) != self.multi_machine or valid != self.multi_machine:
            raise InvalidInput(
                f"datacenter job: got {self.max_nodes} nodes and endpoint {self.endpoint!r}, expected host:port of one "
                "of the machines if there are several, and none otherwise",
                code="FN-1356",
            )
        if self.min_nodes < self.max_nodes and not self.max_restarts:
            raise InvalidInput(
                f"datacenter job: got {self.min_nodes} to {self.max_nodes} nodes and max_restarts 0, expected at least "
                "1: the loss of a machine uses one restart; raise max_restarts (--restarts)",
                code="FN-1356",
            )

    @property
    def multi_machine(self) -> bool:
        """Whether there may be more than one machine."""
        return self.max_nodes > 1

    @property
    def local(self) -> bool:
        """Whether all ranks are on this machine."""
        return not self.multi_machine or self.endpoint.startswith(("localhost:", "127.", "[::1]:"))


ONE_MACHINE: Final = Elastic()


def run_ranks(program: Sequence[str], num_processes: int, folder: Path, elastic: Elastic = ONE_MACHINE) -> int:
    """Run a Python program as ranks.

    Logs and hang reports are left in ``folder``. Those of earlier ranks are removed on one machine. On several machines
    they stay, because they may belong to a machine that still runs.

    Args:
        program: A module or a file with a function ``main(arguments) -> status``, and the arguments.
        num_processes: Ranks on each machine.
        folder: The job's folder.
        elastic: The restarts and the machines.

    Returns:
        torchrun's exit status.
    """
    if num_processes < 1:
        raise InvalidInput(f"datacenter job: got {num_processes} processes, expected at least 1", code="FN-1202")
    with locked_folders(folders_to_lock(folder, None, elastic), STOP_S) as locks:
        return run_locked(program, num_processes, folder, elastic, locks)


def run_locked(program: Sequence[str], num_processes: int, folder: Path, elastic: Elastic, locks: Sequence[int]) -> int:
    """Do the work of ``run_ranks`` under the caller's ``locks``."""
    logs = begin_logs(folder, elastic)
    run = AGENT_RUNNER.get()
    return run(_command(program, num_processes, logs, elastic), logs, rank_environment(os.environ, elastic), locks)


def folders_to_lock(folder: Path, checkpoints: Path | None, elastic: Elastic) -> tuple[Path, ...]:
    """Return the folders that only one launcher may use at a time. Several machines share theirs without locks."""
    return () if elastic.multi_machine else tuple({each.resolve() for each in (folder, checkpoints) if each})


def rank_environment(outer: Mapping[str, str], elastic: Elastic = ONE_MACHINE) -> dict[str, str]:
    """Return the environment of torchrun and its ranks, based on this process's environment."""
    environment = {THREADS: "1"} | dict(outer)
    environment |= {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(RANKS_STOP_S), PARENT: str(os.getpid())}
    if elastic.local:
        environment["GLOO_SOCKET_IFNAME"] = LOOPBACK_INTERFACE
    if elastic.multi_machine:
        # torchrun's restart count identifies an attempt, but does not include machines that join or leave. Each
        # rendezvous therefore needs a separate store.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return environment


def begin_logs(folder: Path, elastic: Elastic = ONE_MACHINE) -> Path:
    """Create this machine's log folder and return it. On one machine, remove the logs of earlier ranks first."""
    logs = folder / LOGS_FOLDER / machine_name() if elastic.multi_machine else folder / LOGS_FOLDER
    for path in () if elastic.multi_machine else (logs, folder / hangs.FOLDER):
        shutil.rmtree(path, ignore_errors=True)
    logs.mkdir(parents=True, exist_ok=True)
    (logs / START_FILE).touch()
    return logs


def failure_reason(folder: Path, returncode: int) -> str:
    """Return why ranks failed: the diagnosis of a hang, or the end of the failed rank's log."""
    logs = folder / LOGS_FOLDER / machine_name()
    logs = logs if logs.exists() else folder / LOGS_FOLDER
    if returncode == OTHER_JOB:
        return (
            "another job uses this endpoint, or its config, options or fanin release differ; run the same command on "
            "each machine, or choose another port"
        )
    # Files of earlier attempts do not explain why the last one ended.
    attempts = [path for path in logs.glob("*/attempt_*") if path.is_dir()]
    since_ns = max(path.stat().st_mtime_ns for path in (logs / START_FILE, *attempts))
    diagnosis = hangs.explain(folder, since_ns)
    return diagnosis or f"torchrun ended with status {returncode}; {_log_tail(folder / LOGS_FOLDER, logs, since_ns)}"


def _command(program: Sequence[str], num_processes: int, logs: Path, elastic: Elastic) -> list[str]:
    # Port 0: torchrun's own store binds a free port, so no other process can bind it in between.
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", elastic.endpoint or f"{LOOPBACK}:0"]
    rendezvous += ["--rdzv-id", _job_id(program, num_processes, elastic)]
    rendezvous += ["--rdzv-conf", f"last_call_timeout={LAST_CALL_S}"]
    nodes = ["--nnodes", f"{elastic.min_nodes}:{elastic.max_nodes}"]
    address = ["--local-addr", LOOPBACK] if elastic.local else []
    ranks = ["--nproc-per-node", str(num_processes), "--max-restarts", str(elastic.max_restarts)]
    output = ["--log-dir", str(logs), "--redirects", "3"]
    agent = [sys.executable, "-m", "fanin.datacenter.jobs.ranks"]
    return [*agent, *nodes, *rendezvous, *address, *ranks, *output, *program]


def _job_id(program: Sequence[str], num_processes: int, elastic: Elastic) -> str:
    """Return the id that all machines of a job share: a digest of the program and the numbers.

    The program names its config by the config's digest.
    """
    shared = [__version__, str(num_processes), f"{elastic.min_nodes}:{elastic.max_nodes}", *program]
    return hashlib.sha256("\0".join(shared).encode()).hexdigest()[:DIGEST_CHARS]


def run_agent(command: Sequence[str], logs: Path, environment: Mapping[str, str], locks: Sequence[int]) -> int:
    """Run torchrun's agent in a new interpreter until it ends, and return its exit status.

    Args:
        command: The command line.
        logs: The machine's log folder.
        environment: The environment of the agent and its ranks.
        locks: Open files that the ranks keep.
    """
    with (logs / TORCHRUN_LOG).open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            # Only the caller receives Ctrl-C, and then ends the job in order.
            start_new_session=True,
            # The ranks keep the locks, even if this process is killed.
            pass_fds=locks,
        )
        try:
            return process.wait()
        finally:
            _stop(process)


RunAgent = Callable[[Sequence[str], Path, Mapping[str, str], Sequence[int]], int]
AGENT_RUNNER: Final[ContextVar[RunAgent]] = ContextVar("agent_runner", default=run_agent)
"""The function that runs the agents of this context's jobs. A program of many short jobs may set it to a fork of a
process that has imported torch."""


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End torchrun if it still runs. It forwards the first signal to its ranks. An interrupt here kills it at once."""
    try:
        if process.poll() is None:
            # Not the group: the agent forwards one signal to each rank.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _log_tail(folder: Path, own: Path, since_ns: int) -> str:
    """Return the end of the log of the rank that failed first: the log on any machine that was written longest ago."""
    times = {}
    # Not rglob: another machine's torchrun may remove an attempt's logs at any time.
    for path in (Path(parent, name) for parent, _, names in os.walk(folder) for name in names if name == RANK_LOG):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if status.st_size and status.st_mtime_ns >= since_ns:
                times[path] = status.st_mtime_ns
    for path in (*sorted(times, key=lambda path: times[path]), own / TORCHRUN_LOG):
        with contextlib.suppress(FileNotFoundError):
            return f"{path} ends:\n{path.read_text(errors='replace', encoding='utf-8').strip()[-TAIL_CHARS:]}"
    return f"no log of it is left in {folder}"
