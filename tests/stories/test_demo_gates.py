"""The demo with its default settings passes its gates, on several seeds."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.data import real_places

from fanin.clients.data.digits import split_digits
from fanin.commands.demo.options import DEFAULT_MESH
from fanin.commands.demo.steps import job_config
from fanin.commands.demo.tasks import TASKS
from fanin.datacenter.jobs.job import train_rank
from fanin.datacenter.jobs.launch import launch
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.training.parameters import parameter_table, parameter_vector
from fanin.edge.tensors import encode_parameters

DEVICE_PYTHON = Path(__file__).parents[2] / ".venv-device" / "bin" / "python"


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 5])
def test_the_demo_passes_its_gates(tmp_path: Path, seed: int) -> None:
    out = tmp_path / "demo.json"
    command = [sys.executable, "-m", "fanin.commands.main", "demo", "--seed", str(seed)]
    command += ["--device-python", str(DEVICE_PYTHON), "--json", str(out)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert completed.returncode == 0, completed.stderr
    report = json.loads(out.read_text())
    accuracy = report["accuracy"]
    assert accuracy["final"]["int8"] >= 0.95
    assert accuracy["final"]["int8"] - accuracy["pretrained"]["int8"] >= 0.05
    assert accuracy["final"]["float"] - accuracy["final"]["int8"] <= 0.01
    assert report["int8_agreement"] >= 0.99
    assert report["devices"] == 8


# tests/parallel/test_parity.py has the same check in one pool of processes. It checks this model in CI, and
# Fashion-MNIST's model in the nightly suite.
@pytest.mark.nightly
def test_the_datacenter_on_its_four_processes_is_one_process(tmp_path: Path) -> None:
    task, shape, public = TASKS["digits"], MeshShape.parse(DEFAULT_MESH), split_digits(1, 1.0, 0).public
    np.savez(tmp_path / "data.npz", x=public.inputs["x"], y=public.y)
    module = task.app(0).module
    (tmp_path / "initial.bin").write_bytes(encode_parameters(parameter_table(module), parameter_vector(module)))
    pretrain = replace(task.pretrain, max_epochs=10)
    single_config = job_config(task, pretrain, tmp_path, MeshShape(), 0)
    single_config = replace(single_config, model=replace(single_config.model, initial=tmp_path / "initial.bin"))
    parallel_config = replace(single_config, parallel=job_config(task, pretrain, tmp_path, shape, 0).parallel)
    parallel = launch(parallel_config, shape.num_ranks, tmp_path / "job")
    single = train_rank(single_config)
    assert (str(shape), parallel.metrics.num_ranks, parallel.table) == ("pp=2,tp=2", 4, single.table)
    assert len(single.metrics.trained.losses) == 50
    assert parallel.metrics.trained.losses == pytest.approx(single.metrics.trained.losses, abs=1e-5)
    assert np.abs(parallel.parameters - single.parameters).max() < 1e-5


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_fashion_mnist_is_learnt_from_a_byte_a_value(tmp_path: Path) -> None:
    places = real_places("fashion-mnist")
    out = tmp_path / "demo.json"
    command = [sys.executable, "-m", "fanin.commands.main", "demo", "--dataset", "fashion-mnist", "--codec", "int8"]
    command += ["--rounds", "20", "--device-python", str(DEVICE_PYTHON), "--json", str(out)]
    environment = os.environ | {"FANIN_DATA": str(places.data)}
    completed = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert completed.returncode == 0, completed.stderr
    accuracy = json.loads(out.read_text())["accuracy"]
    assert accuracy["federated"]["int8"] >= 0.88
    assert accuracy["federated"]["float"] - accuracy["federated"]["int8"] <= 0.005
    assert accuracy["final"]["int8"] >= 0.88
