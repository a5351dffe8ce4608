"""The outputs that ``[watch]`` requests exist at the end of a real job, and their content is correct."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.boards import values_in
from support.commands import Fanin, fanin_in_process, one_line, uncoded

from fanin.commands.train import metrics_row
from fanin.datacenter.config.train_config import TrainConfig, read_train_config
from fanin.datacenter.files.jobfiles import Metrics, TrainingHistory
from fanin.datacenter.jobs.monitor import COUNTED_STEP, ROWS_FILE, predicted_traffic
from fanin.datacenter.network.counters import by_axis
from fanin.datacenter.planner.facts import planned_facts
from fanin.datacenter.planner.spread import Job
from fanin.datacenter.planner.traffic import predict_traffic
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.watch.timeline import DATA, STEP

pytestmark = pytest.mark.usefixtures("forked_agents")

NUM_STEPS = 5
CONFIG = """
[model.decoder]
vocabulary = 16
width = 16
num_layers = 2
num_heads = 2
num_kv_heads = 2
feed_forward = 16
tied = true
[data]
text = "{text}"
length = 8
[training]
batch_size = 8
learning_rate = 0.02
clip_norm = 1.0
[stop]
steps = 5
[evaluation]
num_samples = 8
[parallel]
microbatches = 2
[watch]
"""
ALL = "timeline = true\ntraffic = true\nmfu = true\ntensorboard = true\n"


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """Return the command line."""
    return fanin_in_process(capsys, monkeypatch)


def write_job_config(folder: Path, watch: str) -> Path:
    """Write the config of a short job."""
    text, path = folder / "text.txt", folder / "train.toml"
    text.write_text("the cat sat on the mat. " * 60)
    path.write_text(CONFIG.format(text=text) + watch)
    return path


def predicted_bytes(config: TrainConfig) -> dict[str, int]:
    """Return the bytes that the first rank sends in a step, by axis, as the planner predicts them."""
    assert config.model.family is not None
    facts = planned_facts("decoder", config.model.family)
    job = Job(facts=facts, parallel=config.parallel, training=config.training, sequence=config.data.length)
    return by_axis(predict_traffic(job))


@pytest.mark.parametrize("mesh", ["pp=2", pytest.param("pp=2,tp=2", marks=pytest.mark.nightly)])
def test_a_watched_job_writes_the_requested_outputs(fanin: Fanin, tmp_path: Path, mesh: str) -> None:
    path, state, out = write_job_config(tmp_path, ALL), tmp_path / "state", tmp_path / "out.json"
    measured_config = tmp_path / "measured.toml"
    measured_config.write_text(path.read_text().replace("[parallel]", '[parallel]\nlayer_times = "measure"'))
    completed = fanin("train", measured_config, "--mesh", mesh, "--state", state, "--json", out)
    assert (completed.status, uncoded(completed.err)) == (0, "")
    rows = [json.loads(line) for line in (state / ROWS_FILE).read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(NUM_STEPS))
    expected = predicted_bytes(read_train_config(path, {"parallel": {"mesh": mesh}}))
    assert set(expected) == set(mesh.replace("=2", "").split(","))
    for row in rows:
        assert row["bytes_by_axis"] == (expected if row["step"] >= COUNTED_STEP else {})
        assert 0.0 <= row["waiting_share"] < 1.0
        assert 0.0 < row["mfu"] < 1.0
    check_report(json.loads(out.read_text()), completed.out, expected)
    check_board(state / "tensorboard", rows)
    for rank in range(MeshShape.parse(mesh).num_ranks):
        check_timeline(json.loads((state / f"timeline-rank-{rank}.json").read_text()), rank)


def check_board(folder: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Check that TensorBoard's event files have the numbers of the rows."""
    expected = {(name, row["step"]): value for row in rows for name, value in row.items() if isinstance(value, float)}
    values = values_in(folder)
    assert {key: values[key] for key in expected} == pytest.approx(expected)
    sizes = rows[-1]["bytes_by_axis"]
    assert isinstance(sizes, dict) and sizes
    assert {axis: values[f"bytes_by_axis/{axis}", NUM_STEPS - 1] for axis in sizes} == sizes


def check_report(report: dict[str, object], text: str, expected: dict[str, int]) -> None:
    """Check counted and predicted traffic and the balance of stages, in the JSON report and in the text."""
    assert report["traffic"] == {axis: {"bytes": size, "predicted_bytes": size} for axis, size in expected.items()}
    traffic = ", ".join(f"{axis} {size} (predicted: {size})" for axis, size in expected.items())
    assert f"bytes that a step of the first rank sends: {traffic}\n" in text
    times, stages = report["layer_times"], report["stage_times"]
    assert len(times) == 4
    assert stages == pytest.approx([sum(times[:2]), sum(times[2:])])
    share = 2 * max(stages) / sum(stages)
    assert f"stages by layer_times: {stages[0]:.3g}, {stages[1]:.3g}; the slowest takes {share:.2f} of the mean" in text


def check_timeline(trace: dict[str, list[dict[str, object]]], rank: int) -> None:
    """Check a trace of this rank alone: each step has its data, and the computations of its stage."""
    events = trace["traceEvents"]
    assert {event["pid"] for event in events} == {rank}
    assert events[0] | {"tid": 0} == {
        "name": "process_name",
        "ph": "M",
        "pid": rank,
        "tid": 0,
        "args": {"name": f"rank {rank}"},
    }
    phases = [event for event in events if event["ph"] == "X"]
    for step in range(NUM_STEPS):
        step_events = [event for event in phases if event["args"] == {"step": step}]
        (step_event,) = [event for event in step_events if event["name"] == STEP]
        assert [event["name"] for event in step_events].count(DATA) == 1
        for name in ("forward", "backward"):
            computations = [event for event in step_events if event["name"] == name and is_inside(event, step_event)]
            assert len(computations) == 2, "one for each microbatch"


def is_inside(inner: dict[str, float], outer: dict[str, float]) -> bool:
    """Whether one event takes place within another."""
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


@pytest.mark.parametrize(
    "tables",
    [
        {"parallel": {"mesh": "dp_replicate=2"}, "communication": {"hook": "fp16"}},
        {"parallel": {"mesh": "dp_shard=2", "precision": "fp16"}},
        {"parallel": {"mesh": "dp_shard=2", "compile": True}},
        {"training": {"freeze": ["embed.*"]}},
    ],
)
def test_without_a_formula_nothing_is_predicted(tmp_path: Path, tables: dict[str, dict[str, object]]) -> None:
    config = read_train_config(write_job_config(tmp_path, ALL), tables)
    assert predicted_traffic(config) is None
    metrics = Metrics(
        trained=TrainingHistory(losses=(1.0,), evaluated=(), best=0, flat=False),
        mesh=config.parallel.mesh,
        num_ranks=2,
        train_s=1.0,
        units_per_second=1.0,
        peak_memory_bytes=1,
        bytes_by_axis={"dp_shard": 8},
    )
    assert metrics_row(metrics, config)["traffic"] == {"dp_shard": {"bytes": 8, "predicted_bytes": None}}
    assert metrics_row(replace(metrics, bytes_by_axis=None), config)["traffic"] is None
    traffic = metrics_row(replace(metrics, predicted_bytes_by_axis={"tp": 4}), config)["traffic"]
    assert traffic == {"dp_shard": {"bytes": 8, "predicted_bytes": 0}, "tp": {"bytes": 0, "predicted_bytes": 4}}


def test_tensorboard_without_its_library_is_refused_in_one_line(
    fanin: Fanin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    message = one_line(fanin("train", write_job_config(tmp_path, "tensorboard = true\n"), "--state", state), "train")
    assert message == "TensorBoard: tensorboardX is not installed here; pip install tensorboardX"
    assert not state.exists(), "told before a process starts"
