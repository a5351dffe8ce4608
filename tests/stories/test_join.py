"""``fanin join`` as a process: its reports of Rounds, and ``fanin infer`` on its folder afterwards."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.commands import Fanin, fanin_in_process, one_line, uncoded
from support.hosted import Hosted
from support.linear import NUM_CLASSES, NUM_INPUTS, linear_graphs
from support.values import PUBLISHER, plan

from fanin.edge.assembly.assemble import assemble

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"
STEPS = [
    "enrolled; waiting for work",
    "round 1 of run run: fetching version 0",
    "round 1 of run run: training",
    "round 1 of run run: uploading",
    "round 1 of run run: update accepted (1 so far); waiting for work",
]


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    """A coordinator with a Run of one Round for one device, and the device's files."""
    host = Hosted(tmp_path).start()
    host.start_run(plan(buffer=1, max_rounds=1), assemble(linear_graphs(), tmp_path / "bundle", PUBLISHER), PUBLISHER)
    (tmp_path / "ca.pem").write_bytes(host.ca)
    (tmp_path / "token").write_text(host.device_token)
    (tmp_path / "publisher.pub").write_text(PUBLISHER.public)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((20, NUM_INPUTS)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=rng.integers(0, NUM_CLASSES, 20).astype(np.int32))
    yield host
    host.stop()


def join(host: Hosted, *options: str) -> str:
    """Take part in one Round in a process of its own, and return its standard error."""
    files = {"--ca": "ca.pem", "--token-file": "token", "--publisher": "publisher.pub", "--data": "data.npz"}
    words = [word for option, name in files.items() for word in (option, name)]
    command = [sys.executable, "-m", "fanin.commands.main", "join", "--server", host.address, "--state", "device"]
    command += [*words, "--max-updates", "1", "--runtime", "onnx", *options]
    completed = subprocess.run(command, cwd=host.folder, capture_output=True, text=True, check=False, timeout=120)
    assert (completed.returncode, completed.stdout) == (0, ""), completed.stderr
    return completed.stderr


def test_a_device_logs_each_step_and_serves_no_model(fanin: Fanin, host: Hosted) -> None:
    lines = join(host).splitlines()
    assert [re.sub(f"^{TIME} INFO fanin.clients: ", "", line) for line in lines] == STEPS
    folder = host.folder / "device"
    data = ("--publisher", host.folder / "publisher.pub", "--data", host.folder / "data.npz")
    assert one_line(fanin("infer", folder, *data), "infer") == (
        f"{folder}: this device has no served model; run fanin join with --serve until it has taken part in a round"
    )


@pytest.mark.nightly
def test_a_quiet_device_prints_nothing_and_serves(fanin: Fanin, host: Hosted) -> None:
    assert join(host, "--quiet", "--serve") == ""
    data = ("--publisher", host.folder / "publisher.pub", "--data", host.folder / "data.npz")
    outcome = fanin("infer", host.folder / "device", *data, "--json")
    assert (outcome.status, uncoded(outcome.err)) == (0, "")
    assert '"logits"' in outcome.out
