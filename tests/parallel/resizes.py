"""An elastic job on two machines, one of which is stopped. Both launchers and all ranks are forks of this process.

    programs.run("resizes", folder, port)

The folder has ``train.toml``. Each machine writes its result to ``machine-0.json`` or ``machine-1.json``.
"""

import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, NoReturn

from parallel.agents import main as run_agent

from fanin.commands.train import main as run_train
from fanin.datacenter.jobs import torchrun

WAIT_S: Final = 300.0
STOP_AFTER: Final = 4
"""Steps of both machines before the second one is stopped."""


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.05)


def fork_agent(command: Sequence[str], logs: Path, environment: Mapping[str, str], locks: Sequence[int]) -> int:
    """Run an agent in a fork until it ends, and return its exit status. Stop it if this process is stopped."""
    words = command[command.index("fanin.datacenter.jobs.ranks") + 1 :]
    # No third machine joins, so the others wait only shortly for one. The end of a machine is detected in 10 s, not 15.
    default = f"last_call_timeout={torchrun.LAST_CALL_S}"
    words = [
        word.replace(default, "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=10") for word in words
    ]

    def run() -> NoReturn:
        log = os.open(logs / torchrun.TORCHRUN_LOG, os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = 1
        try:
            status = run_agent([str(Path.cwd()), json.dumps(dict(environment)), *words])
        except SystemExit as exc:
            status = exc.code if isinstance(exc.code, int) else 1
        finally:
            os._exit(status)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    try:
        process.join()
    finally:
        if process.is_alive():
            process.terminate()
            process.join()
    assert process.exitcode is not None
    return process.exitcode


def run_machine(folder: Path, port: int, number: int) -> NoReturn:
    """Run ``fanin train`` as a machine does."""
    torchrun.AGENT_RUNNER.set(fork_agent)
    words = [folder / "train.toml", "--json", folder / f"machine-{number}.json", "--state", folder / "state"]
    words += ["--nodes", "1:2", "--endpoint", f"127.0.0.1:{port}", "--restarts", "1"]
    status = run_train([str(word) for word in words])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def is_listening(port: int) -> bool:
    """Whether the first machine keeps the store where both meet."""
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


def main(arguments: Sequence[str]) -> int:
    """Run both machines, stop the second one, and return 0 if both have ended with status 0."""
    folder, port = Path(arguments[0]), int(arguments[1])
    os.environ["FANIN_TEST_FOLDER"] = str(folder)
    rows, machines = folder / "state" / "rows.jsonl", list[BaseProcess]()
    for number in range(2):
        machine = multiprocessing.get_context("fork").Process(target=run_machine, args=(folder, port, number))
        machine.start()
        machines.append(machine)
        wait_until(lambda: is_listening(port))
    wait_until(lambda: rows.exists() and rows.read_text().count("\n") >= STOP_AFTER)
    machines[1].terminate()
    machines[1].join(WAIT_S)
    # The steps of the first machine need no pace.
    (folder / "pace.new").write_text("0")
    (folder / "pace.new").rename(folder / "pace")
    for machine in machines:
        machine.join(WAIT_S)
        if machine.is_alive():
            machine.kill()
    return int(any(machine.exitcode for machine in machines))
