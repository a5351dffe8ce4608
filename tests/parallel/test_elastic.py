"""Machines that join and leave: two launchers on the loopback address run a job that is resized."""

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parallel.machines import NUM_STEPS, Place, empty_place
from parallel.programs import Programs

from fanin.datacenter.config.communication import CommunicationSettings
from fanin.datacenter.config.settings import CheckpointSettings, DataSettings, ModelSettings, StopSettings
from fanin.datacenter.config.train_config import TrainConfig, check_fitted, read_train_config
from fanin.datacenter.files.jobfiles import SEED_FILE
from fanin.datacenter.jobs.job import train_rank
from fanin.datacenter.jobs.torchrun import Elastic, begin_logs, failure_reason
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.ranks.elastic import PARENT, PARENT_POLL_S, end_with_parent
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.watch.hangs import HangReport, PendingOperation, attempt_folder, write_report
from fanin.protos.errors import InvalidInput


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Yield a job's folder that has no machine yet."""
    monkeypatch.setenv("FANIN_TEST_FOLDER", str(tmp_path))
    with empty_place(tmp_path) as empty:
        yield empty


def reference_losses(place: Place) -> list[float]:
    """Return the losses of one undisturbed process."""
    config = read_train_config(place.folder / "train.toml", {"parallel": {"mesh": "none"}})
    return list(train_rank(replace(config, checkpoints=CheckpointSettings())).metrics.trained.losses)


@pytest.mark.nightly
def test_a_job_of_two_machines_continues_on_one(place: Place, programs: Programs) -> None:
    num_steps = 16
    place.write("precise", every=num_steps, num_steps=num_steps)
    place.pace(0.2)
    programs.check("resizes", place.folder, place.port, warning_action="default")
    first, second = (json.loads((place.folder / f"machine-{number}.json").read_text()) for number in range(2))
    assert place.steps() == list(range(num_steps)), "a checkpoint was made when one was stopped"
    assert (first["mesh"], first["nproc"], second["nproc"]) == ("none", 1, 2)
    assert first["loss"] == pytest.approx(reference_losses(place), abs=1e-10)
    assert 3 < len(second["loss"]) < num_steps
    assert first["loss"][: len(second["loss"])] == second["loss"]


# In CI, one resize in forks (above). Lost ranks start again from a checkpoint (test_launch), and checkpoints resume on
# other meshes (test_checkpoint). A job is fitted to the ranks that exist (below).
@pytest.mark.nightly
def test_the_remaining_machine_of_two_ends_with_the_trace_of_one_process(place: Place) -> None:
    first, second = place.start_two("precise")
    second.kill()
    place.pace(0.0)
    result = first.end()
    steps = place.steps()
    restart = next(index for index in range(1, len(steps)) if steps[index] <= steps[index - 1])
    assert steps == [*range(restart), *range(steps[restart], NUM_STEPS)]
    assert steps[restart] > 0, "it went on from a checkpoint"
    assert (result["mesh"], result["nproc"]) == ("none", 1)
    assert result["loss"] == pytest.approx(reference_losses(place), abs=1e-10)
    logs = list((place.folder / "state" / "logs").iterdir())
    assert len(logs) == 2, "each machine has its own"
    assert all((each / "torchrun.log").exists() and list(each.rglob("stderr.log")) for each in logs)


@pytest.mark.nightly
def test_a_machine_lost_before_the_first_checkpoint_changes_no_value(place: Place) -> None:
    place.write("precise", every=NUM_STEPS)
    place.pace(1.0)
    pair = ("--nodes", "2:2")
    first, second = place.start(*pair), place.start(*pair)
    place.wait_until(lambda: len(place.steps()) > 2)
    seed_file = place.folder / "state" / SEED_FILE
    before = seed_file.stat()
    second.kill()
    ranks = place.num_ranks()
    third = place.start(*pair)
    place.wait_until(lambda: place.num_ranks() == ranks + 2 and place.steps()[-1:] == [2])
    after = seed_file.stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino), "it is read again, not written"
    place.pace(0.0)
    result = first.end()
    assert third.end() == result
    assert place.steps() == [*range(NUM_STEPS)], "from the first step on"
    assert result["loss"] == pytest.approx(reference_losses(place), abs=1e-10)
    assert not seed_file.exists()


@pytest.mark.nightly
def test_a_returning_machine_joins_the_job(place: Place) -> None:
    first, second = place.start_two("paced")
    second.kill()
    num_steps = len(place.steps())
    place.wait_until(lambda: len(place.steps()) > num_steps + 3)
    place.pace(1.0)
    third, ranks = place.start(), place.num_ranks()
    place.wait_until(lambda: place.num_ranks() > ranks)
    place.pace(0.0)
    result = first.end()
    assert third.end() == result
    assert (result["mesh"], result["nproc"]) == ("dp_replicate=2", 2)
    assert result["loss"] == pytest.approx(reference_losses(place), abs=1e-5)


@pytest.mark.nightly
def test_the_other_machine_continues_when_one_is_stopped(place: Place) -> None:
    first, second = place.start_two("precise")
    second.stop()
    stopped_result = second.end()
    place.pace(0.0)
    result, steps = first.end(), place.steps()
    assert steps == list(range(NUM_STEPS)), "a checkpoint was made for it, and no step was done twice"
    assert (stopped_result["nproc"], result["nproc"]) == (2, 1)
    assert result["loss"] == pytest.approx(reference_losses(place), abs=1e-10)
    first_losses, all_losses = stopped_result["loss"], result["loss"]
    assert isinstance(first_losses, list)
    assert isinstance(all_losses, list)
    assert 6 < len(first_losses) < NUM_STEPS
    assert all_losses[: len(first_losses)] == first_losses


def test_a_machine_keeps_the_logs_of_others_and_reports_those_of_this_job(tmp_path: Path) -> None:
    elastic = Elastic(max_restarts=1, max_nodes=2, endpoint="host:29500")
    logs, waits = tmp_path / "logs", PendingOperation(axis="all ranks", kind="all_reduce", ranks=(0, 1), sequence=1)
    for name in ("before", "other"):
        (logs / name).mkdir(parents=True)
        (logs / name / "stderr.log").write_text(f"what {name} said")
        # One minute before this machine begins.
        os.utime(logs / name / "stderr.log", (time.time() - 60.0,) * 2)
    attempt = attempt_folder(tmp_path, 0)
    write_report(attempt, report(0, waits))
    os.utime(attempt / "rank-0.json", (time.time() - 60.0,) * 2)
    own_logs = begin_logs(tmp_path, elastic)
    assert own_logs.parent == logs
    (own_logs / "torchrun.log").write_text("what torchrun said")
    assert failure_reason(tmp_path, 3).endswith("torchrun.log ends:\nwhat torchrun said")
    (logs / "other" / "stderr.log").write_text("what it fails with")
    assert failure_reason(tmp_path, 3).endswith("other/stderr.log ends:\nwhat it fails with")
    write_report(attempt, report(0, waits))
    assert failure_reason(tmp_path, 3).startswith("rank 1 (dp_shard 1) hangs")
    assert (logs / "before" / "stderr.log").exists()
    # A single machine knows that no other machine takes part.
    assert begin_logs(tmp_path) == logs
    assert [path.name for path in logs.iterdir()] == ["begun"]
    assert not attempt.exists()


def report(rank: int, waits: PendingOperation) -> HangReport:
    """Return a report from a mesh of two ranks."""
    return HangReport(
        rank=rank, mesh="dp_shard=2", step=2, still_s=1.5, waits=waits, module="", phase="after", line="", done={}
    )


def job(**changes: object) -> TrainConfig:
    """Return a config without data. Nothing is started."""
    config = TrainConfig(
        model=ModelSettings(app="a:b"),
        data=DataSettings(examples=Path("x.npz")),
        training=TrainingSettings(batch_size=24, learning_rate=0.1),
        stop=StopSettings(steps=1),
    )
    return replace(config, **changes)


@given(world=st.integers(1, 24), dp_replicate=st.integers(1, 4), dp_shard=st.integers(1, 4))
def test_a_job_is_fitted_with_its_batch_or_refused(world: int, dp_replicate: int, dp_shard: int) -> None:
    mesh = MeshShape(dp_replicate=dp_replicate, dp_shard=dp_shard)
    config = job(parallel=ParallelSettings(mesh=mesh))
    if 24 % world == 0:
        check_fitted(config, world)
        assert config.fitted(world) == replace(config, parallel=ParallelSettings(mesh=mesh.fit(world)))
        return
    with pytest.raises(InvalidInput, match=f"got batch 24, expected a multiple of {world} parts") as excinfo:
        check_fitted(config, world)
    assert ("take a batch that can be divided" in str(excinfo.value)) == (mesh.num_ranks != world)


def test_a_rank_ends_whose_agent_ended_before_its_first_check(monkeypatch: pytest.MonkeyPatch) -> None:
    for parent, expected in ((os.getppid(), False), (2**30, True)):
        event = threading.Event()
        monkeypatch.setenv(PARENT, str(parent))
        end_with_parent(event.set)
        assert event.wait(2 * PARENT_POLL_S) == expected


def test_settings_of_shards_or_copies_are_refused_where_none_remain() -> None:
    offload_job = job(parallel=ParallelSettings(mesh=MeshShape(dp_shard=2, tp=2), offload=True))
    with pytest.raises(InvalidInput, match="FN-1271"):
        check_fitted(offload_job, 2)
    sharded_job = job(parallel=ParallelSettings(mesh=MeshShape(dp_shard=2), offload=True))
    check_fitted(sharded_job, 1)
    assert sharded_job.fitted(1).parallel.sharded
    hook_job = job(
        parallel=ParallelSettings(mesh=MeshShape(dp_replicate=2)), communication=CommunicationSettings(hook="bf16")
    )
    with pytest.raises(InvalidInput, match="FN-1256"):
        check_fitted(hook_job, 1)
