"""A checkpoint resumes at any other mesh with the same numbers, and only a complete one is ever loaded."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parallel.programs import Programs
from parallel.saving import engine_of, saved_engine, step
from support.nightly import in_ci

from fanin.datacenter.checkpoints.checkpoint import Checkpoints
from fanin.datacenter.checkpoints.progress import Progress, latest, write_marker, write_progress
from fanin.protos.errors import InvalidInput, StorageFull

TOLERANCE = 1e-10
counts = st.integers(0, 2**63)
progress_values = st.builds(
    Progress,
    step=st.integers(0, 10**9),
    epoch=counts,
    position=counts,
    seed=counts,
    measures=st.dictionaries(st.text(max_size=9), st.floats(allow_nan=False, allow_infinity=False), max_size=3),
)


@pytest.fixture(scope="module", params=in_ci((4, 8), (4,)))
def num_ranks(request: pytest.FixtureRequest) -> int:
    """Number of ranks: four in CI, and also eight in the nightly suite."""
    return int(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, programs: Programs, num_ranks: int) -> Path:
    """Return the folder with the results of ``checkpoints.py``, which ran with warnings as errors."""
    results_folder = tmp_path_factory.mktemp("checkpoints")
    programs.check("checkpoints", results_folder, "checkpoints", num_ranks)
    return results_folder


def read(folder: Path, name: str) -> dict[str, np.ndarray]:
    with np.load(folder / f"{name}.npz") as archive:
        return dict(archive)


@pytest.mark.parametrize(
    ("model", "num_meshes"),
    # Tied: saved by ranks that held both ends of the weight, and loaded where two ranks hold them, where one rank holds
    # both, and in one process.
    [("untied", 3), ("uneven", 2), ("tied", 3)],
)
def test_a_checkpoint_of_several_ranks_resumes_on_any_mesh(folder: Path, model: str, num_meshes: int) -> None:
    parameters = read(folder, f"{model}-saved")
    meshes = {path.stem.removeprefix(f"{model}-") for path in folder.glob(f"{model}-*.npz")} - {"saved"}
    assert "none" in meshes
    assert len(meshes) == num_meshes
    losses = parameters.pop("losses")
    assert len(losses) == 5
    assert losses[-1] < losses[0], "something was learnt"
    for mesh in meshes:
        resumed_parameters = read(folder, f"{model}-{mesh}")
        assert np.abs(resumed_parameters.pop("losses") - losses[2:]).max() <= TOLERANCE, mesh
        assert set(resumed_parameters) == set(parameters)
        assert max(np.abs(resumed_parameters[name] - parameters[name]).max() for name in parameters) <= TOLERANCE, mesh


def test_the_last_two_are_kept_and_one_from_step_0_has_no_optimizer_state(folder: Path) -> None:
    results = read(folder, "kept")
    assert list(results["names"]) == ["LATEST", "step-00000004", "step-00000007"]
    fresh_losses = read(folder, "kept-fresh")["losses"]
    assert (results["losses"] == fresh_losses).all()


def test_another_model_is_refused_on_all_ranks_alike_and_changes_nothing(folder: Path, num_ranks: int) -> None:
    rows = [json.loads(str(row)) for row in read(folder, "refused")["told"]]
    assert len(rows) == num_ranks
    assert all(row == rows[0] for row in rows)
    error, unchanged = rows[0]
    assert unchanged
    assert error.startswith(f"InvalidInput: {folder}/untied/step-00000002: got 156 tensors: 72 unknown")


def test_all_ranks_report_the_same_reason_of_a_failed_save(folder: Path, num_ranks: int) -> None:
    rows = [json.loads(str(row)) for row in read(folder, "full")["told"]]
    assert len(rows) == num_ranks
    assert all(row == rows[0] for row in rows)
    trace_error, disk_error, file_error = rows[0]
    assert trace_error == "StorageFull: the trace of the last rank"
    assert "step-00000002: the checkpoint could not be written ([Errno 21] Is a directory: " in disk_error
    assert "step-00000003: the checkpoint could not be written ([Errno 17] File exists: " in file_error


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_one_process_resumes_bit_for_bit(tmp_path: Path, optimizer: str) -> None:
    first, other = saved_engine(tmp_path, optimizer=optimizer), engine_of(optimizer=optimizer)
    step(other, 5)
    with Checkpoints(tmp_path, other) as checkpoints:
        assert checkpoints.load() == Progress(step=1, seed=3)
    assert [step(other, seed) for seed in (1, 2)] == [step(first, seed) for seed in (1, 2)]


def test_a_save_contains_the_values_of_its_request(tmp_path: Path) -> None:
    engine = engine_of()
    before = engine.full_parameters()
    with Checkpoints(tmp_path, engine) as checkpoints:
        checkpoints.save(Progress())
        for seed in range(3):
            step(engine, seed)
        checkpoints.load()
    after = engine.full_parameters()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_interrupted_save_is_never_loaded(tmp_path: Path) -> None:
    engine = saved_engine(tmp_path)
    step(engine, 1)
    with Checkpoints(tmp_path, engine) as checkpoints:
        checkpoints.save(Progress(step=2))
    # As if the machine had crashed before the marker was moved, and in the middle of one more save.
    write_marker(tmp_path, 1)
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000003" / "__0_0.distcp").write_bytes(b"half of it")
    with Checkpoints(tmp_path, engine_of(), keep=1) as checkpoints:
        assert checkpoints.load() == Progress(step=1, seed=3)
        checkpoints.save(Progress(step=3))
        checkpoints.finish()
        assert checkpoints.load() == Progress(step=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "step-00000003"]


def test_a_full_disk_is_reported_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    engine = saved_engine(tmp_path)
    checkpoints = Checkpoints(tmp_path, engine)
    # A folder at the path of the marker's draft simulates a full disk.
    (tmp_path / "LATEST.new").mkdir()
    checkpoints.save(Progress(step=2))
    with pytest.raises(StorageFull, match="FN-1332"):
        checkpoints.finish()
    assert latest(tmp_path) == Progress(step=1, seed=3)


def test_a_first_checkpoint_that_fails_leaves_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, saved_engine(tmp_path / "other"))
    (tmp_path / "LATEST.new").mkdir()
    checkpoints.save(Progress(step=2))
    with pytest.raises(StorageFull, match=f"step-00000002: the checkpoint could not .*; {tmp_path} has no earlier one"):
        checkpoints.finish()


def test_the_marked_checkpoint_is_not_written_again(tmp_path: Path) -> None:
    engine = saved_engine(tmp_path)
    before = {path: path.stat().st_ino for path in (tmp_path / "step-00000001").iterdir()}
    with Checkpoints(tmp_path, engine) as checkpoints:
        step(engine, 1)
        checkpoints.save(Progress(step=1, seed=3))
    assert {path: path.stat().st_ino for path in (tmp_path / "step-00000001").iterdir()} == before
    # A checkpoint that cannot be resumed is written again.
    (tmp_path / "step-00000001" / "progress.json").unlink()
    with Checkpoints(tmp_path, engine) as checkpoints:
        checkpoints.save(Progress(step=1, seed=4))
    assert latest(tmp_path) == Progress(step=1, seed=4)


def test_a_damaged_older_checkpoint_does_not_prevent_a_save(tmp_path: Path) -> None:
    engine = saved_engine(tmp_path)
    (tmp_path / "step-00000001" / "progress.json").write_text("{")
    with Checkpoints(tmp_path, engine, keep=1) as checkpoints:
        checkpoints.save(Progress(step=2, seed=3))
    assert latest(tmp_path) == Progress(step=2, seed=3)
    assert not (tmp_path / "step-00000001").exists()


def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, saved_engine(tmp_path))
    # A file is not removed in place of a folder.
    (tmp_path / "step-00000002").write_text("in the way")
    with pytest.raises(StorageFull, match="FN-1332"):
        checkpoints.save(Progress(step=2))
    assert latest(tmp_path) == Progress(step=1, seed=3)


def test_all_ranks_load_the_same_older_checkpoint_and_report_the_same(folder: Path, num_ranks: int) -> None:
    rows = [json.loads(str(row)) for row in read(folder, "damaged")["told"]]
    assert len(rows) == num_ranks
    assert all(row == rows[0] for row in rows)
    resumed_step, skipped = rows[0]
    assert resumed_step == 4
    # The damage is one byte of the shard that the fourth rank wrote.
    assert [fault.partition(": digest mismatch: ")[0] for fault in skipped] == [
        f"{folder}/kept/step-00000007/__3_0.distcp"
    ]


@pytest.mark.parametrize(
    ("width", "optimizer", "message"),
    [
        (32, "adamw", "36 of another shape"),
        (
            16,
            "sgd",
            r"\[training\] optimizer, momentum: got settings of another .* state than that of embed.weight",
        ),
    ],
)
def test_another_shape_or_optimizer_is_refused(tmp_path: Path, width: int, optimizer: str, message: str) -> None:
    saved_engine(tmp_path)
    engine = engine_of(width, optimizer)
    with Checkpoints(tmp_path, engine) as checkpoints, pytest.raises(InvalidInput, match=message):
        checkpoints.load()


def test_keep_must_be_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="FN-1241"):
        Checkpoints(tmp_path, engine_of(), keep=0)


@given(progress=progress_values)
def test_progress_round_trips(tmp_path_factory: pytest.TempPathFactory, progress: Progress) -> None:
    folder = tmp_path_factory.mktemp("progress")
    assert latest(folder) is None
    checkpoint = folder / f"step-{progress.step:08d}"
    checkpoint.mkdir()
    write_progress(checkpoint, progress, {})
    assert latest(folder) is None, "nothing is taken before it is marked"
    write_marker(folder, progress.step)
    assert latest(folder) == progress


@pytest.mark.parametrize("changes", [{"step": -1}, {"epoch": True}, {"measures": {"loss": float("nan")}}])
def test_progress_refuses_values_that_no_file_can_hold(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="FN-1339"):
        replace(Progress(), **changes)
