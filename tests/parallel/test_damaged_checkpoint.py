"""Every kind of damage to a checkpoint is detected, and the newest intact one is loaded in its place."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from parallel.saving import engine_of, step
from support.synced import durable_files, synced

from fanin.datacenter.checkpoints.checkpoint import Checkpoints
from fanin.datacenter.checkpoints.progress import Progress, latest, read_digests, write_marker, write_progress
from fanin.datacenter.config.train_config import parse_config
from fanin.datacenter.jobs.job import train_rank
from fanin.protos.errors import Corrupted, StorageFull


def _cut_index(checkpoint: Path) -> None:
    (checkpoint / ".metadata").write_bytes((checkpoint / ".metadata").read_bytes()[:40])


def _cut_shard(checkpoint: Path) -> None:
    (checkpoint / "__0_0.distcp").write_bytes(b"")


def _no_shard(checkpoint: Path) -> None:
    (checkpoint / "__0_0.distcp").unlink()


def _flip_in_a_tensor(checkpoint: Path) -> None:
    path = checkpoint / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def _no_folder(checkpoint: Path) -> None:
    shutil.move(checkpoint, checkpoint.parent.parent / "elsewhere")


def _bad_progress(checkpoint: Path) -> None:
    (checkpoint / "progress.json").write_text('{"format": 2, "step": -1}')


def _no_text(checkpoint: Path) -> None:
    (checkpoint / "progress.json").write_bytes(b"\xff\xfe\x00 garbage")


def _another_place(checkpoint: Path) -> None:
    path = checkpoint / "progress.json"
    path.write_text(path.read_text().replace('"seed": 3', '"seed": 4'))


def _another_step(checkpoint: Path) -> None:
    write_progress(checkpoint, Progress(step=7, seed=3), read_digests(checkpoint))


def _no_progress(checkpoint: Path) -> None:
    (checkpoint / "progress.json").unlink()


def _bad_marker(checkpoint: Path) -> None:
    (checkpoint.parent / "LATEST").write_text('{"format": 2, "folder": "../../etc"}')


def _no_marker_json(checkpoint: Path) -> None:
    (checkpoint.parent / "LATEST").write_text("[")


def _empty_marker(checkpoint: Path) -> None:
    (checkpoint.parent / "LATEST").write_bytes(b"")


def _marker_of_bytes(checkpoint: Path) -> None:
    (checkpoint.parent / "LATEST").write_bytes(b"\xff\xfe")


def _marker_of_another_format(checkpoint: Path) -> None:
    (checkpoint.parent / "LATEST").write_text('{"format": 1, "folder": "step-00000003"}')


def _no_marker(checkpoint: Path) -> None:
    (checkpoint.parent / "LATEST").unlink()


DAMAGES = {
    _cut_index: ".metadata: digest mismatch: received",
    _cut_shard: "__0_0.distcp: digest mismatch: received",
    _no_shard: "__0_0.distcp: cannot be read (No such file or directory)",
    _flip_in_a_tensor: "__0_0.distcp: digest mismatch: received",
    _no_folder: "LATEST: names step-00000003, which is not there",
    _bad_progress: "progress.json: got {'format': 2, 'step': -1}, expected format 2 and the keys",
    _no_text: "progress.json: not JSON, expected an object",
    _another_place: "progress.json: digest mismatch: received",
    _another_step: "progress.json: got step 7, expected that of its folder, step-00000003",
    _no_progress: "step-00000003: has no progress.json, though LATEST names it",
}
"""Damage to the newest checkpoint, and the message about it."""
MARKERS = {
    _bad_marker: "LATEST: got folder '../../etc', expected a checkpoint's",
    _no_marker_json: "LATEST: not JSON, expected an object with format 2",
    _empty_marker: "LATEST: not JSON",
    _marker_of_bytes: "LATEST: not JSON",
    _marker_of_another_format: "LATEST: got {'format': 1, 'folder': 'step-00000003'}, expected format 2",
    _no_marker: "LATEST: is missing, though there are whole checkpoints",
}


@pytest.fixture(scope="module")
def saved_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    """Return a folder with the checkpoints after 1, 2 and 3 steps, and the parameters of each."""
    folder, engine, values = tmp_path_factory.mktemp("three") / "kept", engine_of(), []
    with Checkpoints(folder, engine, keep=3) as checkpoints:
        for number in (1, 2, 3):
            step(engine, number)
            checkpoints.save(Progress(step=number, seed=3))
            checkpoints.finish()
            values.append({name: value.clone() for name, value in engine.full_parameters().items()})
    return folder, values


@pytest.mark.parametrize(
    ("damage", "number", "message"),
    [(damage, 2, message) for damage, message in DAMAGES.items()]
    + [(damage, 3, message) for damage, message in MARKERS.items()],
    ids=lambda value: getattr(value, "__name__", "").strip("_"),
)
def test_a_damaged_checkpoint_is_skipped_for_the_newest_complete_one(
    saved_steps: tuple[Path, list[dict[str, torch.Tensor]]],
    tmp_path: Path,
    damage: Callable[[Path], None],
    number: int,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, values = tmp_path / "kept", saved_steps[1]
    shutil.copytree(saved_steps[0], folder)
    damage(folder / "step-00000003")
    engine = engine_of()
    with Checkpoints(folder, engine, keep=3) as checkpoints:
        assert checkpoints.load() == Progress(step=number, seed=3)
        assert len(checkpoints.skipped) == 1
        assert message in checkpoints.skipped[0]
        assert all(torch.equal(engine.full_parameters()[name], value) for name, value in values[number - 1].items())
        (line,) = (
            record.getMessage() for record in caplog.records if record.name == "fanin.datacenter.checkpoints.checkpoint"
        )
        assert line.startswith(f"checkpoints: resuming from {folder}/step-{number:08d}, the newest complete one: ")
        assert message in line
        # The next save replaces the damaged checkpoint, and LATEST names it again.
        checkpoints.save(Progress(step=3, seed=5 if number == 2 else 3))
        checkpoints.finish()
        if number == 2:
            assert checkpoints.load() == Progress(step=3, seed=5)
            assert checkpoints.skipped == ()


def test_a_damaged_checkpoint_does_not_count_as_kept(
    saved_steps: tuple[Path, list[dict[str, torch.Tensor]]], tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    shutil.copytree(saved_steps[0], folder)
    _flip_in_a_tensor(folder / "step-00000003")
    with Checkpoints(folder, engine_of(), keep=2) as checkpoints:
        assert checkpoints.load() == Progress(step=2, seed=3)
        checkpoints.save(Progress(step=4))
    assert sorted(path.name for path in folder.iterdir()) == ["LATEST", "step-00000002", "step-00000004"]


def test_an_unmarked_newer_checkpoint_does_not_count_as_kept(
    saved_steps: tuple[Path, list[dict[str, torch.Tensor]]], tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    shutil.copytree(saved_steps[0], folder)
    shutil.rmtree(folder / "step-00000002")
    # As after a kill between steps 2 and 3 of a save.
    write_marker(folder, 1)
    with Checkpoints(folder, engine_of(), keep=1) as checkpoints:
        assert checkpoints.load() == Progress(step=1, seed=3)
        checkpoints.save(Progress(step=2))
    assert latest(folder) == Progress(step=2)


@pytest.mark.parametrize("damage", [*DAMAGES, _bad_marker], ids=lambda value: value.__name__.strip("_"))
def test_without_another_checkpoint_the_damage_is_reported(
    saved_steps: tuple[Path, list[dict[str, torch.Tensor]]], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = tmp_path / "kept"
    shutil.copytree(saved_steps[0], folder)
    for number in (1, 2):
        shutil.rmtree(folder / f"step-{number:08d}")
    damage(folder / "step-00000003")
    if damage is _bad_marker:
        _cut_shard(folder / "step-00000003")
    engine = engine_of()
    before = {name: value.clone() for name, value in engine.full_parameters().items()}
    with (
        Checkpoints(folder, engine) as checkpoints,
        pytest.raises(Corrupted, match=f"^{folder}.*: no checkpoint in {folder} is intact; choose another folder, or"),
    ):
        checkpoints.load()
    assert all(torch.equal(engine.full_parameters()[name], value) for name, value in before.items())


def job_text(folder: Path) -> str:
    """Return the config of a job of four steps, with a checkpoint and an evaluation after each second one."""
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(0, 11, 90, np.uint16))
    return f"""
        model.decoder = {{ vocabulary = 11, width = 8, num_layers = 1, num_heads = 2, num_kv_heads = 1 }}
        data = {{ tokens = "{folder / "tokens.npy"}", length = 6 }}
        training = {{ batch_size = 4, learning_rate = 0.01 }}
        stop = {{ steps = 4 }}
        checkpoints = {{ folder = "{folder / "kept"}", every = 2 }}
        evaluation = {{ every = 2 }}
    """


def test_a_result_lists_the_skipped_checkpoints(tmp_path: Path) -> None:
    text = job_text(tmp_path)
    reference = train_rank(parse_config(text, "here")).metrics
    assert reference.skipped_checkpoints == ()
    _flip_in_a_tensor(tmp_path / "kept" / "step-00000004")
    resumed_metrics = train_rank(parse_config(text, "here")).metrics
    assert resumed_metrics.trained.losses == reference.trained.losses
    (fault,) = resumed_metrics.skipped_checkpoints
    assert "step-00000004/__0_0.distcp: digest mismatch: received " in fault
    assert latest(tmp_path / "kept").step == 4
    assert train_rank(parse_config(text, "here")).metrics.skipped_checkpoints == ()


def test_a_job_resumes_without_its_damaged_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = job_text(tmp_path)
    train_rank(parse_config(text, "here"))
    trace = tmp_path / "kept" / "steps.jsonl"
    trace.write_bytes(b"\xff" + trace.read_bytes()[1:])
    longer = text.replace("steps = 4", "steps = 6")
    for _ in range(2):
        metrics = train_rank(parse_config(longer, "here")).metrics
        losses = metrics.trained.losses
        assert losses[:4] == (None,) * 4
        assert all(isinstance(loss, float) for loss in losses[4:])
        assert len(losses) == 6
        # The third evaluation is the only one in the list.
        assert [each.step for each in metrics.trained.evaluated] == [6]
        assert metrics.trained.best in (0, 1)
        if metrics.lost_history:
            assert "steps.jsonl: line 1: got b'" in metrics.lost_history
            assert metrics.lost_history in caplog.text
    assert metrics.lost_history == "", "the job has written a new trace"


def test_a_folder_with_only_an_interrupted_save_starts_from_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000003" / "__0_0.distcp").write_bytes(b"half of it")
    with Checkpoints(tmp_path, engine_of()) as checkpoints:
        assert checkpoints.load() is None


def test_files_of_a_commit_are_synced_before_they_have_their_names(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-00000002"
    checkpoint.mkdir()
    with synced(tmp_path) as syncs:
        write_progress(checkpoint, Progress(step=2, seed=3), {})
    assert durable_files(syncs) == [checkpoint / "progress.json"]
    with synced(tmp_path) as syncs:
        write_marker(tmp_path, 2)
    # The name of progress.json is synced once more, before LATEST names its folder.
    assert durable_files(syncs[1:]) == [tmp_path / "LATEST"]


def test_a_commit_that_cannot_replace_latest_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    folder, engine = tmp_path / "kept", engine_of()
    with Checkpoints(folder, engine, keep=1) as checkpoints:
        checkpoints.save(Progress(step=1, seed=3))
        checkpoints.finish()
        marker = folder / "LATEST"
        written = marker.read_bytes()
        marker.unlink()
        # A file cannot replace a folder.
        marker.mkdir()
        checkpoints.save(Progress(step=2, seed=3))
        with pytest.raises(StorageFull, match="LATEST"):
            checkpoints.finish()
        marker.rmdir()
        marker.write_bytes(written)
        assert checkpoints.load() == Progress(step=1, seed=3)
