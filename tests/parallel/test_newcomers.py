"""Newcomers to a running job: a mistyped command, a second launcher, and a machine that joins while ranks save."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from parallel.machines import EVERY, NUM_STEPS, WAIT_S, Machine, Place, empty_place, family

SLOW = """
import os, signal, sys, time
from pathlib import Path
def main(arguments):
    (folder,) = arguments
    def save(number, frame):
        time.sleep(33.0)
        Path(folder, "saved").touch()
        sys.exit()
    signal.signal(signal.SIGTERM, save)
    Path(folder, f"begun-{os.getpid()}").touch()
    while True:
        time.sleep(0.1)
"""
"""A rank that takes 33 s to save. torch gives it 30 s."""
RUN_SLOW = """
import sys
from pathlib import Path
from fanin.datacenter.jobs.torchrun import Elastic, run_ranks
program, folder, endpoint = sys.argv[1:]
run_ranks([program, folder], 1, Path(folder), Elastic(max_restarts=1, max_nodes=2, endpoint=endpoint))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Yield a job's folder that has no machine yet."""
    monkeypatch.setenv("FANIN_TEST_FOLDER", str(tmp_path))
    with empty_place(tmp_path) as empty:
        yield empty


@pytest.mark.nightly
def test_a_mistyped_command_joins_no_job_and_harms_none(place: Place) -> None:
    first, second = place.start_two("paced")
    configs = {path: path.read_bytes() for path in (place.folder / "state").glob("config-*.json")}
    place.pace(3.0)  # the job does not end before the other command begins
    message = Machine(place.folder, "other", place.port, "--steps", "3").fail()
    place.pace(0.0)
    assert first.end() == second.end()
    assert message.startswith("fanin train: datacenter job: another job uses this endpoint, or its config,")
    assert len(configs) == 1
    assert all(path.read_bytes() == content for path, content in configs.items())
    assert place.steps() == list(range(NUM_STEPS))


@pytest.mark.nightly
def test_the_command_of_a_killed_launcher_waits_for_its_ranks_and_resumes(place: Place) -> None:
    place.write("paced")
    place.pace(0.5)
    out = place.folder / "out.json"
    command = [sys.executable, "-m", "fanin.commands.main", "train", place.folder / "train.toml", "--json", out]
    command += ["--state", place.folder / "state"]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    # Its ranks save when they stop, in the step after this one. They have not saved there by themselves.
    place.wait_until(lambda: len(place.steps()) > EVERY)
    # The current step of its ranks takes longer than the start of another launcher.
    place.pace(WAIT_S)
    time.sleep(0.5)
    first.kill()
    first.wait()
    second = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert second.stderr is not None
    waiting = second.stderr.readline()
    place.pace(0.0)
    _, err = second.communicate(timeout=WAIT_S)
    assert (second.returncode, err) == (0, "")
    assert waiting.startswith(f"folder {place.folder}/")
    assert waiting.endswith(": waiting for another job there to end\n")
    report = json.loads(out.read_text())
    assert (len(report["loss"]), report["stopped"]) == (NUM_STEPS, False)
    steps = place.steps()
    assert steps == list(range(steps[0], NUM_STEPS))
    assert steps[0] % EVERY, "the ranks of the killed launcher saved before it began"


@pytest.mark.nightly
def test_ranks_may_save_for_a_new_machine_for_longer_than_torchs_timeout(place: Place) -> None:
    program, launchers = place.folder / "slow.py", []
    program.write_text(SLOW)
    for _ in range(2):
        command = [sys.executable, "-c", RUN_SLOW, str(program), str(place.folder), f"127.0.0.1:{place.port}"]
        launchers.append(subprocess.Popen(command))
        place.wait_until(lambda: any(place.folder.glob("begun-*")))
    place.wait_until(lambda: len(list(place.folder.glob("begun-*"))) > 1)
    is_saved = (place.folder / "saved").exists()
    for launcher in launchers:
        for pid in (launcher.pid, *family(launcher.pid)):
            os.kill(pid, signal.SIGKILL)
        launcher.wait()
    assert is_saved
