"""The benchmark against a hand-written loop runs with small settings, and reports its measurements."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_two_loops_are_measured_in_turns(tmp_path: Path) -> None:
    out = tmp_path / "ddp.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "datacenter.py"), "--ddp", "--blocks", "3", "--steps", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*command, "--json", str(out)], env=environment, capture_output=True, text=True, check=False)
    found = json.loads(out.read_text())
    assert (done.returncode, done.stderr) == (0 if found["kept"] else 1, "")
    assert {name: len(row) for name, row in found["seconds_per_block_samples"].items()} == {"by_hand": 3, "fanin": 3}
    rates = found["tokens_per_second"]
    assert found["throughput_ratio"] == pytest.approx(rates["fanin"] / rates["by_hand"])
    assert found["kept"] == (found["throughput_ratio"] >= 0.93)
