"""A simulation that is killed resumes from its record, and ends with the bits of one that was not."""

import json
import time
from pathlib import Path

import pytest
from support.apps import write_module_app
from support.processes import Running, start

WAIT_S = 120.0
COHORT, ROUNDS = 3, 8


def simulation(folder: Path, record: str) -> Running:
    """Start a simulation of a second or more that keeps a record."""
    app, out = write_module_app(folder), folder / f"{record}.json"
    command = ["simulate", app, "--clients", "6", "--cohort", COHORT, "--rounds", ROUNDS, "--seed", 5]
    command += ["--set", "training.epochs=20", "--resume", folder / record, "--json", out]
    return start(("-m", "fanin.commands.main", *map(str, command)), folder / f"{record}.log")


def kill_after(running: Running, folder: Path, num_trainings: int) -> None:
    """Kill a simulation as soon as its record has this many trainings."""
    until = time.monotonic() + WAIT_S
    while len(list(folder.glob("trainings/*.npz"))) < num_trainings:
        assert running.process.poll() is None and time.monotonic() < until, running.text()
        time.sleep(0.002)
    running.kill()


@pytest.mark.nightly
def test_a_killed_simulation_resumes_with_the_same_bits(tmp_path: Path) -> None:
    whole = simulation(tmp_path, "whole")
    assert whole.wait(WAIT_S) == 0, whole.text()
    for num_trainings in (2, 7, 12):
        kill_after(simulation(tmp_path, "killed"), tmp_path / "killed", num_trainings)
        assert num_trainings <= len(list((tmp_path / "killed" / "trainings").glob("*.npz"))) < COHORT * ROUNDS
        assert not (tmp_path / "killed.json").exists()
    resumed = simulation(tmp_path, "killed")
    assert resumed.wait(WAIT_S) == 0, resumed.text()
    expected, result = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "killed"))
    assert result["versions"] == expected["versions"] and len(set(expected["versions"])) == ROUNDS + 1
    assert result["rounds"][1:] == expected["rounds"][1:]
