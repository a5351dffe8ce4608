"""docs/simulation.md: its examples run unchanged, and print the output on the page."""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from house.tree import ROOT

from fanin.clients.data.digits import load_digits
from fanin.simulation import DeviceTrace, SimulationSettings, load_data, partition, read_devices, read_traces

TEXT = (ROOT / "docs" / "simulation.md").read_text()
TEN_LINES, PARTITIONER, CHECK, OWN_METRIC, DEVICES, CAPACITY, FAULTS = re.findall(
    r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL
)


def run(code: str, folder: Path) -> str:
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=folder)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@pytest.mark.nightly
def test_a_run_with_faults_prints_the_output_of_the_page(tmp_path: Path) -> None:
    # The page has other outputs, too.
    following = TEXT[TEXT.index(FAULTS) :]
    expected = re.findall(r"^```text\n(.*?)^```$", following, re.MULTILINE | re.DOTALL)[0]
    assert run(FAULTS, tmp_path) == expected
    assert expected.endswith("True\n")


@pytest.mark.nightly
def test_ten_lines_train_a_module(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [line for line in TEN_LINES.splitlines() if line and not line.startswith(("import", "from"))]
    assert len(lines) <= 9
    output = run(f"{TEN_LINES}\nprint(result.rounds[-1].test_accuracy > 0.5, len(result.rounds))", tmp_path)
    assert output.endswith("True 21\n")
    assert (tmp_path / "rounds.png").stat().st_size > 1000


def test_the_metric_of_the_page_is_a_number_between_0_and_1() -> None:
    names = {"SimulationSettings": SimulationSettings, "data": load_data("digits")}
    exec(OWN_METRIC, names)
    settings = names["settings"]
    assert isinstance(settings, SimulationSettings)
    (name, metric), (statistic,) = *settings.own_metrics.items(), settings.plan["statistics"]  # type: ignore[index]
    assert statistic["name"] == f"evaluate.{name}"
    assert metric.function(np.array([0, 1, 1], np.int32), np.array([0, 0, 1], np.int32)) == 0.5


@pytest.mark.nightly
def test_fedprox_is_compared_with_fedavg(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    script = ROOT / "examples" / "simulation" / "compare.py"
    completed = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert completed.returncode == 0, completed.stderr
    accuracies = [float(number) for number in re.findall(r"accuracy ([\d.]+)", completed.stdout)]
    assert len(accuracies) == 2 and min(accuracies) > 0.8
    assert (tmp_path / "compared.png").stat().st_size > 1000


@pytest.mark.nightly
def test_buffered_rounds_have_the_speed_up_of_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    script = ROOT / "examples" / "simulation" / "buffered.py"
    completed = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert completed.returncode == 0, completed.stderr
    (speed_up,) = re.findall(r"speed-up: ([\d.]+)", completed.stdout)
    assert float(speed_up) > 3.0 and "The buffer is 3.7 times as fast" in TEXT
    assert (tmp_path / "buffered.png").stat().st_size > 1000


def test_the_file_of_devices_is_the_model_of_the_page(tmp_path: Path) -> None:
    names: dict[str, object] = {}
    exec(DEVICES, names)
    (text,) = re.findall(r"^```toml\n(examples_per_s.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    (tmp_path / "devices.toml").write_text(text)
    assert read_devices(tmp_path / "devices.toml") == names["devices"]


def test_the_traces_of_the_page_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (table,) = re.findall(r"^```csv\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    (tmp_path / "devices.csv").write_text(table)
    assert read_traces(tmp_path / "devices.csv").devices[1].bytes_up_per_s == 1e5
    monkeypatch.chdir(tmp_path)
    Path("client_device_capacity").write_bytes(pickle.dumps({1: {"computation": 20.0, "communication": 8000.0}}))
    exec(CAPACITY, {})
    (device,) = read_traces("devices.csv").devices
    assert device == DeviceTrace(examples_per_s=1000 / 60, bytes_down_per_s=1e6, bytes_up_per_s=1e6)


def test_the_partitioner_of_the_page_keeps_one_label_from_each_client() -> None:
    names: dict[str, object] = {}
    exec(PARTITIONER, names)
    by = names["one_label_missing"]()  # type: ignore[operator]
    counts = partition(load_digits(), 10, by).label_counts()
    assert ((counts > 0).sum(axis=1) == 9).all()


def test_the_partitioner_of_the_page_keeps_its_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_package.py").write_text(PARTITIONER)
    monkeypatch.syspath_prepend(tmp_path)
    exec(CHECK, {})
