"""Starts a datacenter job and waits for its result: torchrun as a process group of its own.

torchrun stays the launcher (rendezvous, ranks, restarts, teardown); this adds what a caller needs: a folder with the
result, one clear error where there is none, and no process left behind, also when the caller is interrupted or killed.
What stands in the folder decides: torchrun ends with status 1 also where it was stopped in order. On one machine all
traffic is on the loopback address, by number, since a machine's own name may lead nowhere.

On several machines the same is started on each, and they share the folder. Machines start, end and come back when they
like, so none removes anything there; each has a folder of its own for its logs.
"""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fanin.datacenter.checkpoints.progress import MARKER
from fanin.datacenter.jobs.config import TrainConfig, check_config, fit_config
from fanin.datacenter.jobs.devices import device_type
from fanin.datacenter.jobs.elastic import MEETING, OTHER_JOB, PARENT
from fanin.datacenter.jobs.jobfiles import (
    DIGEST_CHARS,
    LOGS_FOLDER,
    MACHINES,
    METRICS_FILE,
    ROWS_FILE,
    THREADS,
    TrainResult,
    clear,
    machine_name,
    read_error,
    read_result,
    write_config,
    written,
)
from fanin.datacenter.jobs.places import check_folder, check_renamed, held
from fanin.datacenter.training.communication import check_kept
from fanin.datacenter.watch import hangs
from fanin.protos.errors import Conflict, FaninError, InvalidInput
from fanin.protos.release import __version__

LOOPBACK: Final = "127.0.0.1"
LOOPBACK_INTERFACE: Final = "lo0" if sys.platform == "darwin" else "lo"
RANKS_STOP_S: Final = 60
"""How long ranks get for the step that they are in, and to save; torchrun by itself gives 30 s."""
STOP_S: Final = RANKS_STOP_S + 10.0
"""How long torchrun gets to end its ranks before it is killed; ranks without an agent end by themselves."""
LAST_CALL_S: Final = 10
"""How long machines that are enough wait for more before they begin; one that comes later starts all of them again."""
TORCHRUN_LOG: Final = "torchrun.log"
RANK_LOG: Final = "stderr.log"
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
    device_type(config.parallel.device, num_processes)
    check_kept(config.communication, config.checkpoints.folder)
    _check_resumed(config)
    _check_places(config, folder)
    with held(_own(folder, config.checkpoints.folder, elastic), STOP_S) as locks:
        if not elastic.several:
            clear(folder)
            (folder / ROWS_FILE).unlink(missing_ok=True)
        before = written(folder)
        path = str(write_config(config, folder, shared=elastic.several))
        program = ["-m", "fanin.datacenter.jobs.job", *([MACHINES] if elastic.several else []), path]
        returncode = _run_ranks(program, num_processes, folder, elastic, locks)
        # What stood there before is an earlier job's.
        return outcome(folder, elastic, returncode, written(folder) - before)


def outcome(folder: Path, elastic: Elastic, returncode: int, new: set[tuple[str, int]]) -> TrainResult:
    """What ranks that have ended brought, or the error that they left, by the files that are ``new``."""
    told: FaninError | None = None
    if returncode == OTHER_JOB:
        # The files are the other's.
        pass
    elif METRICS_FILE in {name for name, _ in new}:
        result = read_result(folder)
        if not (elastic.several and result.metrics.stopped):
            return result
        # A launcher that is told to stop is interrupted, and does not come here.
        told = Conflict(
            f"datacenter job: another machine was told to stop after {len(result.metrics.trained.losses)} steps, and "
            f"the job did not go on without it; the same lines go on from its checkpoint; {why(folder, returncode)}"
        )
    elif new:
        told = read_error(folder)
    raise told or Conflict(f"datacenter job: {why(folder, returncode)}")


def run_ranks(program: Sequence[str], num_processes: int, folder: Path, elastic: Elastic = ONE_MACHINE) -> int:
    """Run a Python program (``-m module`` or a file, and its arguments) as ranks; torchrun's status.

    Their logs, and their reports of a hang, are left in ``folder``, where those of earlier ranks are removed, but not
    those of several machines: they may be another's that still runs.
    """
    _check(num_processes)
    with held(_own(folder, None, elastic), STOP_S) as locks:
        return _run_ranks(program, num_processes, folder, elastic, locks)


def _run_ranks(program: Sequence[str], num_processes: int, folder: Path, elastic: Elastic, locks: Sequence[int]) -> int:
    logs = begin_logs(folder, elastic)
    return _run(_torchrun(program, num_processes, logs, elastic), logs, rank_environment(os.environ, elastic), locks)


def rank_environment(outer: Mapping[str, str], elastic: Elastic = ONE_MACHINE) -> dict[str, str]:
    """The environment of torchrun and its ranks, from that of this process."""
    environment = {THREADS: "1"} | dict(outer)
    environment |= {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(RANKS_STOP_S), PARENT: str(os.getpid())}
    if elastic.local:
        environment["GLOO_SOCKET_IFNAME"] = LOOPBACK_INTERFACE
    if elastic.several:
        # A machine that comes or goes is no restart to torchrun's count, by which attempts are told apart: each
        # meeting then needs a store of its own.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return environment


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
    if returncode == OTHER_JOB:
        return (
            "machines of another job meet at this endpoint, expected the same config, numbers and release of fanin on "
            "each; look at what was typed, or take another port"
        )
    # What ranks have left in an attempt before the last is not why they ended.
    attempts = [path for path in logs.glob("*/attempt_*") if path.is_dir()]
    since_ns = max(path.stat().st_mtime_ns for path in (logs / BEGUN, *attempts))
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


def _check_resumed(config: TrainConfig) -> None:
    """Raise InvalidInput if there is nothing to begin with where the job is to begin with a checkpoint."""
    kept, resume = config.checkpoints.folder, config.checkpoints.resume
    # What the job itself has kept comes first.
    found = [each for each in (kept, resume) if each is not None and (each / MARKER).exists()]
    if resume is not None and resume != kept and not found:
        raise InvalidInput(f"checkpoints: got resume {resume}, expected a folder with a whole checkpoint")


def _own(folder: Path, kept: Path | None, elastic: Elastic) -> tuple[Path, ...]:
    """The folders that no other launcher may use at the same time: those of several machines are for all of theirs."""
    return () if elastic.several else tuple({each.resolve() for each in (folder, kept) if each is not None})


def _torchrun(program: Sequence[str], num_processes: int, logs: Path, elastic: Elastic) -> list[str]:
    # Port 0: torchrun's own store takes a free one, so no other process can take it in between.
    meeting = ["--rdzv-backend", MEETING, "--rdzv-endpoint", elastic.endpoint or f"{LOOPBACK}:0"]
    meeting += ["--rdzv-id", _job_id(program, num_processes, elastic)]
    nodes = ["--nnodes", f"{elastic.min_nodes}:{elastic.max_nodes}"]
    meeting += ["--rdzv-conf", f"last_call_timeout={LAST_CALL_S}"]
    address = ["--local-addr", LOOPBACK] if elastic.local else []
    ranks = ["--nproc-per-node", str(num_processes), "--max-restarts", str(elastic.max_restarts)]
    kept = ["--log-dir", str(logs), "--redirects", "3"]
    return [sys.executable, "-m", "fanin.datacenter.jobs.agent", *nodes, *meeting, *address, *ranks, *kept, *program]


def _job_id(program: Sequence[str], num_processes: int, elastic: Elastic) -> str:
    """What machines that meet have alike: the program, which names its config by its digest, and the numbers."""
    alike = [__version__, str(num_processes), f"{elastic.min_nodes}:{elastic.max_nodes}", *program]
    return hashlib.sha256("\0".join(alike).encode()).hexdigest()[:DIGEST_CHARS]


def _run(command: list[str], logs: Path, environment: dict[str, str], locks: Sequence[int]) -> int:
    with (logs / TORCHRUN_LOG).open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            # Ctrl-C is for the caller, which then ends the job in order.
            start_new_session=True,
            # Held for as long as there are ranks, also where this process is killed.
            pass_fds=locks,
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
    times = {}
    # Not rglob: another machine's torchrun may remove an attempt's logs at any moment.
    for path in (Path(parent, name) for parent, _, names in os.walk(folder) for name in names if name == RANK_LOG):
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            if found.st_size and found.st_mtime_ns >= since_ns:
                times[path] = found.st_mtime_ns
    for path in (*sorted(times, key=lambda path: times[path]), own / TORCHRUN_LOG):
        with contextlib.suppress(FileNotFoundError):
            return f"{path} ends:\n{path.read_text(errors='replace').strip()[-TAIL_CHARS:]}"
    return f"no log of it is left in {folder}"
