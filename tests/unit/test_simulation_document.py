"""The pages about simulations: their own partitioner, metric, devices and traces, and the figures of the examples."""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from house.tree import ROOT
from support.outside import python_blocks

from fanin.clients.data.digits import load_digits
from fanin.simulation import DeviceTrace, SimulationSettings, load_data, partition, read_devices, read_traces

DATA, RESULTS, DEVICES_PAGE = (
    (ROOT / "docs/howto" / f"{name}.md").read_text() for name in ("data", "results", "devices")
)
PARTITIONER, CHECK = python_blocks(DATA)
OWN_METRIC = python_blocks(RESULTS)[-1]
DEVICES, CAPACITY = python_blocks(DEVICES_PAGE)


def text_block(language: str, start: str = "") -> str:
    (text,) = re.findall(rf"^```{language}[^\n]*\n({start}.*?)^```$", DEVICES_PAGE, re.MULTILINE | re.DOTALL)
    return str(text)


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
    assert float(speed_up) > 3.0 and "The buffer is 3.7 times as fast" in DEVICES_PAGE
    assert (tmp_path / "buffered.png").stat().st_size > 1000


def test_the_file_of_devices_is_the_model_of_the_page(tmp_path: Path) -> None:
    names: dict[str, object] = {}
    exec(DEVICES, names)
    (tmp_path / "devices.toml").write_text(text_block("toml"))
    assert read_devices(tmp_path / "devices.toml") == names["devices"]


def test_the_traces_of_the_page_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "traces.csv").write_text(text_block("csv"))
    assert read_traces(tmp_path / "traces.csv").devices[1].bytes_up_per_s == 1e5
    monkeypatch.chdir(tmp_path)
    Path("client_device_capacity").write_bytes(pickle.dumps({1: {"computation": 20.0, "communication": 8000.0}}))
    exec(CAPACITY, {})
    (device,) = read_traces("traces.csv").devices
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
