"""A job under torchrun: its result, its errors, and that nothing of it outlives an interrupted caller."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fanin.clients.digits import split_digits
from fanin.datacenter.job import train
from fanin.datacenter.jobfiles import TrainConfig, TrainSettings, write_config
from fanin.datacenter.launch import launch
from fanin.protos.errors import Conflict, InvalidInput

APPS = Path(__file__).with_name("apps.py")
LAUNCH = """
import signal, sys
# A shell that starts the tests in the background has them ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from fanin.datacenter.job import train
from fanin.datacenter.jobfiles import read_config
from fanin.datacenter.launch import launch
launch(read_config(Path(sys.argv[1])), 2)
"""


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """A short job on the public digits."""
    public = split_digits(1, 1.0, 0).public
    np.savez(tmp_path / "data.npz", x=public.x, y=public.y)
    return TrainConfig(
        app="fanin.datacenter.models.digits_app:app",
        data=tmp_path / "data.npz",
        num_validation=20,
        training=TrainSettings(learning_rate=0.05, max_epochs=4),
        folder=tmp_path / "job",
    )


def test_two_ranks_bring_what_one_process_does(config: TrainConfig) -> None:
    config.folder.mkdir()
    (config.folder / "metrics.json").write_text("left from an earlier job")
    two = launch(config, 2)
    alone = train(config, 0, 1)
    assert (two.num_ranks, alone.num_ranks) == (2, 1)
    assert (two.table, len(two.trained.epochs), two.trained.flat) == (alone.table, 4, False)
    assert np.abs(two.parameters - alone.parameters).max() < 1e-5
    for one, other in zip(two.trained.epochs, alone.trained.epochs, strict=True):
        assert one.train_loss == pytest.approx(other.train_loss, abs=1e-5)
    more = train(dataclasses.replace(config, initial=config.folder / "parameters.bin"), 0, 1)
    assert more.trained.epochs[0].train_loss < alone.trained.epochs[-1].train_loss, "it goes on from there"


def test_an_error_of_ours_comes_back_as_itself(config: TrainConfig) -> None:
    with pytest.raises(InvalidInput, match=r"mesh: dp_replicate 3 = 3 ranks, got a world of 2; start 3 processes"):
        launch(dataclasses.replace(config, dp_replicate=3), 2)
    with pytest.raises(InvalidInput, match="got 0 processes, expected at least 1"):
        launch(config, 0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("crashing", r"(?s)1/stderr\.log ends:\n.*ArithmeticError: the App broke on rank 1"),
        # Nobody wrote a last word but torchrun, or the rank that waited for it.
        ("killed", r"(torchrun|stderr)\.log ends:\n"),
    ],
)
def test_a_rank_that_fails_is_told_with_the_end_of_its_log(config: TrainConfig, name: str, expected: str) -> None:
    with pytest.raises(Conflict, match=r"datacenter job: torchrun ended with status 1; ") as caught:
        launch(dataclasses.replace(config, app=f"{APPS}:{name}"), 2)
    assert re.search(expected, str(caught.value))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: object, seconds: float) -> None:
    assert callable(condition)
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.05)


@pytest.mark.parametrize("victim", ["caller", "agent"])
def test_nothing_outlives_an_interrupted_caller_or_a_killed_agent(config: TrainConfig, victim: str) -> None:
    config.folder.mkdir()
    folder = config.folder.parent
    waiting = dataclasses.replace(config, app=f"{APPS}:sleeping")
    path = write_config(dataclasses.replace(waiting, folder=folder))
    # The config that is read names the job's own folder; this one is only the way to hand it over.
    path.write_text(path.read_text().replace(f'"folder": "{folder}"', f'"folder": "{config.folder}"'))
    environment = os.environ | {"FANIN_TEST_FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
    caller = subprocess.Popen([sys.executable, "-c", LAUNCH, path], env=environment, stderr=subprocess.PIPE, text=True)
    left = [folder / f"pids-{rank}" for rank in range(2)]
    wait_until(lambda: all(one.exists() for one in left), 60.0)
    pids = [[int(pid) for pid in one.read_text().split()] for one in left]
    if victim == "caller":
        caller.send_signal(signal.SIGINT)
    else:
        os.kill(pids[0][1], signal.SIGKILL)
    _, stderr = caller.communicate(timeout=30.0)
    assert ("KeyboardInterrupt" if victim == "caller" else "torchrun ended with status -9") in stderr
    wait_until(lambda: not any(is_alive(pid) for row in pids for pid in row), 5.0)
