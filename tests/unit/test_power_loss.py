"""Files after a power loss: the simulated disk keeps only synced files, and stored blobs are among them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forgetful import ForgetfulDisk

from fanin.protos.chunks import CHUNK_BYTES, artifact_of
from fanin.protos.messages import Piece
from fanin.server.storage.blobs import FolderBlobs
from fanin.server.storage.contracts.values import header_of
from fanin.server.storage.disk import Durability, make_folder
from fanin.server.storage.spool import FolderSpool

DATA = bytes(range(256)) * 20
DIGEST = artifact_of(DATA).sha256


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with one durable file."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "old").write_bytes(b"old")
    return root


@pytest.fixture
def disk(root: Path) -> Iterator[ForgetfulDisk]:
    disk = ForgetfulDisk(root, lambda _: None)
    yield disk
    disk.close()


def files_after_power_loss(disk: ForgetfulDisk, tmp_path: Path) -> dict[str, bytes]:
    """Return all files after a power loss."""
    after = tmp_path / "after"
    disk.lose_power(after)
    return {str(path.relative_to(after)): path.read_bytes() for path in after.rglob("*") if path.is_file()}


def test_bytes_and_names_that_were_not_synced_are_lost(root: Path, disk: ForgetfulDisk, tmp_path: Path) -> None:
    with (root / "half").open("wb") as file:
        file.write(b"synced")
        file.flush()
        disk.sync_file(file.fileno())
        file.write(b" and not")
    (root / "none").write_bytes(b"never synced")
    disk.sync_folder(root)
    (root / "late").write_bytes(b"no name")
    (root / "half").rename(root / "moved")
    (root / "old").unlink()
    assert files_after_power_loss(disk, tmp_path) == {"old": b"old", "half": b"synced", "none": b""}


@pytest.mark.parametrize("deep", [True, False])
def test_a_folder_survives_if_its_own_name_was_synced(
    root: Path, disk: ForgetfulDisk, tmp_path: Path, *, deep: bool
) -> None:
    folder = root / "folder"
    if deep:
        make_folder(folder, disk)
    else:
        folder.mkdir()
    with (folder / "file").open("wb") as file:
        file.write(DATA)
        file.flush()
        disk.sync_file(file.fileno())
    disk.sync_folder(folder)
    assert files_after_power_loss(disk, tmp_path) == ({"old": b"old", "folder/file": DATA} if deep else {"old": b"old"})


def test_a_chunk_that_was_put_survives(root: Path, disk: ForgetfulDisk, tmp_path: Path) -> None:
    artifact = FolderBlobs(root / "blobs", disk).put_pieces([DATA * (CHUNK_BYTES // len(DATA) + 1)])
    disk.lose_power(tmp_path / "after")
    assert artifact.size_bytes > CHUNK_BYTES
    assert (
        FolderBlobs(tmp_path / "after" / "blobs", Durability.PROCESS).missing(ref.sha256 for ref in artifact.chunks)
        == ()
    )


def test_an_unsynced_chunk_is_synced_when_it_is_put_again(root: Path, disk: ForgetfulDisk, tmp_path: Path) -> None:
    # The state after a process is killed between the file's creation and the sync of its folder.
    FolderBlobs(root / "blobs", Durability.PROCESS).put(DIGEST, DATA)
    FolderBlobs(root / "blobs", disk).put(DIGEST, DATA)
    assert files_after_power_loss(disk, tmp_path) == {"old": b"old", f"blobs/{DIGEST[:2]}/{DIGEST}": DATA}


def test_with_process_durability_nothing_is_synced(root: Path) -> None:
    # This descriptor cannot be synced: with host durability the same calls fail.
    readable, writable = os.pipe()
    try:
        Durability.PROCESS.sync_file(readable)
        Durability.PROCESS.sync_folder(root / "there is none")
        Durability.PROCESS.sync_all((readable, root / "there is none"))
        with pytest.raises(OSError, match="Invalid argument"):
            Durability.HOST.sync_file(readable)
        with pytest.raises(FileNotFoundError):
            Durability.HOST.sync_folder(root / "there is none")
        # The error of one of many is raised.
        with pytest.raises(OSError, match="Invalid argument"):
            Durability.HOST.sync_all((root, readable))
        with pytest.raises(FileNotFoundError):
            Durability.HOST.sync_all((root, root / "there is none"))
    finally:
        os.close(readable)
        os.close(writable)


def test_a_committed_payload_survives_in_the_folders_of_its_run_and_round(
    root: Path, disk: ForgetfulDisk, tmp_path: Path
) -> None:
    spool, header = FolderSpool(root / "spool", root / "updates", disk), header_of(DATA, "device")
    upload = spool.open(header, "device")
    upload.add(Piece(offset=0, data=DATA))
    upload.store()
    spool.commit(upload, "device")
    upload.close()
    assert files_after_power_loss(disk, tmp_path)[f"updates/run/1/device.{DIGEST[:16]}.payload"] == DATA
