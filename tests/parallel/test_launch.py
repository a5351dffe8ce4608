"""A job under torchrun: its result, its errors, and the end of all its processes when the caller is interrupted."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from parallel.apps import LOST_EVERY
from support.nightly import in_ci

from fanin.clients.data.digits import split_digits
from fanin.datacenter.config.settings import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    LayoutSettings,
    ModelSettings,
    StopSettings,
)
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.files.jobfiles import CONFIG_FILE, METRICS_FILE, PARAMETERS_FILE, write_config
from fanin.datacenter.jobs.calls import StepCalls
from fanin.datacenter.jobs.job import train_rank
from fanin.datacenter.jobs.launch import launch
from fanin.datacenter.jobs.torchrun import Elastic
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.protos.errors import Conflict, InvalidInput, UnsupportedModel

APPS = Path(__file__).with_name("apps.py")
LIMIT_S = 180.0
"""Time limit of one wait: on a busy machine a job may take minutes to start."""
LAUNCH = """
import signal, sys
# A shell that starts the tests in the background has them ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from fanin.datacenter.jobs.job import train_rank
from fanin.datacenter.files.jobfiles import read_config
from fanin.datacenter.jobs.launch import launch
launch(read_config(Path(sys.argv[1])), 2, Path(sys.argv[2]))
"""
SLOW = """
import os, signal, sys, time
from pathlib import Path
from fanin.datacenter.ranks.elastic import end_with_parent
def main(arguments):
    folder, seconds = arguments
    end_with_parent()
    def save(number, frame):
        time.sleep(float(seconds))
        Path(folder, "saved").touch()
        sys.exit()
    signal.signal(signal.SIGTERM, save)
    Path(folder, "begun").write_text(str(os.getpid()))
    while True:
        time.sleep(0.1)
"""
"""A rank that takes a given time to save."""
RUN_SLOW = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from fanin.datacenter.jobs.torchrun import run_ranks
run_ranks(sys.argv[1:], 1, Path(sys.argv[2]))
"""
LAYOUT = LayoutSettings(
    layers="layers",
    num_layers=4,
    inputs=("flatten", "embed"),
    outputs=("head",),
    plan={"layers.*": "shared", "layers.*.0": "column", "layers.*.2": "row"},
    feed_forward=32,
)
"""Layout of the App ``stacked``."""


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """Return a short job on the public digits, with two copies."""
    public = split_digits(1, 1.0, 0).public
    np.savez(tmp_path / "data.npz", x=public.inputs["x"], y=public.y)
    return TrainConfig(
        model=ModelSettings(app="fanin.datacenter.models.digits_app:app"),
        data=DataSettings(examples=tmp_path / "data.npz", held_fraction=0.2),
        training=TrainingSettings(batch_size=16, learning_rate=0.05, optimizer="sgd"),
        stop=StopSettings(epochs=4),
        evaluation=EvaluationSettings(keep="best"),
        parallel=ParallelSettings(mesh=MeshShape(dp_replicate=2)),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the job's folder."""
    return tmp_path / "job"


def single_process(config: TrainConfig) -> TrainConfig:
    """Return the same job for one process."""
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, mesh=MeshShape()))


@pytest.mark.nightly
@pytest.mark.usefixtures("forked_agents")
def test_two_ranks_have_the_result_of_one_process(config: TrainConfig, folder: Path) -> None:
    folder.mkdir()
    (folder / METRICS_FILE).write_text("left from an earlier job")
    actual, reference = launch(config, 2, folder), train_rank(single_process(config))
    assert (actual.metrics.num_ranks, reference.metrics.num_ranks) == (2, 1)
    assert str(actual.metrics.mesh) == "dp_replicate=2"
    assert (actual.table, len(actual.metrics.trained.evaluated), actual.metrics.trained.flat) == (
        reference.table,
        4,
        False,
    )
    assert np.abs(actual.parameters - reference.parameters).max() < 1e-5
    assert actual.metrics.trained.losses == pytest.approx(reference.metrics.trained.losses, abs=1e-5)
    model = dataclasses.replace(config.model, initial=folder / PARAMETERS_FILE)
    resumed_result = train_rank(dataclasses.replace(single_process(config), model=model))
    before, after = (result.metrics.trained.evaluated for result in (reference, resumed_result))
    assert after[0].train_loss < before[-1].train_loss, "it goes on from there"


@pytest.mark.nightly
@pytest.mark.usefixtures("forked_agents")
@pytest.mark.parametrize("mesh", ["pp=2,tp=2", "pp=2,dp_shard=2", "dp_shard=2,tp=2"])
def test_an_app_with_names_is_cut_and_split(config: TrainConfig, folder: Path, mesh: str) -> None:
    config = dataclasses.replace(config, model=ModelSettings(app=f"{APPS}:stacked", layout=LAYOUT))
    parallel = ParallelSettings(mesh=MeshShape.parse(mesh), microbatches=2)
    actual, reference = (
        launch(dataclasses.replace(config, parallel=parallel), 4, folder),
        train_rank(single_process(config)),
    )
    assert actual.table == reference.table
    assert np.abs(actual.parameters - reference.parameters).max() < 1e-5
    assert actual.metrics.trained.losses == pytest.approx(reference.metrics.trained.losses, abs=1e-5)
    for evaluation, expected in zip(actual.metrics.trained.evaluated, reference.metrics.trained.evaluated, strict=True):
        assert evaluation.validation_loss == pytest.approx(expected.validation_loss, abs=1e-5)
        assert evaluation.validation_accuracy == expected.validation_accuracy


@pytest.mark.nightly
@pytest.mark.parametrize("every", [2, 5])
def test_a_job_whose_rank_is_killed_ends_with_the_trace_of_one_that_was_not(
    config: TrainConfig, tmp_path: Path, folder: Path, every: int
) -> None:
    config = dataclasses.replace(config, evaluation=EvaluationSettings())
    reference = launch(config, 2, folder)
    dying_config = dataclasses.replace(
        config,
        model=ModelSettings(app=f"{APPS}:dying"),
        checkpoints=CheckpointSettings(folder=tmp_path / "checkpoints", every=every),
    )
    result = launch(dying_config, 2, folder, Elastic(max_restarts=1))
    steps = [json.loads(row)["step"] for row in (folder / "rows.jsonl").read_text().splitlines()]
    # The ninth step was not finished: the job resumed from a checkpoint before it.
    assert steps == [*range(8), *range(steps[8], 20)]
    assert steps[8] in range(every, 9, every)
    assert result.metrics.trained == reference.metrics.trained
    assert (result.parameters == reference.parameters).all()


@pytest.mark.usefixtures("forked_agents")
def test_a_job_lost_before_and_after_its_first_checkpoint_ends_with_the_trace_of_one_process(
    config: TrainConfig, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FANIN_TEST_FOLDER", str(tmp_path))
    config = dataclasses.replace(
        config,
        model=ModelSettings(app=f"{APPS}:lost"),
        stop=StopSettings(steps=10),
        evaluation=EvaluationSettings(),
        checkpoints=CheckpointSettings(folder=tmp_path / "checkpoints", every=LOST_EVERY),
    )
    reported: list[int] = []
    calls = StepCalls(on_step=lambda step: reported.append(step.step))
    history = launch(config, 2, folder, Elastic(max_restarts=2), calls).metrics.trained
    steps = [json.loads(row)["step"] for row in (folder / "rows.jsonl").read_text().splitlines()]
    assert reported == [0, 1, *steps], "the first rank of each attempt calls the caller"
    # The first attempt left no checkpoint, so the second one began from the start. The third one resumed from the
    # fourth step.
    assert steps == [*range(7), *range(4, 10)]
    seeds = [tmp_path / f"before-{step}.safetensors" for step in (3, 8)]
    assert seeds[0].read_bytes() == seeds[1].read_bytes()
    initial_config = dataclasses.replace(
        single_process(config), model=ModelSettings(app=f"{APPS}:lost", initial=seeds[0])
    )
    reference = train_rank(dataclasses.replace(initial_config, checkpoints=CheckpointSettings())).metrics.trained
    assert history.losses == pytest.approx(reference.losses, abs=1e-5)
    assert not list(folder.glob("*.safetensors")), "the job has ended"


def test_impossible_launches_are_refused_before_a_process_starts(config: TrainConfig, folder: Path) -> None:
    with pytest.raises(InvalidInput, match="FN-1266"):
        launch(config, 3, folder)
    with pytest.raises(InvalidInput, match="FN-1202"):
        launch(config, 0, folder)
    assert not folder.exists()


# In CI, test_observed_jobs checks an error of fanin's that a rank returns.
@pytest.mark.nightly
@pytest.mark.usefixtures("forked_agents")
def test_an_error_of_fanin_keeps_its_type(config: TrainConfig, folder: Path) -> None:
    with pytest.raises(InvalidInput, match=r"missing.npz: no such file"):
        launch(dataclasses.replace(config, data=DataSettings(examples=Path("missing.npz"))), 2, folder)


@pytest.mark.nightly
@pytest.mark.usefixtures("forked_agents")
def test_an_error_of_the_apps_own_code_names_its_line(config: TrainConfig, folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"ArithmeticError at \S*apps\.py:\d+: the App broke on rank 1"):
        launch(dataclasses.replace(config, model=ModelSettings(app=f"{APPS}:crashing")), 2, folder)


@pytest.mark.nightly
def test_a_killed_rank_is_reported_with_the_end_of_a_log(config: TrainConfig, folder: Path) -> None:
    with pytest.raises(Conflict, match=r"datacenter job: torchrun ended with status 1; ") as excinfo:
        launch(dataclasses.replace(config, model=ModelSettings(app=f"{APPS}:killed")), 2, folder)
    # The last line is by torchrun, or by the rank that waited for the killed one.
    assert re.search(r"(torchrun|stderr)\.log ends:\n", str(excinfo.value))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: object, seconds: float) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


@pytest.mark.parametrize("victim", in_ci(("caller", "agent", "killed caller"), ()))
def test_nothing_outlives_an_interrupted_caller_or_a_killed_agent(
    config: TrainConfig, tmp_path: Path, folder: Path, victim: str
) -> None:
    path = write_config(dataclasses.replace(config, model=ModelSettings(app=f"{APPS}:sleeping")), tmp_path)
    assert path.name == CONFIG_FILE
    environment = os.environ | {"FANIN_TEST_FOLDER": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LAUNCH, path, folder]
    pid_files = [tmp_path / f"pids-{rank}" for rank in range(2)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as caller:
        try:
            wait_until(lambda: all(file.exists() for file in pid_files), LIMIT_S)
            pids = [[int(pid) for pid in file.read_text().split()] for file in pid_files]
            if victim == "agent":
                os.kill(pids[0][1], signal.SIGKILL)
            else:
                caller.send_signal(signal.SIGINT if victim == "caller" else signal.SIGKILL)
            _, stderr = caller.communicate(timeout=LIMIT_S)
        finally:
            caller.kill()
    messages = {"caller": "KeyboardInterrupt", "agent": "torchrun ended with status -9", "killed caller": ""}
    assert messages[victim] in stderr
    wait_until(lambda: not any(is_alive(pid) for row in pids for pid in row), LIMIT_S)


def interrupted_caller(folder: Path, seconds: float) -> tuple[subprocess.Popen[bytes], int]:
    """Return an interrupted caller, and the pid of its rank, which takes ``seconds`` to save."""
    program = folder / "slow.py"
    program.write_text(SLOW)
    command = [sys.executable, "-c", RUN_SLOW, program, folder, str(seconds)]
    caller = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    pid_file = folder / "begun"
    wait_until(lambda: pid_file.exists() and pid_file.read_text(), LIMIT_S)
    caller.send_signal(signal.SIGINT)
    return caller, int(pid_file.read_text())


@pytest.mark.nightly
def test_a_rank_may_save_for_longer_than_torchruns_timeout(tmp_path: Path) -> None:
    caller, _ = interrupted_caller(tmp_path, 35.0)
    assert caller.wait(LIMIT_S)
    assert (tmp_path / "saved").exists()


@pytest.mark.nightly
def test_a_second_signal_ends_a_slow_rank(tmp_path: Path) -> None:
    caller, pid = interrupted_caller(tmp_path, 50.0)
    time.sleep(1.0)
    assert caller.poll() is None, "it waits for the rank"
    caller.send_signal(signal.SIGINT)
    assert caller.wait(10.0)
    wait_until(lambda: not is_alive(pid), 5.0)


@pytest.mark.usefixtures("forked_agents")
def test_a_parameter_that_the_loss_does_not_use_is_named(config: TrainConfig, folder: Path) -> None:
    model = dataclasses.replace(config.model, app=f"{APPS}:idle")
    with pytest.raises(UnsupportedModel, match="FN-1295"):
        launch(dataclasses.replace(config, model=model, stop=StopSettings(steps=1)), 2, folder)
