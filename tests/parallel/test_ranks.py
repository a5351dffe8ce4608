"""The start of ranks: they are forked from one process of the machine, which imports once and survives their end."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.nightly import in_ci

from fanin.datacenter.jobs.ranks import FORK_SERVER, SPAWN
from fanin.datacenter.jobs.torchrun import Elastic, failure_reason, run_ranks

PROGRAM = """
import gc, os, signal, sys, time
from pathlib import Path
imported = "fanin.datacenter.jobs.job" in sys.modules and gc.get_freeze_count() > 100_000

def main(arguments):
    folder, rank, attempt = Path(arguments[0]), os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    blocked = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    (folder / f"parent-{attempt}-{rank}").write_text(f"{os.getppid()} {imported} {blocked}")
    if attempt == "0":
        if rank == "1":
            # The agent ends the other rank, which must have written first.
            first = folder / "parent-0-0"
            while not first.exists() or not first.read_text():
                time.sleep(0.01)
            raise ArithmeticError("no number")
        signal.pause()
    if rank == "1" and imported:
        # As a scheduler that stops all processes of a job. The parent is the fork server; a spawned rank has the agent.
        os.kill(os.getppid(), signal.SIGTERM)
        sys.exit()
    return 0
"""
START = """
import tempfile, sys
from fanin.datacenter.jobs.ranks import start_server
tempfile.tempdir = sys.argv[1]
print(start_server(()), "torch" in sys.modules)
"""


def long_folder(folder: Path) -> Path:
    """Create a folder whose sockets have no valid path."""
    path = folder / ("long" * 30)
    path.mkdir()
    return path


@pytest.mark.parametrize("method", in_ci((FORK_SERVER, SPAWN), (FORK_SERVER,)))
def test_ranks_of_all_attempts_are_forked_from_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    if method == SPAWN:
        monkeypatch.setenv("TMPDIR", str(long_folder(tmp_path)))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    status = run_ranks([str(program), str(tmp_path)], 2, tmp_path, Elastic(max_restarts=1))
    assert status == 0, failure_reason(tmp_path, status)
    rows = {path.name: path.read_text().split() for path in tmp_path.glob("parent-*-*")}
    assert set(rows) == {"parent-0-0", "parent-0-1", "parent-1-0", "parent-1-1"}
    assert len({parent for parent, _, _ in rows.values()}) == 1
    is_forked = str(method == FORK_SERVER)
    assert {tuple(rest) for _, *rest in rows.values()} == {(is_forked, "False")}
    (log,) = tmp_path.glob("logs/*/attempt_0/1/stderr.log")
    assert "ArithmeticError: no number" in log.read_text()


def test_ranks_are_spawned_where_the_path_of_a_socket_is_too_long(tmp_path: Path) -> None:
    for folder, method in ((tmp_path, FORK_SERVER), (long_folder(tmp_path), SPAWN)):
        completed = subprocess.run([sys.executable, "-c", START, folder], capture_output=True, text=True, check=True)
        assert completed.stdout.split() == [method, "False"]
