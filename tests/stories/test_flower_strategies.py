"""A strategy of the operator at ``fanin serve``, over TLS, with devices of a Flower app and a killed coordinator."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from support.commands import Fanin, fanin_in_process, one_line
from support.flower_apps import write_app
from support.strategies import MODULE, write_strategies

START_S: Final = 30.0
APP: Final = """
import numpy as np
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp


class Client(NumPyClient):
    def __init__(self, partition):
        self.partition = partition

    def get_parameters(self, config):
        return [np.zeros((2, 3), "float32"), np.ones(2, "float32")]

    def fit(self, parameters, config):
        return [value + 2.0 ** -self.partition for value in parameters], 10 * (self.partition + 1), {}

    def evaluate(self, parameters, config):
        return 0.5, 4, {"acc": float(self.partition)}


app = ClientApp(client_fn=lambda context: Client(context.node_config["partition-id"]).to_client())
"""
PLAN: Final = """
name = "run"
bundle = "flower-bundle"
cohort = { concurrency = 3, buffer = 3, quorum = 3 }
training = { learning_rate = 0.1 }
stop = { max_rounds = 3 }
statistics = [{ name = "evaluate.acc", bound = 1_099_511_627_776 }]
flower = { strategy = "own_strategies:Own", strategy_options = { step = 0.25 }, strategy_is_pure = true }
"""


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


class Processes:
    """A coordinator and devices in processes of their own, which end with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.strategies = write_strategies(folder / "strategies")
        self.app = write_app(folder / "app", "raised_client", APP)
        self._listen = "127.0.0.1:0"
        self._started = ExitStack()

    @property
    def operator(self) -> list[object]:
        """The options of an operator's command."""
        tokens = self.state / "tokens"
        return [
            *("--server", self._listen, "--ca", self.state / "tls" / "ca.pem"),
            *("--token-file", tokens / "operator.token"),
        ]

    def serve(self, *words: str) -> "subprocess.Popen[bytes]":
        """Start the coordinator, and wait until it serves."""
        address = self.state / "address"
        address.unlink(missing_ok=True)
        process = self._start(
            self.strategies, "serve", "--state", self.state, "--listen", self._listen, "--no-web", *words
        )
        until = time.monotonic() + START_S
        while not address.exists():
            assert process.poll() is None and time.monotonic() < until, (self.folder / "serve.log").read_text()
            time.sleep(0.05)
        self._listen = address.read_text().strip()
        return process

    def take_part(self, num_updates: int) -> None:
        """Let three devices take part until they have sent some Updates."""
        devices = [self._join(partition, num_updates) for partition in range(3)]
        for device in devices:
            assert device.wait(120) == 0, (self.folder / "join.log").read_text()

    def _join(self, partition: int, num_updates: int) -> "subprocess.Popen[bytes]":
        return self._start(
            self.app,
            *("join", "--server", self._listen, "--ca", self.state / "tls" / "ca.pem"),
            *("--token-file", self.state / "tokens" / "device.token", "--publisher", self.folder / "publisher.pub"),
            *("--state", self.folder / f"device-{partition}", "--partition", partition),
            *("--flower", "raised_client:app", "--max-updates", num_updates),
        )

    def close(self) -> None:
        """Kill all processes."""
        self._started.close()

    def _start(self, folder: Path, command: str, *words: object) -> "subprocess.Popen[bytes]":
        log = self._started.enter_context((self.folder / f"{command}.log").open("ab"))
        arguments = [sys.executable, "-m", "fanin.commands.main", command, *map(str, words)]
        process = subprocess.Popen(arguments, cwd=folder, stdout=log, stderr=log)
        self._started.callback(process.wait)
        self._started.callback(process.kill)
        return process


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """The processes of one test."""
    started = Processes(tmp_path)
    yield started
    started.close()


@pytest.mark.nightly
def test_a_strategy_of_the_operator_survives_a_killed_coordinator(
    processes: Processes, fanin: Fanin, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = processes.folder
    monkeypatch.chdir(processes.app)
    bundle = ("bundle", "--flower", "raised_client:app", "--out", "flower-bundle", "--key", folder / "publisher.key")
    assert fanin(*bundle).status == 0
    (processes.app / "plan.toml").write_text(PLAN)
    run = ("run", "plan.toml", "--run-id", "run", "--key", folder / "publisher.key")
    coordinator = processes.serve()
    refused = fanin(*run, *processes.operator)
    assert refused.status == 1
    assert f"got '{MODULE}:Own', expected one of flwr.serverapp.strategy or of [], which may run here" in refused.err
    coordinator.kill()
    coordinator.wait()
    coordinator = processes.serve("--strategy", f"{MODULE}:Own")
    outcome = fanin(*run, *processes.operator)
    assert outcome.status == 0, outcome.err
    assert f"flower.strategy: {MODULE}:Own reads all updates of a Round at once, up to 3, in a process" in outcome.err
    processes.take_part(num_updates=1)
    # After Round 1, when the next one is open.
    coordinator.kill()
    coordinator.wait()
    processes.serve("--strategy", f"{MODULE}:Own")
    processes.take_part(num_updates=2)
    watched = fanin("watch", "run", *processes.operator)
    assert watched.status == 0, watched.err
    to = ("--out", folder / "v.npz", "--publisher", folder / "publisher.pub")
    fetched = fanin("fetch", "run", *to, *processes.operator)
    assert fetched.status == 0, fetched.err
    # The strategy counts its Rounds: 0.25 x (1 + 2 + 3), also after the kill.
    moved = 3 * (1 + 0.5 + 0.25) / 3 + 0.25 * 6
    with np.load(folder / "v.npz") as file:
        assert np.allclose(file["0"], moved, atol=1e-6)
        assert np.allclose(file["1"], 1 + moved, atol=1e-6)
    monkeypatch.chdir(processes.strategies)
    verify = ("verify", "run", "--state", processes.state)
    assert "got 'own_strategies:Own', expected one of flwr.serverapp.strategy" in one_line(fanin(*verify), "verify")
    verified = fanin(*verify, "--strategy", f"{MODULE}:Own")
    assert (verified.status, verified.out.count(": verified\n")) == (0, 4), verified
