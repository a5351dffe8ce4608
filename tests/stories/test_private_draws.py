"""The draws of a Flower app on a device: the coordinator cannot compute them, and a restarted device repeats them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from support.flower_apps import write_app
from support.hosted import Hosted
from support.values import PUBLISHER, plan

from fanin.edge.bundles.arrays import write_arrays

NUM_VALUES: Final = 4
PLAN_SEED: Final = plan().training.seed
NOISY_APP: Final = """
import json
import os
import random
import signal
from pathlib import Path

import numpy as np
from flwr.client import ClientApp, NumPyClient
from flwr.client.mod import LocalDpMod

class Client(NumPyClient):
    def __init__(self, log):
        self.log = Path(log)

    def fit(self, parameters, config):
        draws = [random.random(), *np.random.normal(size=4)]
        is_first = not self.log.exists()
        with self.log.open("a") as file:
            file.write(json.dumps(draws) + "\\n")
        if is_first:
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
        return [parameters[0] + np.float32(0.1)], 1, {}

def client_fn(context):
    return Client(context.node_config["log"]).to_client()

app = ClientApp(client_fn=client_fn, mods=[LocalDpMod(1.0, 0.1, 1.0, 1e-5)])
"""
"""It logs its draws, and in its first training it kills its device."""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    """A coordinator, and the files of its devices."""
    host = Hosted(tmp_path).start()
    (tmp_path / "ca.pem").write_bytes(host.ca)
    (tmp_path / "device.token").write_text(host.device_token)
    (tmp_path / "publisher.pub").write_text(PUBLISHER.public)
    yield host
    host.stop()


def join(host: Hosted, project: Path, device: str) -> "subprocess.Popen[str]":
    """Start ``fanin join`` with the app. All devices have partition 0, the default."""
    folder = host.folder
    command = [sys.executable, "-m", "fanin.commands.main", "join", "--server", host.address, "--ca", folder / "ca.pem"]
    command += ["--token-file", folder / "device.token", "--publisher", folder / "publisher.pub", "--max-updates", "1"]
    command += ["--state", folder / device, "--flower", "noisy:app", "--node-config", f'log="{log_of(host, device)}"']
    return subprocess.Popen(list(map(str, command)), cwd=project, stderr=subprocess.PIPE, text=True)


def log_of(host: Hosted, device: str) -> Path:
    """Return the file in which a device's app logs its draws."""
    return host.folder / f"{device}.draws"


def run_devices(host: Hosted, project: Path, devices: tuple[str, ...]) -> dict[str, str]:
    """Run devices until they end. Return the standard error of each."""
    with ExitStack() as stack:
        processes = {device: stack.enter_context(join(host, project, device)) for device in devices}
        return {device: process.communicate(timeout=120)[1] for device, process in processes.items()}


def test_the_coordinator_does_not_know_what_an_app_draws_and_a_restarted_device_does(
    host: Hosted, tmp_path: Path
) -> None:
    project = write_app(tmp_path / "app", "noisy", NOISY_APP)
    zeros = {"w": np.zeros(NUM_VALUES, np.float32)}
    host.start_run(
        plan(buffer=2, max_rounds=1), write_arrays(zeros, tmp_path / "bundle", PUBLISHER, "zeros"), PUBLISHER
    )
    devices = ("kept", "lost")
    first_logs = run_devices(host, project, devices)
    assert not any("secret" in log for log in first_logs.values()), first_logs
    secret = tmp_path / "lost" / "device.secret"
    if secret.exists():
        assert secret.stat().st_mode & 0o777 == 0o600
        secret.unlink()
    logs = run_devices(host, project, devices)
    (kept, again), (before, after) = (
        [json.loads(line) for line in log_of(host, device).read_text().splitlines()] for device in devices
    )
    assert kept == again, "the same Assignment after a restart draws the same"
    assert kept[0] != before[0] and kept[1:] != before[1:], "two devices of one partition draw the same"
    assert known_to_the_coordinator() not in (kept[1:], before[1:], after[1:])
    assert before[0] != after[0] and before[1:] != after[1:]
    assert "device.secret" in logs["lost"] and "lost" in logs["lost"] and "device.secret" not in logs["kept"]
    for log in (*first_logs.values(), *logs.values()):
        assert log.count("LocalDpMod") - log.count("LocalDpMod:") == 1, log
    assert len(host.published_versions()) == 1


def known_to_the_coordinator() -> list[float]:
    """Return the first draws of numpy from the Plan's seed, partition 0 and Round 1."""
    seed = int(np.random.SeedSequence((PLAN_SEED, 0, 1)).generate_state(1)[0])
    draws: list[float] = np.random.RandomState(seed).normal(size=4).tolist()
    return draws
