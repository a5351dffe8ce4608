"""The datacenter's benchmarks: they run on a CPU on request, and print one sentence if they cannot run."""

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def add_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the benchmarks' folder to the import path, as for a script in it."""
    monkeypatch.syspath_prepend(str(FOLDER))


def load(name: str) -> ModuleType:
    spec = spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.nightly
def test_the_gpu_benchmark_runs_on_a_requested_cpu(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    arguments = [
        "--device",
        "cpu",
        "--size",
        "tiny",
        "--steps",
        "3",
        "--warm-up",
        "1",
        "--sequence",
        "16",
        "--no-compile",
    ]
    assert load("datacenter_gpu").main([*arguments, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert (report["device"], report["sequence"], report["steps"]) == ("cpu", 16, 3)
    fanin, plain = report["tiny"]["fanin"], report["tiny"]["plain"]
    for row in (fanin, plain):
        assert len(row["seconds_per_step_samples"]) == 3
        assert row["tokens_per_second"] == pytest.approx(4 * 16 / row["seconds_per_step"])
        assert row["mfu"] > 0
        assert row["peak_memory_bytes"] > 0
        assert row["last_loss"] < row["first_loss"]
    # The model, the data and the optimizer are the same, and bfloat16 rounds both alike.
    assert fanin["last_loss"] == pytest.approx(plain["last_loss"], rel=1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_benchmark_exits_with_a_message() -> None:
    with pytest.raises(SystemExit, match="got no CUDA device, expected one; run it on a machine with a GPU"):
        load("datacenter_gpu").main(["--size", "tiny"])


def test_an_unknown_size_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as excinfo:
        load("datacenter_gpu").main(["--size", "9b"])
    assert excinfo.value.code == 2
    assert "got ['9b'], expected some of tiny, 8m, 125m, 350m, 1.5b" in capsys.readouterr().err


def test_the_law_of_the_bubble_is_fitted() -> None:
    fit = load("datacenter").fit
    result = fit({number: [0.01 + (number + 1) * 0.03] for number in (2, 4, 8, 16)})
    assert result["fixed_seconds"] == pytest.approx(0.01)
    assert result["seconds_per_slot"] == pytest.approx(0.03)
    assert result["kept"]
    # This is not a line: each doubling of m takes four times as long.
    assert not fit({number: [number**2 * 0.01] for number in (2, 4, 8, 16)})["kept"]


@pytest.mark.nightly
def test_the_bubble_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    # The result of the gate depends on the machine. The fitted law for each number does not.
    assert load("datacenter").main(["--bubble", "--repeats", "1", "--json", str(path)]) in (0, 1)
    report = json.loads(path.read_text())
    assert list(report["seconds_per_step"]) == ["2", "4", "6", "8", "12", "16"]
    assert report["seconds_per_slot"] >= 0.03, "a slot has a forward and a backward in it"


@pytest.mark.nightly
def test_no_rank_allocates_a_complete_model_at_the_start_of_a_job(tmp_path: Path) -> None:
    path = tmp_path / "start.json"
    arguments = ["--layers", "1", "--mesh", "dp_shard=2", "--json", str(path)]
    subprocess.run([sys.executable, FOLDER / "start_memory.py", *arguments], check=True, capture_output=True)
    rows = json.loads(path.read_text())["ranks"]
    assert [row["rank"] for row in rows] == [0, 1]
    for row in rows:
        model_bytes = 4 * row["parameters"]
        assert model_bytes / 2 <= row["peak_bytes"] - row["bytes_before"] < 0.9 * model_bytes
