"""A study that is killed goes on with the points that are missing, and its table is that of a study without a stop."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import pytest

SCRIPT: Final = """
import json
import sys

import torch
from torch import nn

from fanin.edge.export import App
from fanin.simulation import Iid, SimulationSettings, Study, load_data, partition

torch.manual_seed(3)
data = load_data("digits")
net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
app = App(name="digits", module=net, calibration=data.train.inputs["x"][:64], batch_size=8, num_classes=10)
study = Study(folder=sys.argv[1], grid={"training.learning_rate": (0.01, 0.1)}, seeds=(0, 1))
settings = SimulationSettings(test=data.test, quiet=True)
result = study.run(app, partition(data.train, 8, Iid()), cohort=4, rounds=12, settings=settings)
json.dump([[point.seconds, point.plan_sha256, point.table["test_loss"]] for point in result.points], sys.stdout)
"""
WAIT_S: Final = 120.0


def command(folder: Path, script: Path) -> list[str]:
    return [sys.executable, str(script), str(folder)]


def points_of(folder: Path, script: Path) -> list[Any]:
    run = subprocess.run(command(folder, script), capture_output=True, text=True, check=True, timeout=300)
    points: list[Any] = json.loads(run.stdout)
    return points


@pytest.mark.nightly
def test_a_killed_study_has_the_table_of_one_without_a_stop(tmp_path: Path) -> None:
    script, folder = tmp_path / "run.py", tmp_path / "killed"
    script.write_text(SCRIPT)
    process = subprocess.Popen(command(folder, script), stdout=subprocess.DEVNULL)
    end_s = time.monotonic() + WAIT_S
    # One point has ended, and the next one has some trainings.
    while len(list(folder.glob("points/*.json"))) < 1 or len(list(folder.glob("app-0/trainings/*.npz"))) < 3:
        assert process.poll() is None and time.monotonic() < end_s
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {json.loads(path.read_text())["seconds"] for path in folder.glob("points/*.json")}
    assert 1 <= len(kept) < 4
    resumed, whole = points_of(folder, script), points_of(tmp_path / "whole", script)
    assert kept <= {seconds for seconds, _, _ in resumed}
    assert [point[1:] for point in resumed] == [point[1:] for point in whole]
