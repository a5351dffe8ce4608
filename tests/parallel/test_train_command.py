"""``fanin train``: one command for any mesh, the same numbers in its JSON, and one clear line for an error."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.commands import Fanin, fanin_in_process, one_line, uncoded, usage_line
from support.nightly import in_ci

from fanin.datacenter.checkpoints.progress import latest
from fanin.datacenter.config.train_config import read_train_config
from fanin.datacenter.jobs.job import train_rank
from fanin.datacenter.ranks.mesh import MeshShape

CONFIG = """
[model.decoder]
vocabulary = 16
width = 16
num_layers = 4
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
[parallel]
microbatches = 2
"""

OFTEN = ("--checkpoint-every", "6")
ELASTIC = ("--endpoint", "a:1", "--restarts", "1")


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """Return the command line."""
    return fanin_in_process(capsys, monkeypatch)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Write a small job on a text of its own. The last batch of an epoch is short."""
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 60)
    path = tmp_path / "train.toml"
    path.write_text(CONFIG.format(text=text))
    return path


@pytest.mark.parametrize(
    "mesh",
    in_ci(("pp=2", "pp=2,dp_shard=2,tp=2", "dp_replicate=2,dp_shard=2,tp=2"), ("pp=2",)),
)
def test_a_mesh_has_the_losses_of_one_process(fanin: Fanin, config: Path, tmp_path: Path, mesh: str) -> None:
    reference = train_rank(read_train_config(config)).metrics.trained
    # The job resumes from an earlier half on another mesh. Its weights file is in a folder that the job creates.
    checkpoints, out, state = tmp_path / "kept", tmp_path / "out.json", tmp_path / "state"
    weights = state / "model.safetensors"
    tables = {"stop": {"steps": 5}, "checkpoints": {"folder": str(checkpoints)}}
    train_rank(read_train_config(config, tables))
    options = ("--mesh", mesh, "--checkpoints", checkpoints, "--state", state, "--json", out, "--out", weights)
    completed = fanin("train", config, *options)
    assert (completed.status, uncoded(completed.err)) == (0, "")
    report = json.loads(out.read_text())
    assert (report["mesh"], report["nproc"]) == (mesh, MeshShape.parse(mesh).num_ranks)
    assert len(reference.losses) == 12
    assert reference.losses[-1] < reference.losses[0] - 0.5
    assert report["loss"] == pytest.approx(reference.losses, abs=1e-5)
    # The first half was evaluated at its end, too.
    assert [each["step"] for each in report["evaluations"]] == [5, 6, 12]
    for each, expected in zip(report["evaluations"][1:], reference.evaluated, strict=True):
        assert each["validation_loss"] == pytest.approx(expected.validation_loss, abs=1e-5)
        assert each["validation_accuracy"] == pytest.approx(expected.validation_accuracy, abs=0.02)
    assert report["tokens_per_second"] > 0
    assert 1e7 < report["peak_memory_bytes"] < 1e10
    job = read_train_config(config, {"model": {"initial": str(weights)}, "stop": {"steps": 1}})
    assert train_rank(job).metrics.trained.losses[0] < reference.losses[-1] + 0.5, "it begins with what was written"
    assert completed.out.count("\n") == len(report["evaluations"]) + 1
    assert re.search(rf"\n12 steps on mesh {mesh} in \d+\.\d s on the CPU \(t\w+ .*\), \d+ tokens", completed.out)
    (log,) = state.glob("logs/*/attempt_0/0/stdout.log")
    assert log.read_text().startswith(f"{report['nproc']} ranks of mesh {mesh}, on the CPU (t")
    assert report["device"] == "cpu"


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["none", "dp_shard=2", "tp=2"])
def test_a_job_that_is_compiled_has_the_losses_of_one_that_is_not(
    fanin: Fanin, config: Path, tmp_path: Path, mesh: str
) -> None:
    # AdamW amplifies the rounding errors of float32.
    config.write_text(config.read_text().replace("[stop]", 'optimizer = "sgd"\n[stop]'))
    reference, out = train_rank(read_train_config(config)).metrics.trained, tmp_path / "out.json"
    config.write_text(f"{config.read_text()}compile = true\n")
    completed = fanin("train", config, "--mesh", mesh, "--json", out)
    assert (completed.status, uncoded(completed.err)) == (0, "")
    report = json.loads(out.read_text())
    assert len(reference.losses) == 12
    assert report["loss"] == pytest.approx(reference.losses, abs=1e-5)
    assert report["loss"] != list(reference.losses), "what is compiled rounds otherwise"
    expected = [each.validation_loss for each in reference.evaluated]
    assert [each["validation_loss"] for each in report["evaluations"]] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--mesh", "tp=2", "--nproc", "4"),
            "mesh: pp 1 x dp_replicate 1 x dp_shard 1 x tp 2 = 2 ranks, got a world of 4;",
        ),
        (("--mesh", "tp=8"), "got heads 4 and tp 8, expected a multiple"),
        (
            ("--mesh", "dp_shard=3"),
            "batch 16, expected a multiple of 3 parts x 1 accumulation steps x 2 microbatches = 6",
        ),
        (
            ("--mesh", "pp=4"),
            "1F1B needs at least as many microbatches as the 4 stages, got 2; raise microbatches, or use GPipe",
        ),
        (("--mesh", "pp=2", "--schedule", "2F2B"), "schedule: got '2F2B', expected one of GPipe, 1F1B"),
        (("--mesh", "pp=2", "--microbatches", "0"), "got 0 microbatches, expected at least 1"),
        (("--steps", "-1"), "stop: got steps -1 and epochs 0"),
        (("--resume", "/nowhere"), "got resume /nowhere, expected a folder with a complete checkpoint"),
        (("--out", "model.bin"), "got weights model.bin, expected a name that ends in .safetensors"),
        (
            ("--out", "/nowhere/model.safetensors"),
            "(folder /nowhere: No such file or directory); make the folder, or name another",
        ),
        (("--out", "{folder}.safetensors"), ".safetensors, which is a folder; name a file in it"),
        # A folder cannot be created inside a device file.
        (("--checkpoints", "/dev/null/kept"), "checkpoints: got folder /dev/null/kept, expected a place that can be"),
        (("--state", "/dev/null/state"), "datacenter job: got folder /dev/null/state, expected a place that can be"),
        (
            ("--restarts", "3"),
            "restarts (--restarts): got 3 and no checkpoints on the way, expected a folder and a period",
        ),
        (("--restarts", "3", "--checkpoints", "kept"), "a job that lost a rank would start from its first step"),
        (OFTEN, "checkpoints: got every 6 and no folder, expected a folder for them"),
        (
            (*ELASTIC, "--nodes", "1:2"),
            "mesh: got none of 1 ranks for 2 machines, expected a number of ranks that 2 divides; give",
        ),
        (
            (*ELASTIC, "--nodes", "1:2", "--nproc", "1"),
            "got 1 to 2 nodes and no folder for checkpoints, expected a checkpoint folder that all machines share",
        ),
        (
            (*ELASTIC, "--nodes", "1:4", "--mesh", "tp=2", "--nproc", "1", "--checkpoints", "kept", *OFTEN),
            "on 1 machines of 1 processes: mesh tp=2: got a world of 1, expected a multiple of pp 1 x tp 2 = 2 ranks",
        ),
        (
            (*ELASTIC, "--nodes", "1:4", "--mesh", "dp_replicate=4", "--checkpoints", "kept", *OFTEN),
            "on 3 machines of 1 processes: mesh dp_replicate=3: got batch 16, expected a multiple of 3 parts",
        ),
        ((*ELASTIC, "--nodes", "3:3", "--mesh", "dp_shard=2", "--nproc", "1"), "= 2 ranks, got a world of 3;"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_impossible_options_are_refused_in_one_line(
    fanin: Fanin, config: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "a.safetensors").mkdir()
    arguments = [option.format(folder=tmp_path / "a") for option in options]
    state = tmp_path / "state"
    assert message in one_line(fanin("train", config, "--steps", "1", "--state", state, *arguments), "train")
    assert not state.exists(), "told before a process starts"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--mesh", "tpp=2"), "mesh: got 'tpp=2' in 'tpp=2', expected each of pp, dp_replicate, dp_shard, tp"),
        (("--nodes", "2-3"), "--nodes: got '2-3', expected the fewest and the most machines, such as 1:4"),
        (("--nodes", "2"), "got 2 nodes and endpoint '', expected host:port of one of the machines"),
        (("--endpoint", "a:1"), "got 1 nodes and endpoint 'a:1', expected host:port of one of the machines"),
        (("--nodes", "1:2", "--endpoint", "a:1"), "got 1 to 2 nodes and max_restarts 0, expected at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_impossible_values_of_options_are_wrong_usage(
    fanin: Fanin, config: Path, options: tuple[str, ...], message: str
) -> None:
    assert message in usage_line(fanin("train", config, *options), "train")


def test_machines_without_a_shared_folder_are_refused_in_one_line(fanin: Fanin, config: Path) -> None:
    message = one_line(fanin("train", config, *ELASTIC, "--nodes", "1:2", "--nproc", "1"), "train")
    assert message == "machines: got 1 to 2 and no folder (--state), expected a folder that all machines share"


def test_a_missing_config_is_reported_in_one_line(fanin: Fanin, tmp_path: Path) -> None:
    assert "missing.toml: cannot be read (" in one_line(fanin("train", tmp_path / "missing.toml"), "train")


@pytest.mark.nightly
def test_sigterm_writes_a_checkpoint_and_ends_in_order(config: Path, tmp_path: Path) -> None:
    checkpoints, out = tmp_path / "kept", tmp_path / "out.json"
    command = [sys.executable, "-m", "fanin.commands.main", "train", config, "--steps", "100000", "--json", out]
    command += ["--checkpoints", checkpoints, "--state", tmp_path / "state"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    rows = tmp_path / "state" / "rows.jsonl"
    deadline = time.monotonic() + 120.0
    while not (rows.exists() and rows.read_text().count("\n") > 2):
        assert time.monotonic() < deadline, "it did not begin to train"
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    # As coreutils' timeout: to the child, and to its group.
    time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    report = json.loads(out.read_text())
    num_steps = len(report["loss"])
    assert 2 < num_steps < 100_000
    assert report["stopped"]
    assert f"{num_steps} steps on mesh none in " in output
    assert latest(checkpoints).step == num_steps
    last = json.loads(rows.read_text().splitlines()[-1])
    assert last["step"] == num_steps - 1
