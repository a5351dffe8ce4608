"""The full demo at small size, with a device on each of the three runtimes, in environments without torch.

The command runs in this process and its ranks in forks, which saves importing torch four times. The coordinator and the
devices are processes of their own.
"""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from parallel.programs import Programs, forked_agents

from fanin.commands.main import main

ROOT = Path(__file__).parents[2]
RUNTIMES = {"onnx": ".venv-device", "litert": ".venv-device-litert", "tflite": ".venv-device-tflite"}
NUM_DEVICES = 3
NUM_ROUNDS = 3


def run_demo(folder: Path) -> dict[str, object]:
    """Run ``fanin demo --json FILE``, and return the JSON."""
    out = folder / "demo.json"
    words = ["demo", "--seed", "3", "--mesh", "pp=2", "--devices", str(NUM_DEVICES), "--rounds", str(NUM_ROUNDS)]
    words += ["--delay-seed", "1", "--runtimes", ",".join(RUNTIMES), "--codec", "int8", "--json", str(out)]
    for name in RUNTIMES.values():
        words += ["--device-python", str(ROOT / name / "bin" / "python")]
    with redirect_stdout(io.StringIO()) as text:
        assert main(words) == 0
    assert "Top-1 accuracy" in text.getvalue()
    return dict(json.loads(out.read_text()))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> dict[str, object]:
    """The results of one demo."""
    assert all((ROOT / name).exists() for name in RUNTIMES.values()), "make devices makes the devices' environments"
    with forked_agents(programs):
        return run_demo(tmp_path_factory.mktemp("demo"))


def test_devices_have_neither_torch_nor_onnx(report: dict[str, object]) -> None:
    assert set(report["environments"]) == set(RUNTIMES)
    for environment in report["environments"].values():
        assert "No module named 'torch'" in environment["import_torch"]
        assert "No module named 'onnx'" in environment["import_onnx"]
        assert not any(line.startswith(("torch", "onnx==")) for line in environment["packages"])


def test_every_runtime_takes_part_in_every_round(report: dict[str, object]) -> None:
    expected = [environment["runtime"] for environment in report["environments"].values()]
    assert {name.split()[0] for name in expected} == {"onnxruntime", "ai-edge-litert", "tflite-runtime"}
    assert report["runtimes"] == dict.fromkeys(expected, NUM_DEVICES // len(RUNTIMES) * (NUM_ROUNDS + 1))


def test_the_federation_learns_and_the_circle_is_closed(report: dict[str, object]) -> None:
    accuracy = report["accuracy"]
    assert set(accuracy) == {"pretrained", "federated", "final", "centralised"}
    assert accuracy["federated"]["int8"] > accuracy["pretrained"]["int8"]
    assert report["int8_agreement"] >= 0.97
    # Three federated Rounds, and one from the datacenter's Version.
    assert report["rounds"] == NUM_ROUNDS + 1
    assert len(report["acceptance_order"]) == NUM_ROUNDS + 1
    assert all(
        sorted(order) == [f"device-{index}" for index in range(NUM_DEVICES)] for order in report["acceptance_order"]
    )
    # One byte for each value, and little overhead.
    assert NUM_DEVICES * 19_946 <= report["bytes_up_per_round"] < 1.1 * NUM_DEVICES * 19_946
