"""The edge's benchmark runs, with small settings, and tells what it is to tell."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODELS = ("mlp-small", "cnn")
RUNTIMES = ("onnx", "litert", "tflite")
KINDS = ("train", "evaluate", "predict_one", "predict_batch")


@pytest.mark.nightly
def test_the_edge_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "edge.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "edge.py"), "--models", *MODELS, "--json", str(out)]
    command += ["--steps", "6", "--starts", "1", "--epochs", "1", "--rounds", "2"]
    # Without a folder of data the accuracy is that of the digits, which are always there.
    environment = {name: value for name, value in os.environ.items() if name != "FANIN_DATA"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert set(found["environments"]) == set(RUNTIMES)
    for model in MODELS:
        rows = found["models"][model]
        assert set(rows["runtimes"]) == set(RUNTIMES) and set(rows["size_bytes"]) == {"onnx", "tflite"}
        for row in (rows["eager"], *rows["runtimes"].values()):
            assert all(len(row[kind]["samples_ms"]) == 6 and row[kind]["min_ms"] > 0.0 for kind in KINDS)
            assert row["start_up_ms"] > 0.0 and row["peak_rss_mb"] >= row["peak_rss_training_mb"] > 0.0
        for row in rows["runtimes"].values():
            assert row["train_speed_up"] == rows["eager"]["train"]["median_ms"] / row["train"]["median_ms"]
    assert found["accuracy"]["dataset"] == "digits"
    for name in RUNTIMES:
        told = found["accuracy"][name]
        assert told["num_examples"] == 540 and told["accuracy_float"] > 0.8 and abs(told["drop_points"]) < 3.0
        # A device holds no torch; what importing takes may be its peak, for it gives that back.
        for key in ("importing_join_mb", "peak_rss_mb"):
            assert 0.0 < found["memory"][name][key] < found["memory"]["importing_torch_mb"]
    gates = {gate["what"]: gate for gate in found["gates"]}
    assert {"cnn: train step, eager / onnx", "tflite: environment, MB", "onnx: device's peak RSS, MB"} <= gates.keys()
    for what, gate in gates.items():
        assert f"{what} " in done.stdout and isinstance(gate["kept"], bool)
