"""Files that are replaced atomically and durably: a reader finds the old bytes or the new ones."""

import os
import stat
from pathlib import Path

import pytest
from support.full_disk import full_disk, in_child
from support.synced import durable_files, synced

from fanin.edge.files import new_folder, replace_file
from fanin.protos.errors import InvalidInput


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_created_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"old", b"new"):
        replace_file(path, data, mode=0o600)
        assert path.read_bytes() == data
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert names(tmp_path) == ["file"]


def test_the_bytes_and_then_the_name_are_synced(tmp_path: Path) -> None:
    with synced(tmp_path) as syncs:
        replace_file(tmp_path / "file", b"data")
        replace_file(tmp_path / "file", b"more", writer="rank-3")
    assert [sync.path.name for sync in syncs] == ["file.new", tmp_path.name, "file.rank-3.new", tmp_path.name]
    assert [sync.content for sync in syncs] == [b"data", ("file",), b"more", ("file",)]
    assert durable_files(syncs[2:]) == [tmp_path / "file"]


def test_a_draft_of_a_killed_process_does_not_pass_on_its_permissions(tmp_path: Path) -> None:
    draft = tmp_path / "key.new"
    draft.touch()
    draft.chmod(0o644)
    replace_file(tmp_path / "key", b"secret", mode=0o600)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert names(tmp_path) == ["key"]


def test_on_a_full_disk_the_old_file_remains_without_a_draft(tmp_path: Path) -> None:
    replace_file(tmp_path / "file", b"old")

    def work() -> None:
        with full_disk(2), pytest.raises(OSError, match="File too large"):
            replace_file(tmp_path / "file", b"longer")
        assert (tmp_path / "file").read_bytes() == b"old"
        assert names(tmp_path) == ["file"]

    in_child(work)


def test_a_folder_in_the_place_of_the_draft_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "file.new").mkdir()
    with pytest.raises(OSError, match=os.strerror(21)):
        replace_file(tmp_path / "file", b"data")
    assert names(tmp_path) == ["file.new"]


def test_a_new_folder_may_be_missing_or_empty(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        assert new_folder("--out", path) == new_folder("--out", str(path)) == path


def test_a_new_folder_that_is_a_file_or_has_an_impossible_name_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    for name in ("file", "file/below", "a" * 300, "a\0b"):
        with pytest.raises(InvalidInput, match="FN-0397"):
            new_folder("--out", tmp_path / name)
