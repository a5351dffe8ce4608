"""The main job, small: the demo's whole loop in a device environment without torch, twice in another order."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

DEVICE_PYTHON = Path(__file__).parents[2] / ".venv-device" / "bin" / "python"
NUM_DEVICES = 4
NUM_ROUNDS = 3


def run_demo(folder: Path, delay_seed: int) -> dict[str, object]:
    """What ``fanin demo --json FILE`` writes."""
    out = folder / f"demo-{delay_seed}.json"
    command = [sys.executable, "-m", "fanin.commands.main", "demo", "--seed", "3"]
    command += ["--devices", str(NUM_DEVICES), "--rounds", str(NUM_ROUNDS), "--delay-seed", str(delay_seed)]
    command += ["--device-python", str(DEVICE_PYTHON), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Top-1 accuracy" in done.stdout
    return dict(json.loads(out.read_text()))


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """Two demos of one seed whose devices wait other moments before they upload."""
    assert DEVICE_PYTHON.exists(), "make device makes the devices' environment"
    folder = tmp_path_factory.mktemp("demo")
    return [run_demo(folder, delay_seed) for delay_seed in (1, 2)]


def test_another_order_of_acceptance_ends_in_the_same_version(demos: list[dict[str, object]]) -> None:
    first, second = demos
    assert first["acceptance_order"] != second["acceptance_order"]
    assert first["version_sha256"] == second["version_sha256"]


def test_devices_have_neither_torch_nor_onnx(demos: list[dict[str, object]]) -> None:
    (found, _) = demos
    assert "No module named 'torch'" in str(found["device_import_torch"])
    assert "No module named 'onnx'" in str(found["device_import_onnx"])
    assert not any(str(line).startswith(("torch", "onnx==")) for line in found["device_packages"])
    assert list(found["runtimes"]) == ["onnxruntime 1.31.1"]


def test_the_federation_learns_and_the_circle_is_closed(demos: list[dict[str, object]]) -> None:
    (found, _) = demos
    accuracy = found["accuracy"]
    assert set(accuracy) == {"pretrained", "federated", "final", "centralised"}
    assert accuracy["federated"]["int8"] > accuracy["pretrained"]["int8"]
    assert found["int8_agreement"] >= 0.97
    # Three federated Rounds, and one from the datacenter's Version.
    assert found["rounds"] == NUM_ROUNDS + 1
    assert len(found["acceptance_order"]) == NUM_ROUNDS + 1
    assert all(
        sorted(order) == [f"device-{index}" for index in range(NUM_DEVICES)] for order in found["acceptance_order"]
    )
    assert found["bytes_up_per_round"] > 4 * NUM_DEVICES * 10_000
