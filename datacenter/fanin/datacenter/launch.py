"""Starts a datacenter job and waits for its result: torchrun as a process group of its own.

torchrun stays the launcher (rendezvous, ranks, restarts, teardown); this adds what a caller needs: a folder with the
result, one clear error where there is none, and no process left behind, also when the caller is interrupted or killed.
What stands in the folder decides: torchrun ends with status 1 also where it was stopped in order. On one machine all
traffic is on the loopback address, by number, since a machine's own name may lead nowhere.

On several machines the same is started on each, and they share the folder. Machines start, end and come back when they
like, so none removes anything there; each has a folder of its own for its logs.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fanin.datacenter import hangs
from fanin.datacenter.communication import check_kept
from fanin.datacenter.config import TrainConfig, check_config, fit_config
from fanin.datacenter.jobfiles import (
    ERROR_FILE,
    LOGS_FOLDER,
    MACHINES,
    METRICS_FILE,
    ROWS_FILE,
    TrainResult,
    clear,
    machine_name,
    read_error,
    read_result,
    write_config,
)
from fanin.datacenter.places import check_folder, check_renamed
from fanin.protos.errors import Conflict, InvalidInput

LOOPBACK: Final = "127.0.0.1"
LOOPBACK_INTERFACE: Final = "lo0" if sys.platform == "darwin" else "lo"
RANKS_STOP_S: Final = 60
"""How long ranks get for the step that they are in, and to save; torchrun by itself gives 30 s."""
STOP_S: Final = RANKS_STOP_S + 10.0
"""How long torchrun gets to end its ranks before it is killed; ranks without an agent end by themselves."""
LAST_CALL_S: Final = 10
"""How long machines that are enough wait for more before they begin; one that comes later starts all of them again."""
TORCHRUN_LOG: Final = "torchrun.log"
BEGUN: Final = "begun"
"""In a machine's folder of logs: what is older, by the clock of their disk, is of earlier jobs."""
TAIL_CHARS: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """How often ranks may be started again, and on how many machines.

    With more than one machine, the same is started on each, with one shared folder; ``endpoint`` is the address and
    port of one of them, where they meet, and which must stay. A machine that comes or goes within the bounds starts all
    ranks again; one that is lost, or a rank, takes one of ``max_restarts``.
    """

    max_restarts: int = 0
    min_nodes: int = 1
    max_nodes: int = 1
    endpoint: str = ""

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise InvalidInput(f"datacenter job: got max_restarts {self.max_restarts}, expected 0 or more")
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise InvalidInput(
                f"datacenter job: got {self.min_nodes} to {self.max_nodes} nodes, expected at least 1, the fewest first"
            )
        host, _, port = self.endpoint.rpartition(":")
        meets = bool(host) and port.isascii() and port.isdecimal() and 0 < int(port) < 2**16
        if bool(self.endpoint) != self.several or meets != self.several:
            raise InvalidInput(
                f"datacenter job: got {self.max_nodes} nodes and endpoint {self.endpoint!r}, expected host:port of one "
                "of the machines if there are several, and none otherwise"
            )
        if self.min_nodes < self.max_nodes and not self.max_restarts:
            raise InvalidInput(
                f"datacenter job: got {self.min_nodes} to {self.max_nodes} nodes and max_restarts 0, expected at least "
                "1: a machine that is lost takes one"
            )

    @property
    def several(self) -> bool:
        """Whether there may be more than one machine."""
        return self.max_nodes > 1

    @property
    def local(self) -> bool:
        """Whether all of it is on this machine."""
        return not self.several or self.endpoint.startswith(("localhost:", "127.", "[::1]:"))


ONE_MACHINE: Final = Elastic()


def launch(config: TrainConfig, num_processes: int, folder: Path, elastic: Elastic = ONE_MACHINE) -> TrainResult:
    """Run the job on ``num_processes`` ranks of each machine and return what it brought; ``folder`` keeps its files.

    With a number of machines that may change, the mesh is fitted to those that are there. Raises InvalidInput before
    anything is started if it cannot be carried out, the job's own error if it has told one, else Conflict with the rank
    that hung, or with the end of the failing rank's log.
    """
    _check(num_processes)
    _check_machines(config, num_processes, elastic)
    check_kept(config.communication, config.checkpoints.folder)
    _check_places(config, folder)
    if not elastic.several:
        clear(folder)
        (folder / ROWS_FILE).unlink(missing_ok=True)
    before = _written(folder)
    path = str(write_config(config, folder))
    program = ["-m", "fanin.datacenter.job", *([MACHINES] if elastic.several else []), path]
    returncode = run_ranks(program, num_processes, folder, elastic)
    # What stood there before is an earlier job's.
    new = _written(folder) - before
    if METRICS_FILE in {name for name, _ in new}:
        return read_result(folder)
    told = read_error(folder) if new else None
    raise told or Conflict(f"datacenter job: {why(folder, returncode)}")


def run_ranks(program: Sequence[str], num_processes: int, folder: Path, elastic: Elastic = ONE_MACHINE) -> int:
    """Run a Python program (``-m module`` or a file, and its arguments) as ranks; torchrun's status.

    Their logs, and their reports of a hang, are left in ``folder``, where those of earlier ranks are removed, but not
    those of several machines: they may be another's that still runs.
    """
    _check(num_processes)
    logs = begin_logs(folder, elastic)
    environment = {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(RANKS_STOP_S)}
    if elastic.local:
        environment["GLOO_SOCKET_IFNAME"] = LOOPBACK_INTERFACE
    if elastic.several:
        # A machine that comes or goes is no restart to torchrun's count, by which attempts are told apart: each
        # meeting then needs a store of its own.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return _run(_torchrun(program, num_processes, logs, elastic), logs, environment)


def begin_logs(folder: Path, elastic: Elastic = ONE_MACHINE) -> Path:
    """Make the folder for this machine's logs; one machine alone begins without those of earlier ranks."""
    logs = folder / LOGS_FOLDER / machine_name() if elastic.several else folder / LOGS_FOLDER
    for path in () if elastic.several else (logs, folder / hangs.FOLDER):
        shutil.rmtree(path, ignore_errors=True)
    logs.mkdir(parents=True, exist_ok=True)
    (logs / BEGUN).touch()
    return logs


def why(folder: Path, returncode: int) -> str:
    """Why ranks ended without what they were for: the rank that hung, or the end of the failing one's log."""
    logs = folder / LOGS_FOLDER / machine_name()
    logs = logs if logs.exists() else folder / LOGS_FOLDER
    since_ns = (logs / BEGUN).stat().st_mtime_ns
    told = hangs.explain(folder, since_ns)
    return told or f"torchrun ended with status {returncode}; {_tail(folder / LOGS_FOLDER, logs, since_ns)}"


def _check_machines(config: TrainConfig, num_processes: int, elastic: Elastic) -> None:
    """Raise InvalidInput unless the job can be carried out on every number of machines that there may be."""
    if elastic.min_nodes == elastic.max_nodes:
        check_config(config, num_processes * elastic.max_nodes)
        return
    if config.checkpoints.folder is None:
        raise InvalidInput(
            f"datacenter job: got {elastic.min_nodes} to {elastic.max_nodes} nodes and no folder for checkpoints, "
            "expected one that all machines share: when one comes or goes, the job goes on from there"
        )
    for num_nodes in range(elastic.min_nodes, elastic.max_nodes + 1):
        try:
            fit_config(config, num_nodes * num_processes)
        except InvalidInput as exc:
            raise InvalidInput(f"on {num_nodes} machines of {num_processes} processes: {exc}") from exc


def _written(folder: Path) -> set[tuple[str, int]]:
    """Which of the files that say how a job ended are there, and when they were written."""
    found = set()
    for name in (METRICS_FILE, ERROR_FILE):
        # Of several machines, another's first rank may remove it at any moment.
        with contextlib.suppress(FileNotFoundError):
            found.add((name, (folder / name).stat().st_mtime_ns))
    return found


def _check(num_processes: int) -> None:
    if num_processes < 1:
        raise InvalidInput(f"datacenter job: got {num_processes} processes, expected at least 1")


def _check_places(config: TrainConfig, folder: Path) -> None:
    """Make the folders that a job writes to. Raises InvalidInput if something of it would find no place."""
    kept, weights = config.checkpoints.folder, config.checkpoints.weights
    # A folder that is made for something else below is good enough for the weights.
    made = {each.resolve() for each in (kept, folder) if each is not None}
    if weights is not None and (weights.is_dir() or weights.parent.resolve() not in made):
        check_renamed(weights, f"checkpoints: got weights {weights}")
    if kept is not None:
        check_folder(kept, f"checkpoints: got folder {kept}", makes=True)
    check_folder(folder, f"datacenter job: got folder {folder}", makes=True)


def _torchrun(program: Sequence[str], num_processes: int, logs: Path, elastic: Elastic) -> list[str]:
    # Port 0: torchrun's own store takes a free one, so no other process can take it in between.
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", elastic.endpoint or f"{LOOPBACK}:0", "--rdzv-id", "fanin"]
    nodes = ["--nnodes", f"{elastic.min_nodes}:{elastic.max_nodes}"]
    meeting += ["--rdzv-conf", f"last_call_timeout={LAST_CALL_S}"]
    address = ["--local-addr", LOOPBACK] if elastic.local else []
    ranks = ["--nproc-per-node", str(num_processes), "--max-restarts", str(elastic.max_restarts)]
    kept = ["--log-dir", str(logs), "--redirects", "3"]
    return [sys.executable, "-m", "fanin.datacenter.agent", *nodes, *meeting, *address, *ranks, *kept, *program]


def _run(command: list[str], logs: Path, environment: dict[str, str]) -> int:
    with (logs / TORCHRUN_LOG).open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            # Ctrl-C is for the caller, which then ends the job in order.
            start_new_session=True,
        )
        try:
            return process.wait()
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the job if it still runs: torchrun passes the first signal on to its ranks. Interrupted, it ends at once."""
    try:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _tail(folder: Path, own: Path, since_ns: int) -> str:
    """The end of the log of the rank that failed first, on any machine: the one that has been silent longest."""
    times = {path: path.stat() for path in folder.rglob("stderr.log")}
    written = [path for path, found in times.items() if found.st_size and found.st_mtime_ns >= since_ns]
    written.sort(key=lambda path: times[path].st_mtime_ns)
    path = written[0] if written else own / TORCHRUN_LOG
    text = path.read_text(errors="replace").strip()
    return f"{path} ends:\n{text[-TAIL_CHARS:]}"
