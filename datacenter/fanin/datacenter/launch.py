"""Starts a datacenter job and waits for its result: torchrun as a process group of its own.

torchrun stays the launcher (rendezvous, ranks, restarts, teardown); this adds what a caller needs: a folder with the
result, one clear error where there is none, and no process left behind, also when the caller is interrupted. What
stands in the folder decides: torchrun ends with status 1 also where it was stopped in order. On one machine all
traffic is on the loopback address, by number, since a machine's own name may lead nowhere.
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
from fanin.datacenter.config import TrainConfig, check_config
from fanin.datacenter.jobfiles import (
    ERROR_FILE,
    LOGS_FOLDER,
    METRICS_FILE,
    PARAMETERS_FILE,
    TrainResult,
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
TAIL_CHARS: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """How often ranks may be started again, and on how many machines.

    With more than one machine, the same is started on each, with one shared folder; ``endpoint`` is the address and
    port of one of them, where they meet. A machine that comes or goes within the bounds starts all ranks again.
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
        if (self.max_nodes > 1) != bool(self.endpoint):
            raise InvalidInput(
                f"datacenter job: got {self.max_nodes} nodes and endpoint {self.endpoint!r}, expected host:port of one "
                "of the machines if there are several, and none otherwise"
            )


ONE_MACHINE: Final = Elastic()


def launch(config: TrainConfig, num_processes: int, folder: Path, elastic: Elastic = ONE_MACHINE) -> TrainResult:
    """Run the job on ``num_processes`` ranks of each machine and return what it brought; ``folder`` keeps its files.

    Raises InvalidInput before anything is started if it cannot be carried out, the job's own error if it has told
    one, else Conflict with the rank that hung, or with the end of the failing rank's log.
    """
    _check(num_processes)
    if elastic.max_nodes == 1:
        check_config(config, num_processes)
    check_kept(config.communication, config.checkpoints.folder)
    _check_places(config, folder)
    for name in (METRICS_FILE, PARAMETERS_FILE, ERROR_FILE):
        # What an earlier job left must not pass for this one's.
        (folder / name).unlink(missing_ok=True)
    path = write_config(config, folder)
    returncode = run_ranks(["-m", "fanin.datacenter.job", str(path)], num_processes, folder, elastic)
    if (folder / METRICS_FILE).exists():
        return read_result(folder)
    told = read_error(folder)
    raise told or Conflict(f"datacenter job: {why(folder, returncode)}")


def run_ranks(program: Sequence[str], num_processes: int, folder: Path, elastic: Elastic = ONE_MACHINE) -> int:
    """Run a Python program (``-m module`` or a file, and its arguments) as ranks; torchrun's status.

    Their logs, and their reports of a hang, are left in ``folder``, where those of earlier ranks are removed.
    """
    _check(num_processes)
    for name in (LOGS_FOLDER, hangs.FOLDER):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / LOGS_FOLDER).mkdir(parents=True)
    environment = {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(RANKS_STOP_S)}
    if elastic.max_nodes == 1:
        environment["GLOO_SOCKET_IFNAME"] = LOOPBACK_INTERFACE
    else:
        # A machine that comes or goes is no restart to torchrun's count, by which attempts are told apart: each
        # meeting then needs a store of its own.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return _run(_torchrun(program, num_processes, folder, elastic), folder, environment)


def why(folder: Path, returncode: int) -> str:
    """Why ranks ended without what they were for: the rank that hung, or the end of the failing one's log."""
    return hangs.explain(folder) or f"torchrun ended with status {returncode}; {_tail(folder)}"


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


def _torchrun(program: Sequence[str], num_processes: int, folder: Path, elastic: Elastic) -> list[str]:
    # Port 0: torchrun's own store takes a free one, so no other process can take it in between.
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", elastic.endpoint or f"{LOOPBACK}:0", "--rdzv-id", "fanin"]
    nodes = ["--nnodes", f"{elastic.min_nodes}:{elastic.max_nodes}"]
    address = ["--local-addr", LOOPBACK] if elastic.max_nodes == 1 else []
    ranks = ["--nproc-per-node", str(num_processes), "--max-restarts", str(elastic.max_restarts)]
    logs = ["--log-dir", str(folder / LOGS_FOLDER), "--redirects", "3"]
    return [sys.executable, "-m", "torch.distributed.run", *nodes, *meeting, *address, *ranks, *logs, *program]


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> int:
    with (folder / LOGS_FOLDER / "torchrun.log").open("wb") as log:
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


def _tail(folder: Path) -> str:
    """The end of the log of the rank that failed first: the one that has been silent longest."""
    written = [path for path in (folder / LOGS_FOLDER).rglob("stderr.log") if path.stat().st_size]
    written.sort(key=lambda path: path.stat().st_mtime_ns)
    path = written[0] if written else folder / LOGS_FOLDER / "torchrun.log"
    text = path.read_text(errors="replace").strip()
    return f"{path} ends:\n{text[-TAIL_CHARS:]}"
