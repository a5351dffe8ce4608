"""A job on a GPU: its losses and parameters are those of the CPU, whatever its settings."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from parallel.cells import Cell
from parallel.families import batches, model_of
from parallel.matrix import parallel_of, train, training_of
from support.commands import Fanin, fanin_in_process

from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.build import build
from fanin.datacenter.parallel.engine import Engine
from fanin.datacenter.parallel.layer_times import measure_layer_times
from fanin.datacenter.ranks.devices import build_mesh, rank_device
from fanin.datacenter.ranks.elastic import group_of_one
from fanin.datacenter.ranks.mesh import MeshShape

GPU = torch.device("cuda", 0)
OWN = ("decoder", "encoder", "mlp", "cnn", "resnet8", "resnet8-batch", "ds_cnn")
# transformers computes rotary positions and the weights of experts in float32, whatever the model's type.
SINGLE_PARTS = ("llama", "qwen2", "mixtral")
CELLS = (
    *(Cell(mesh="none", family=family) for family in (*OWN, "gpt2", *SINGLE_PARTS)),
    Cell(mesh="none", offload=True, accumulate=2, recompute="selective", tied=True),
    Cell(mesh="none", recompute="full", microbatches=2),
    Cell(mesh="none", freeze=("embed.*", "layers.0.*")),
    Cell(mesh="none", dtype="float32", clip=None),
    Cell(mesh="none", dtype="float32", compile=True, tied=True),
)
# Sums have another order on a GPU, and attention another algorithm.
LOSSES = {"float32": 1e-4, "float64": 1e-10}
PARAMETERS = {"float32": 1e-4, "float64": 1e-9}
SINGLE = 1e-5
CONFIG = """
[model.decoder]
vocabulary = 16
width = 16
num_layers = 2
num_heads = 4
num_kv_heads = 2
feed_forward = 16
tied = true
[data]
text = "{text}"
length = 16
[training]
batch_size = 16
learning_rate = 0.02
clip_norm = 1.0
[stop]
steps = 12
[evaluation]
every = 6
[watch]
traffic = true
timeline = true
[parallel]
precision = "{precision}"
"""


def on_cpu(cell: Cell) -> dict[str, np.ndarray]:
    plain = replace(cell, offload=False, compile=False, recompute="none", precision="full")
    device = torch.device("cpu")
    return train(plain, Engine(build(model_of(plain), parallel_of(plain), training_of(plain), None, device)))


def on_gpu(cell: Cell) -> dict[str, np.ndarray]:
    rank_device("cuda")
    with group_of_one(needed=True, device="cuda"):
        mesh = build_mesh(MeshShape(), 1)
        assert mesh.device_type == "cuda"
        return train(cell, Engine(build(model_of(cell), parallel_of(cell), training_of(cell), mesh, GPU)))


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray], names: Sequence[str]) -> float:
    return max(float(np.abs(one[name] - other[name]).max()) for name in names)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
@pytest.mark.filterwarnings("default")
def test_a_gpu_has_the_losses_and_parameters_of_the_cpu(cell: Cell) -> None:
    expected, actual = on_cpu(cell), on_gpu(cell)
    assert expected["losses"][-1] < expected["losses"][0]
    has_single_parts = cell.family in SINGLE_PARTS
    losses, parameters = (SINGLE if has_single_parts else each[cell.dtype] for each in (LOSSES, PARAMETERS))
    assert largest_difference(actual, expected, ("losses", "evaluated")) < losses
    assert largest_difference(actual, expected, list(expected["names"])) < parameters


@pytest.mark.parametrize("cell", CELLS[:2], ids=lambda cell: cell.name)
def test_a_gpu_without_a_process_group_has_the_losses_of_the_cpu(cell: Cell) -> None:
    engine = Engine(build(model_of(cell), parallel_of(cell), training_of(cell), None, GPU))
    assert largest_difference(train(cell, engine), on_cpu(cell), ("losses", "evaluated")) < LOSSES[cell.dtype]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_near_the_cpu(precision: str) -> None:
    cell = Cell(mesh="none", dtype="float32", clip=0.5, precision=precision)
    assert largest_difference(on_gpu(cell), on_cpu(cell), ("losses", "evaluated")) < 0.02


def test_the_time_of_each_layer_is_measured_on_a_gpu() -> None:
    cell = Cell(mesh="none", dtype="float32", layers=3)
    inputs, targets = next(batches(1))
    times = measure_layer_times(model_of(cell), Batch(inputs=inputs, targets=targets), parallel_of(cell), GPU)
    assert len(times) == 5
    assert all(0 < seconds < 10 for seconds in times)


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """Return the command line."""
    return fanin_in_process(capsys, monkeypatch)


def write_config(folder: Path, precision: str = "full") -> Path:
    (folder / "text.txt").write_text("the cat sat on the mat. " * 60)
    path = folder / "train.toml"
    path.write_text(CONFIG.format(text=folder / "text.txt", precision=precision))
    return path


def run(fanin: Fanin, config: Path, *options: object) -> dict[str, object]:
    out = config.with_name("out.json")
    completed = fanin("train", config, "--json", out, *options)
    assert (completed.status, completed.err) == (0, "")
    report: dict[str, object] = json.loads(out.read_text())
    return report | {"stdout": completed.out}


@pytest.mark.parametrize("mesh", ["none", "dp_shard=1"])
def test_fanin_train_uses_the_gpu_and_reports_it(fanin: Fanin, tmp_path: Path, mesh: str) -> None:
    config = write_config(tmp_path, "double")
    state = tmp_path / "state"
    report = run(fanin, config, "--mesh", mesh, "--state", state)
    expected = run(fanin, config, "--device", "cpu")
    assert (report["device"], expected["device"]) == ("cuda", "cpu")
    assert "on a GPU each (of " in str(report["stdout"])
    assert report["loss"] == pytest.approx(expected["loss"], abs=1e-9)
    assert 1e6 < float(str(report["peak_memory_bytes"])) < 1e10
    rows = [json.loads(line) for line in (state / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == len(report["loss"])
    assert all(0 < row["mfu"] < 1 and row["peak_memory_bytes"] > 1e6 for row in rows[1:])


def test_a_job_resumes_on_a_gpu_with_the_bits_of_one_that_was_not_interrupted(fanin: Fanin, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    weights, halves = tmp_path / "whole.safetensors", tmp_path / "halves.safetensors"
    whole = run(fanin, config, "--out", weights)
    kept = ("--checkpoints", tmp_path / "kept", "--out", halves)
    run(fanin, config, *kept, "--steps", "6")
    resumed = run(fanin, config, *kept)
    assert resumed["loss"] == whole["loss"]
    assert weights.read_bytes() == halves.read_bytes()


def test_a_checkpoint_of_a_gpu_resumes_on_the_cpu(fanin: Fanin, tmp_path: Path) -> None:
    config = write_config(tmp_path, "double")
    whole = run(fanin, config)
    kept = ("--checkpoints", tmp_path / "kept")
    run(fanin, config, *kept, "--steps", "6")
    resumed = run(fanin, config, *kept, "--device", "cpu")
    assert resumed["device"] == "cpu"
    assert resumed["loss"] == pytest.approx(whole["loss"], abs=1e-9)
