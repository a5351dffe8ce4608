"""The main job, small: the demo's whole loop, two devices on each of the three runtimes, in environments without torch;
twice in another order."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNTIMES = {"onnx": ".venv-device", "litert": ".venv-device-litert", "tflite": ".venv-device-tflite"}
NUM_DEVICES = 6
NUM_ROUNDS = 3


def run_demo(folder: Path, delay_seed: int) -> dict[str, object]:
    """What ``fanin demo --json FILE`` writes."""
    out = folder / f"demo-{delay_seed}.json"
    command = [sys.executable, "-m", "fanin.commands.main", "demo", "--seed", "3"]
    command += ["--devices", str(NUM_DEVICES), "--rounds", str(NUM_ROUNDS), "--delay-seed", str(delay_seed)]
    command += ["--runtimes", ",".join(RUNTIMES), "--codec", "int8", "--json", str(out)]
    for name in RUNTIMES.values():
        command += ["--device-python", str(ROOT / name / "bin" / "python")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Top-1 accuracy" in done.stdout
    return dict(json.loads(out.read_text()))


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """Two demos of one seed whose devices wait other moments before they upload."""
    assert all((ROOT / name).exists() for name in RUNTIMES.values()), "make devices makes the devices' environments"
    folder = tmp_path_factory.mktemp("demo")
    return [run_demo(folder, delay_seed) for delay_seed in (1, 2)]


def test_another_order_of_acceptance_ends_in_the_same_version(demos: list[dict[str, object]]) -> None:
    first, second = demos
    assert first["acceptance_order"] != second["acceptance_order"]
    assert first["version_sha256"] == second["version_sha256"]


def test_devices_have_neither_torch_nor_onnx(demos: list[dict[str, object]]) -> None:
    (found, _) = demos
    assert set(found["environments"]) == set(RUNTIMES)
    for environment in found["environments"].values():
        assert "No module named 'torch'" in environment["import_torch"]
        assert "No module named 'onnx'" in environment["import_onnx"]
        assert not any(line.startswith(("torch", "onnx==")) for line in environment["packages"])


def test_every_runtime_takes_part_in_every_round(demos: list[dict[str, object]]) -> None:
    (found, _) = demos
    expected = [environment["runtime"] for environment in found["environments"].values()]
    assert {name.split()[0] for name in expected} == {"onnxruntime", "ai-edge-litert", "tflite-runtime"}
    assert found["runtimes"] == dict.fromkeys(expected, NUM_DEVICES // len(RUNTIMES) * (NUM_ROUNDS + 1))


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
    # A byte a value, and a little around it.
    assert NUM_DEVICES * 19_946 <= found["bytes_up_per_round"] < 1.1 * NUM_DEVICES * 19_946
