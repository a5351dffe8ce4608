"""Ctrl-C in a terminal, which sends SIGINT to all processes of a command: ``fanin simulate`` with worker processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.flower_apps import write_app

CLIENTS = """
import time

import numpy as np
from flwr.client import NumPyClient


class Client(NumPyClient):
    def get_parameters(self, config):
        return [np.zeros(2, np.float32)]

    def fit(self, parameters, config):
        time.sleep(0.3)
        return [parameters[0] + 1], 1, {}
"""


@pytest.mark.nightly
def test_ctrl_c_in_a_terminal_keeps_the_rounds_of_worker_processes(tmp_path: Path) -> None:
    folder, file = write_app(tmp_path / "app", "sleepy_app", CLIENTS), tmp_path / "rounds.csv"
    words = ["--flower", "sleepy_app:Client", "--clients", "4", "--cohort", "4", "--rounds", "50", "--processes", "2"]
    command = [sys.executable, "-m", "fanin.commands.main", "simulate", *words, "--csv", str(file)]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            assert any(line.startswith("round    1") for line in process.stdout)
            # The workers are training Round 2.
            os.killpg(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert f"stopped after round 1; the result so far is in {file}" in err
    assert "Traceback" not in err
    assert len(file.read_text().splitlines()) == 3
