"""Starts a datacenter job on this machine and waits for its result: torchrun as a process group of its own.

torchrun stays the launcher (rendezvous, ranks, teardown); this adds what a caller needs: a folder with the
result, one clear error where there is none, and no process left behind, also when the caller is interrupted. All
traffic is on the loopback address, by number, since a machine's own name may lead nowhere. Needs no torch itself.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from fanin.datacenter.jobfiles import (
    ERROR_FILE,
    LOGS_FOLDER,
    METRICS_FILE,
    PARAMETERS_FILE,
    TrainConfig,
    TrainResult,
    TrainSettings,
    read_error,
    read_result,
    write_config,
)
from fanin.protos.errors import Conflict, InvalidInput

__all__ = ["TrainConfig", "TrainResult", "TrainSettings", "launch"]

LOOPBACK: Final = "127.0.0.1"
LOOPBACK_INTERFACE: Final = "lo0" if sys.platform == "darwin" else "lo"
STOP_S: Final = 10.0
"""How long torchrun gets to end its ranks before it is killed; ranks without an agent end by themselves."""
TAIL_CHARS: Final = 2000


def launch(config: TrainConfig, num_processes: int) -> TrainResult:
    """Run the job on ``num_processes`` ranks and return what it brought; its folder keeps the files and logs.

    Raises the job's own error if it has told one, else Conflict with the end of the failing rank's log.
    """
    if num_processes < 1:
        raise InvalidInput(f"datacenter job: got {num_processes} processes, expected at least 1")
    config.folder.mkdir(parents=True, exist_ok=True)
    _forget(config.folder)
    path = write_config(config)
    returncode = _run(_torchrun(config.folder, path, num_processes), config.folder)
    if returncode == 0 and (config.folder / METRICS_FILE).exists():
        return read_result(config.folder)
    told = read_error(config.folder)
    if told is not None:
        raise told
    raise Conflict(f"datacenter job: torchrun ended with status {returncode}; {_tail(config.folder)}")


def _torchrun(folder: Path, config: Path, num_processes: int) -> list[str]:
    # Port 0: torchrun's own store takes a free one, so no other process can take it in between.
    rendezvous = ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{LOOPBACK}:0"]
    address = ["--rdzv-id", "fanin", "--local-addr", LOOPBACK]
    ranks = ["--nproc-per-node", str(num_processes), "--max-restarts", "0"]
    logs = ["--log-dir", str(folder / LOGS_FOLDER), "--redirects", "3"]
    program = ["-m", "fanin.datacenter.job", str(config)]
    return [sys.executable, "-m", "torch.distributed.run", *rendezvous, *address, *ranks, *logs, *program]


def _run(command: list[str], folder: Path) -> int:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE}
    with (folder / LOGS_FOLDER / "torchrun.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            # Ctrl-C is for the caller, which then ends the job in order.
            start_new_session=True,
        )
        try:
            return process.wait()
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the job if it still runs: torchrun passes the first signal on to its ranks."""
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _forget(folder: Path) -> None:
    """Remove what an earlier job left, so that it cannot pass for this one's."""
    for name in (METRICS_FILE, PARAMETERS_FILE, ERROR_FILE):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / LOGS_FOLDER, ignore_errors=True)
    (folder / LOGS_FOLDER).mkdir()


def _tail(folder: Path) -> str:
    """The end of the log of the rank that failed first: the one that has been silent longest."""
    written = [path for path in (folder / LOGS_FOLDER).rglob("stderr.log") if path.stat().st_size]
    written.sort(key=lambda path: path.stat().st_mtime_ns)
    path = written[0] if written else folder / LOGS_FOLDER / "torchrun.log"
    text = path.read_text(errors="replace").strip()
    return f"{path} ends:\n{text[-TAIL_CHARS:]}"
