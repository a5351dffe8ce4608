"""A study that is killed or interrupted goes on with the points that are missing.

Its table is that of a study without a stop.
"""

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


APP: Final = """
import torch
from fanin.edge.export import App
from fanin.simulation import load_data

torch.manual_seed(3)
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
inputs = load_data("digits").train.inputs["x"][:64]
app = App(name="digits", module=net, calibration=inputs, batch_size=8, num_classes=10)
"""
STUDY: Final = """
app = "app.py:app"
folder = "points-of"
cohort = 4
rounds = 40
seeds = [0, 1]
data = {name = "digits", clients = 8, by = "iid"}
plan = {training.learning_rate = 0.1}
[methods."FedAvg, plain"]
"""


@pytest.mark.nightly
def test_ctrl_c_keeps_the_points_of_fanin_study_and_a_second_call_goes_on(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "study.toml").write_text(STUDY)
    words = [sys.executable, "-m", "fanin.commands.main", "study", "study.toml", "--quiet", "--json"]
    folder, end_s = tmp_path / "points-of", time.monotonic() + WAIT_S
    process = subprocess.Popen([*words, "first.json"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while not list(folder.glob("points/*.json")) or not list(folder.glob("app-0/trainings/*.npz")):
        assert process.poll() is None and time.monotonic() < end_s
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130 and "fanin study: stopped after 1 points" in errors and "Traceback" not in errors
    first = json.loads((tmp_path / "first.json").read_text())
    assert not first["is_complete"] and [point["seed"] for point in first["points"]] == [0]
    subprocess.run([*words, "second.json"], cwd=tmp_path, check=True, timeout=WAIT_S)
    second = json.loads((tmp_path / "second.json").read_text())
    assert second["is_complete"] and second["points"][0] == first["points"][0]
    assert [(point["seed"], point["error"]) for point in second["points"]] == [(0, ""), (1, "")]
