"""A Flower app in a child process: an interruption ends it, and its errors affect one device only."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from support.flower_apps import write_app
from support.values import PUBLISHER

from fanin.clients.device.conditions import Interrupted
from fanin.clients.device.contract import Countdown, example_assignment, example_model
from fanin.clients.flower.process import FlowerProcess
from fanin.clients.flower.states import FlowerStates
from fanin.clients.flower.task import AppFailed, FlowerSettings, FlowerTask
from fanin.clients.flower.trainer import FlowerTrainer
from fanin.edge.bundles.arrays import write_arrays

WAIT_S: Final = 60.0
ARRAYS: Final = {"layer.weight": np.ones((2, 3), np.float32)}

SLOW_APP: Final = """
import os, sys, time
from pathlib import Path
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(msg, context):
    Path("pid").write_text(str(os.getpid()))
    how = context.run_config["how"]
    if how == "slow":
        time.sleep(600)
    if how == "crash":
        os._exit(7)
    if how == "exit":
        sys.exit("enough")
    raise ZeroDivisionError("division by zero")
"""


def task() -> FlowerTask:
    return FlowerTask(run_id="run", round=1, seed=1, config={}, evaluate_config={}, arrays=ARRAYS, state=b"")


@pytest.fixture
def slow_process(tmp_path: Path) -> Iterator[FlowerProcess]:
    folder = write_app(tmp_path / "app", "slow", SLOW_APP)
    with FlowerProcess(FlowerSettings(app="slow:app", folder=folder, run_config="how='slow'")) as process:
        yield process


def is_alive(pid: int) -> bool:
    try:
        # A zombie process has no command line.
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except FileNotFoundError:
        return False


def test_an_interruption_ends_an_app_that_trains(slow_process: FlowerProcess, tmp_path: Path) -> None:
    pid_file = tmp_path / "app" / "pid"

    def should_continue() -> bool:
        if pid_file.exists() and pid_file.read_text():
            raise Interrupted("may_work no longer holds")
        return True

    with pytest.raises(Interrupted):
        slow_process.run(task(), should_continue)
    pid = int(pid_file.read_text())
    assert not is_alive(pid)
    # The next training starts another child.
    pid_file.unlink()
    with pytest.raises(Interrupted):
        slow_process.run(task(), should_continue)
    assert int(pid_file.read_text()) != pid


@pytest.mark.parametrize(
    ("mode", "message", "has_traceback"),
    [
        ("crash", "flower app slow:app: its process ended with status 7, expected a reply", False),
        ("exit", "flower app slow:app: train: SystemExit: enough", True),
        ("raise", "flower app slow:app: train: ZeroDivisionError: division by zero", True),
    ],
)
def test_the_error_of_an_app_names_it_and_the_log_has_its_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str, message: str, has_traceback: bool
) -> None:
    folder = write_app(tmp_path / "app", "slow", SLOW_APP)
    bundle = write_arrays(ARRAYS, tmp_path / "bundle", PUBLISHER, "slow")
    states = FlowerStates(tmp_path / "states")
    with FlowerProcess(FlowerSettings(app="slow:app", folder=folder, run_config=f"how='{mode}'")) as process:
        for _ in range(2):
            with pytest.raises(AppFailed, match=re.escape(message)) as excinfo:
                FlowerTrainer(process, states).train(example_model(bundle), example_assignment(bundle), Countdown())
            assert "\n" not in str(excinfo.value)
    assert caplog.text.count("Traceback (most recent call last)") == int(has_traceback)
    assert ("slow.py" in caplog.text) is has_traceback


def test_no_child_outlives_its_client(tmp_path: Path) -> None:
    folder, before = write_app(tmp_path / "app", "slow", SLOW_APP), set(children())
    with FlowerProcess(FlowerSettings(app="slow:app", folder=folder)):
        (child,) = set(children()) - before
        assert is_alive(child)
    assert not is_alive(child) and set(children()) == before
    with pytest.raises(AppFailed):
        FlowerProcess(FlowerSettings(app="absent:app", folder=folder))
    assert set(children()) == before


def children() -> list[int]:
    return [int(text) for text in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]


def test_a_child_that_cannot_import_the_app_is_reported(tmp_path: Path) -> None:
    with pytest.raises(AppFailed, match="FN-0905"):
        FlowerProcess(FlowerSettings(app="absent:app", folder=tmp_path))


DEVICE: Final = """
import sys
from pathlib import Path

import numpy as np

from fanin.clients.flower.process import FlowerProcess
from fanin.clients.flower.task import FlowerSettings, FlowerTask

arrays = {"layer.weight": np.ones((2, 3), np.float32)}
with FlowerProcess(FlowerSettings(app="slow:app", folder=Path(sys.argv[1]), run_config="how='slow'")) as process:
    task = FlowerTask(run_id="run", round=1, seed=1, config={}, evaluate_config={}, arrays=arrays, state=b"")
    process.run(task, lambda: True)
"""


def wait_until(condition: Callable[[], bool]) -> bool:
    """Wait for the condition. Return whether it becomes true in time."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_child_ends_with_its_device_however_that_ends(tmp_path: Path, number: signal.Signals) -> None:
    folder = write_app(tmp_path / "app", "slow", SLOW_APP)
    pid_file = folder / "pid"
    device = subprocess.Popen([sys.executable, "-c", DEVICE, folder], stderr=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: pid_file.exists() and bool(pid_file.read_text()))
        pid = int(pid_file.read_text())
        assert is_alive(pid)
        device.send_signal(number)
        assert device.wait(WAIT_S) != 0
        assert wait_until(lambda: not is_alive(pid))
    finally:
        device.kill()
        device.wait()
