"""Repeated, simultaneous and late events: signals, launchers, machines of other jobs, and waits that are no hang."""

import fcntl
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from support.commands import Fanin, fanin_in_process, one_line
from torch.distributed.elastic.agent.server.api import WorkerGroup

from fanin.clients.data.digits import split_digits
from fanin.commands.train import Terminated, terminator
from fanin.datacenter.checkpoints.checkpoint import Checkpoints
from fanin.datacenter.checkpoints.progress import Progress, latest
from fanin.datacenter.config.settings import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    StopSettings,
    WatchSettings,
)
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.files.folders import LOCK_FILE, locked_folders
from fanin.datacenter.files.jobfiles import (
    CONFIG_FILE,
    METRICS_FILE,
    Metrics,
    TrainingHistory,
    TrainResult,
    outcome_files,
    read_config,
    read_result,
    write_config,
    write_error,
    write_result,
)
from fanin.datacenter.jobs.agent import Agent, belongs_to_job
from fanin.datacenter.jobs.job import main, train_rank
from fanin.datacenter.jobs.launch import launch, outcome
from fanin.datacenter.jobs.torchrun import ONE_MACHINE, Elastic, begin_logs, failure_reason
from fanin.datacenter.observers.loading import RankPlace
from fanin.datacenter.parallel.engine import build_engine
from fanin.datacenter.parallel.settings import TrainingSettings
from fanin.datacenter.ranks.elastic import OTHER_JOB, StopSignal
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.training.model import build_job_model
from fanin.datacenter.watch.hangs import HangReport, PendingOperation, attempt_folder, write_report
from fanin.datacenter.watch.watchdog import Watchdog
from fanin.protos.errors import Conflict, InvalidInput, StorageFull

APPS = Path(__file__).with_name("apps.py")
TWO = Elastic(max_nodes=2, min_nodes=2, endpoint="host:29500")
METRICS = Metrics(
    trained=TrainingHistory(losses=(2.0, 1.0), evaluated=(), best=0, flat=False),
    mesh=MeshShape(),
    num_ranks=1,
    train_s=1.0,
    units_per_second=1.0,
    peak_memory_bytes=1,
)


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """Return a short job with checkpoints on the public digits. Its App stops it in the third step."""
    public = split_digits(1, 1.0, 0).public
    np.savez(tmp_path / "data.npz", x=public.inputs["x"], y=public.y)
    return TrainConfig(
        model=ModelSettings(app=f"{APPS}:stopping"),
        data=DataSettings(examples=tmp_path / "data.npz", held_fraction=0.2),
        training=TrainingSettings(batch_size=16, learning_rate=0.05, optimizer="sgd"),
        stop=StopSettings(steps=5),
        checkpoints=CheckpointSettings(folder=tmp_path / "kept", weights=tmp_path / "out.safetensors"),
    )


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """Return the command line."""
    return fanin_in_process(capsys, monkeypatch)


def test_a_stopping_job_handles_signals_until_all_files_are_written(config: TrainConfig, tmp_path: Path) -> None:
    before, stop = signal.getsignal(signal.SIGTERM), StopSignal()
    with ExitStack() as stack:
        stack.push(stop)
        result = train_rank(config, RankPlace(folder=tmp_path), stop=stop)
        # The checkpoint is written by now, but the result is not.
        assert latest(tmp_path / "kept").step == 3
        assert signal.getsignal(signal.SIGTERM) is not before
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    assert (result.metrics.stopped, len(result.metrics.trained.losses)) == (True, 3)
    assert not (tmp_path / "out.safetensors").exists(), "it does not end with these"


def test_a_result_reports_a_stop_and_that_of_the_next_run_reports_none(config: TrainConfig, tmp_path: Path) -> None:
    before, path = signal.getsignal(signal.SIGTERM), write_config(config, tmp_path)
    for stopped in (True, False):
        assert main([str(path)]) == 0
        assert read_result(tmp_path).metrics.stopped == stopped
        assert (tmp_path / "out.safetensors").exists() != stopped
        assert signal.getsignal(signal.SIGTERM) is before


def test_a_stopped_result_belongs_to_the_stopped_machine(tmp_path: Path) -> None:
    (begin_logs(tmp_path, TWO) / "torchrun.log").write_text("nobody came for 10 minutes")
    write_result(tmp_path, TrainResult(metrics=replace(METRICS, stopped=True)))
    # On one machine, the job's own ranks were stopped.
    assert outcome(tmp_path, ONE_MACHINE, 1, outcome_files(tmp_path)).metrics.stopped
    message = (
        r"was stopped after 2 steps, and the job could not continue without it; run the same command .* 10 minutes"
    )
    with pytest.raises(Conflict, match=f"(?s){message}"):
        outcome(tmp_path, TWO, 1, outcome_files(tmp_path))
    write_result(tmp_path, TrainResult(metrics=METRICS))
    assert outcome(tmp_path, TWO, 1, outcome_files(tmp_path)).metrics == METRICS
    # Nothing of another job is used: neither its result nor its error.
    write_error(tmp_path, InvalidInput("its own"))
    with pytest.raises(InvalidInput, match="its own"):
        outcome(tmp_path, TWO, 0, outcome_files(tmp_path))
    write_result(tmp_path, TrainResult(metrics=METRICS))
    assert outcome(tmp_path, TWO, 0, outcome_files(tmp_path)).metrics == METRICS, "the error is of a lost machine"
    with pytest.raises(Conflict, match="FN-1358"):
        outcome(tmp_path, TWO, OTHER_JOB, outcome_files(tmp_path))


def agents() -> list[str]:
    """Return the process ids of the agents that this process has started."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [
        child for child in children if b"fanin.datacenter.jobs.ranks" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def test_a_launcher_stopped_while_it_waits_has_no_earlier_result(
    fanin: Fanin, config: TrainConfig, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    write_result(state, TrainResult(metrics=METRICS))
    (tmp_path / "train.toml").write_text(
        f'[model]\napp = "{config.model.app}"\n[data]\nexamples = "{config.data.examples}"\n'
        "[training]\nbatch_size = 16\nlearning_rate = 0.1\n[stop]\nsteps = 1\n[parallel]\nmesh = 'dp_replicate=2'\n"
    )

    def send_signal() -> None:
        while not agents():
            time.sleep(0.01)
        # The start of the agent must have returned: otherwise no one ends it, and it waits until this process ends.
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send_signal)
    sender.start()
    completed = fanin("train", tmp_path / "train.toml", "--nodes", "2", "--endpoint", "127.0.0.1:1", "--state", state)
    sender.join()
    assert one_line(completed, "train").startswith("stopped before the first result")
    assert (state / METRICS_FILE).exists()
    assert agents() == []


def test_simultaneous_signals_count_as_one() -> None:
    clock = iter([5.0, 5.000001, 5.9, 6.0, 6.1])
    handler = terminator(lambda: next(clock))
    outcomes = []
    for _ in range(5):
        try:
            handler(signal.SIGTERM, None)
        except Terminated:
            outcomes.append(True)
        else:
            outcomes.append(False)
    assert outcomes == [True, False, False, True, True]


class RecordingAgent(Agent):
    """An agent without ranks, which records the time that they would have had."""

    def __init__(self, seconds: int) -> None:
        self._shutdown_timeout = seconds
        self.timeouts: list[int] = []

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self.timeouts.append(timeout)


def test_ranks_stopped_for_a_machine_have_the_configured_timeout(worker_group: WorkerGroup) -> None:
    agent = RecordingAgent(60)
    agent._stop_workers(worker_group)
    assert agent.timeouts == [60]


@pytest.fixture
def worker_group() -> Iterator[WorkerGroup]:
    """Yield a worker group without ranks."""
    yield object.__new__(WorkerGroup)


def test_one_endpoint_is_for_one_job() -> None:
    store = dist.HashStore()
    assert [belongs_to_job(store, job) for job in ("a", "a", "b", "a")] == [True, True, False, True]


def test_a_mistyped_config_does_not_replace_another(config: TrainConfig, tmp_path: Path) -> None:
    other_config = replace(config, seed=1)
    paths = [write_config(each, tmp_path, shared=True) for each in (config, other_config, config)]
    assert len(set(paths)) == 2
    assert [read_config(path) for path in paths] == [config, other_config, config]


def test_a_folder_stays_locked_while_processes_of_its_job_exist(tmp_path: Path) -> None:
    with locked_folders([tmp_path], 0.0) as (descriptor,):
        with (
            pytest.raises(Conflict, match="FN-1351"),
            locked_folders([tmp_path], 0),
        ):
            pass
        # Its torchrun inherits the lock, and keeps it when the launcher is killed.
        lock_copy = os.dup(descriptor)
    try:
        with pytest.raises(Conflict, match=f"folder {tmp_path}: another job"), locked_folders([tmp_path], 0.0):
            pass
    finally:
        os.close(lock_copy)
    with locked_folders([tmp_path], 0.0):
        pass


def test_a_launcher_waits_for_an_earlier_job_to_end(
    config: TrainConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoints = tmp_path / "kept"
    checkpoints.mkdir()
    (checkpoints / LOCK_FILE).touch()
    with (checkpoints / LOCK_FILE).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Timer(0.5, lock.close).start()
        # An obstacle at the first file that is written saves this test a job.
        (tmp_path / "state" / CONFIG_FILE).mkdir(parents=True)
        with pytest.raises(IsADirectoryError):
            launch(config, 1, tmp_path / "state")
        assert lock.closed
    assert f"folder {checkpoints}: waiting for another job there to end" in capfd.readouterr().err


def test_a_log_removed_before_it_is_read_is_ignored(tmp_path: Path) -> None:
    logs = begin_logs(tmp_path)
    log_folder = logs / "id" / "attempt_0" / "0"
    log_folder.mkdir(parents=True)
    # The file is listed but does not exist, as if another machine's torchrun had removed it in between.
    (log_folder / "stderr.log").symlink_to(tmp_path / "nowhere")
    assert failure_reason(tmp_path, 1) == f"torchrun ended with status 1; no log of it is left in {logs}"
    (logs / "torchrun.log").write_text("what torchrun said")
    assert failure_reason(tmp_path, 1).endswith("what torchrun said")
    assert outcome_files(tmp_path / "nowhere") == set()


def test_a_hang_in_an_earlier_attempt_is_not_the_reason_of_the_last_failure(tmp_path: Path) -> None:
    logs = begin_logs(tmp_path)
    waits = PendingOperation(axis="all ranks", kind="all_reduce", ranks=(0, 1), sequence=1)
    report = HangReport(
        rank=0, mesh="dp_shard=2", step=2, still_s=1.5, waits=waits, module="", phase="after", line="", done={}
    )
    (logs / "id" / "attempt_0" / "0").mkdir(parents=True)
    write_report(attempt_folder(tmp_path, 0), report)
    assert failure_reason(tmp_path, 1).startswith("rank 1 (dp_shard 1) hangs")
    time.sleep(0.02)
    (logs / "id" / "attempt_1" / "0").mkdir(parents=True)
    (logs / "id" / "attempt_1" / "0" / "stderr.log").write_text("what it fails with")
    assert failure_reason(tmp_path, 1).endswith("attempt_1/0/stderr.log ends:\nwhat it fails with")


def test_a_job_resumes_only_from_its_own_kind_of_checkpoint(config: TrainConfig, tmp_path: Path) -> None:
    engine = build_engine(build_job_model(config).model, config.parallel, config.training, None)
    with Checkpoints(tmp_path / "own", engine) as checkpoints:
        checkpoints.save(Progress(step=1, seed=0))
    for settings in (CheckpointSettings(resume=tmp_path / "own"), CheckpointSettings(folder=tmp_path / "own")):
        with pytest.raises(
            InvalidInput,
            match="FN-1345",
        ):
            train_rank(replace(config, checkpoints=settings))


def test_a_watchdog_removes_its_hooks_and_its_thread(config: TrainConfig, tmp_path: Path) -> None:
    engine = build_engine(build_job_model(config).model, config.parallel, config.training, None)
    layers = [layer for part in engine.parts.values() for layer in part.modules()]

    def num_hooks() -> int:
        return sum(len(layer._forward_pre_hooks) + len(layer._forward_hooks) for layer in layers)

    before = num_hooks()
    with Watchdog(engine, tmp_path, timeout_s=30.0):
        assert num_hooks() > before
        (thread,) = (each for each in threading.enumerate() if each.name == "watchdog")
    assert num_hooks() == before
    thread.join(10.0)
    assert not thread.is_alive(), "it would end the process"


def test_a_checkpoint_that_takes_long_is_no_hang(config: TrainConfig, tmp_path: Path) -> None:
    engine, marker, calls = build_engine(build_job_model(config).model, config.parallel, config.training, None), [], 0
    checkpoints = Checkpoints(tmp_path, engine)
    # A writer at this path blocks until a reader opens it.
    os.mkfifo(tmp_path / "LATEST.new")

    def wait() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            marker.append(os.open(tmp_path / "LATEST.new", os.O_RDONLY | os.O_NONBLOCK))

    checkpoints.while_waiting = wait
    checkpoints.save(Progress(step=1))
    with pytest.raises(StorageFull):
        checkpoints.finish()
    os.close(marker[0])
    assert calls >= 2


def run_evaluation(config: TrainConfig, folder: Path) -> None:
    """Run a job whose evaluation takes longer than the hang timeout."""
    train_rank(config, RankPlace(folder=folder))
    os._exit(0)


@pytest.mark.nightly
def test_an_evaluation_that_takes_long_is_no_hang(config: TrainConfig, tmp_path: Path) -> None:
    # In one process without layers in its model, nothing else moves.
    slow_config = replace(
        config,
        model=ModelSettings(app=f"{APPS}:bare"),
        stop=StopSettings(steps=1),
        evaluation=EvaluationSettings(batch_size=1, num_samples=8),
        checkpoints=CheckpointSettings(),
        watch=WatchSettings(hang_after_s=1.5),
    )
    child = multiprocessing.get_context("fork").Process(target=run_evaluation, args=(slow_config, tmp_path))
    child.start()
    child.join()
    assert child.exitcode == 0, "86 is a hang's"
