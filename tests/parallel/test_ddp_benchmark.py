"""The benchmark against a hand-written loop runs with small settings, and reports its measurements."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_two_loops_are_measured_alternately(tmp_path: Path) -> None:
    out = tmp_path / "ddp.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "datacenter.py"), "--ddp", "--blocks", "3", "--steps", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    completed = subprocess.run(
        [*command, "--json", str(out)], env=environment, capture_output=True, text=True, check=False
    )
    report = json.loads(out.read_text())
    assert (completed.returncode, completed.stderr) == (0 if report["kept"] else 1, "")
    assert {name: len(row) for name, row in report["seconds_per_block_samples"].items()} == {"by_hand": 3, "fanin": 3}
    rates = report["tokens_per_second"]
    assert report["throughput_ratio"] == pytest.approx(rates["fanin"] / rates["by_hand"])
    assert report["kept"] == (report["throughput_ratio"] >= 0.93)
