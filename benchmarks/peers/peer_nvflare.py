"""The same work on NVFlare: its POC on this machine, mutual TLS, one FedAvg job of numpy arrays."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Final

from work import Work, seconds_between

JOB: Final = Path(__file__).parent / "nvflare_job.py"
LIMIT_S: Final = 900.0


def nvflare_seconds(bin_folder: Path, folder: Path, work: Work) -> list[float]:
    """Return the seconds of each round but the first, between the arrivals of two models at the site that is first.

    Raises RuntimeError with NVFlare's output if it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # One more for the first round, and one whose start ends the last timed round.
    num_rounds = work.num_rounds + 2
    numbers = (work.num_clients, work.num_values, num_rounds)
    environment = {
        **os.environ,
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "NVFLARE_POC_WORKSPACE": str(folder / "poc"),
        # The console stores its user data there.
        "HOME": str(folder),
    }
    command = [str(bin_folder / "python"), str(JOB), str(folder), *map(str, numbers)]
    try:
        completed = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            timeout=LIMIT_S,
        )
    finally:
        _end_all(folder)
    sites = [json.loads(path.read_text()) for path in sorted(folder.glob("site-*.json"))]
    if completed.returncode or len(sites) != work.num_clients or any(len(site) != num_rounds for site in sites):
        raise RuntimeError(f"nvflare: got rounds {[len(site) for site in sites]}: {completed.stdout}{completed.stderr}")
    first_s = [min(came) for came in zip(*sites, strict=True)]
    return seconds_between(first_s[1:])


def _end_all(folder: Path) -> None:
    """End the processes that the POC has left: first the scripts that restart the others."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
            if str(folder).encode() in words:
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            # The process has already ended.
            continue
