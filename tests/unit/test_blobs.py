"""FolderBlobs: a file in the folder is always complete."""

import errno
import stat
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
from support.errors import raises
from support.full_disk import full_disk, in_child

from fanin.edge.files import DISK_PROBLEMS
from fanin.edge.tensors import sha256_hex
from fanin.protos.chunks import CHUNK_BYTES, artifact_of, short
from fanin.protos.errors import Corrupted, InvalidInput, NotFound, StorageFull
from fanin.server.storage.blobs import FolderBlobs
from fanin.server.storage.disk import Durability

DATA = bytes(range(256)) * 40
DIGEST = artifact_of(DATA).sha256


@pytest.fixture(params=Durability)
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> FolderBlobs:
    return FolderBlobs(tmp_path, request.param)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_chunk_is_read_from_any_offset(blobs: FolderBlobs, tmp_path: Path) -> None:
    blobs.put(DIGEST, DATA)
    assert blobs.read(DIGEST) == DATA
    assert blobs.read(DIGEST, 100) == DATA[100:]
    assert blobs.read(DIGEST, len(DATA)) == b""
    assert (tmp_path / DIGEST[:2] / DIGEST).read_bytes() == DATA


def test_putting_twice_is_harmless(blobs: FolderBlobs, tmp_path: Path) -> None:
    blobs.put(DIGEST, DATA)
    blobs.put(DIGEST, DATA)
    assert files(tmp_path) == [DIGEST]


def test_bytes_under_a_wrong_name_are_refused(blobs: FolderBlobs, tmp_path: Path) -> None:
    digest = artifact_of(b"other").sha256
    with raises(InvalidInput, f"chunk: digest mismatch (got {short(digest)}, expected {short(DIGEST)})"):
        blobs.put(DIGEST, b"other")
    assert files(tmp_path) == []


@pytest.mark.parametrize("name", ["", "../../etc/passwd", DIGEST.upper(), "ab/" + DIGEST[3:]])
def test_a_name_that_is_no_digest_never_becomes_a_path(blobs: FolderBlobs, name: str) -> None:
    text = f"chunk: got digest {name!r}, expected 64 hexadecimal characters"
    for call in (lambda: blobs.put(name, DATA), lambda: blobs.read(name), lambda: blobs.missing([DIGEST, name])):
        with raises(InvalidInput, text):
            call()


def test_a_missing_chunk_and_an_invalid_offset_are_refused(blobs: FolderBlobs) -> None:
    with raises(NotFound, f"chunk {short(DIGEST)}: not stored here"):
        blobs.read(DIGEST)
    blobs.put(DIGEST, DATA)
    for offset in (-1, len(DATA) + 1):
        with raises(InvalidInput, f"chunk {short(DIGEST)}: got offset {offset}, expected 0 to {len(DATA)}"):
            blobs.read(DIGEST, offset)


def test_an_artifact_is_stored_by_its_chunks(blobs: FolderBlobs, tmp_path: Path) -> None:
    data = bytes(CHUNK_BYTES) + DATA
    artifact = blobs.put_pieces([data])
    assert artifact == artifact_of(data)
    assert files(tmp_path) == sorted(ref.sha256 for ref in artifact.chunks)
    assert blobs.read_artifact("parameters", artifact) == data
    assert blobs.missing([*(ref.sha256 for ref in artifact.chunks), "0" * 64]) == ("0" * 64,)


@pytest.mark.parametrize("damage", [b"\1" + DATA[1:], DATA[:-1], b""], ids=["changed", "cut", "empty"])
def test_damaged_bytes_are_never_read_and_logged_once(
    blobs: FolderBlobs, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    artifact = blobs.put_pieces([DATA])
    path = tmp_path / DIGEST[:2] / DIGEST
    assert blobs.read(DIGEST) == DATA
    path.write_bytes(damage)
    digest = short(sha256_hex(damage))
    text = f"blobs: chunk {short(DIGEST)}: damaged on disk (got {len(damage)} bytes with digest {digest})"
    for call in (
        lambda: blobs.read(DIGEST),
        lambda: blobs.read(DIGEST, len(DATA)),
        lambda: list(blobs.pieces("version 3", artifact)),
        lambda: blobs.read_artifact("version 3", artifact),
    ):
        with raises(Corrupted, text):
            call()
    assert caplog.messages == [f"{text}; publish its bundle or version again, or restore {path}"]


def test_a_damaged_blob_counts_as_missing_and_is_replaced(
    blobs: FolderBlobs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    artifact = blobs.put_pieces([DATA])
    path = tmp_path / DIGEST[:2] / DIGEST
    for repair in (lambda: blobs.put(DIGEST, DATA), lambda: blobs.put_pieces([DATA])):
        path.write_bytes(DATA[:-1])
        assert blobs.missing([DIGEST]) == (DIGEST,)
        caplog.clear()
        repair()
        assert caplog.messages == [f"blobs: chunk {short(DIGEST)}: was damaged on disk and is replaced"]
        assert blobs.missing([DIGEST]) == ()
        assert blobs.read(DIGEST) == blobs.read_artifact("version 3", artifact) == DATA


def test_a_folder_in_the_place_of_a_blob_is_damage_that_is_repaired(
    blobs: FolderBlobs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blobs.put(DIGEST, DATA)
    path = tmp_path / DIGEST[:2] / DIGEST
    path.unlink()
    path.mkdir()
    (path / "notes").write_bytes(b"of a person")
    for _ in range(2):
        with raises(Corrupted, f"blobs: chunk {short(DIGEST)}: damaged on disk (Is a directory)"):
            blobs.read(DIGEST)
    assert len(caplog.messages) == 1
    assert blobs.missing([DIGEST]) == (DIGEST,)
    blobs.put(DIGEST, DATA)
    assert (blobs.missing([DIGEST]), blobs.read(DIGEST)) == ((), DATA)
    assert [file.read_bytes() for file in path.parent.glob("*/notes")] == [b"of a person"]


class BadSectors(FolderBlobs):
    """Blobs on a disk that cannot read some of them."""

    bad: frozenset[str] = frozenset()

    def _open(self, digest: str) -> BinaryIO:
        if digest in self.bad:
            raise OSError(errno.EIO, "Input/output error", str(self._path(digest)))
        return super()._open(digest)


def test_a_blob_on_a_bad_sector_is_damage_that_is_repaired(tmp_path: Path) -> None:
    blobs = BadSectors(tmp_path, Durability.PROCESS)
    blobs.put(DIGEST, DATA)
    blobs.bad = frozenset({DIGEST})
    with raises(Corrupted, f"blobs: chunk {short(DIGEST)}: damaged on disk (Input/output error)"):
        blobs.read(DIGEST)
    assert blobs.missing([DIGEST]) == (DIGEST,)
    before = (tmp_path / DIGEST[:2] / DIGEST).stat().st_ino
    blobs.put(DIGEST, DATA)
    assert (tmp_path / DIGEST[:2] / DIGEST).stat().st_ino != before
    blobs.bad = frozenset()
    assert blobs.read(DIGEST) == DATA


def test_intact_chunks_of_another_artifact_are_not_reported_as_damaged(blobs: FolderBlobs) -> None:
    artifact = blobs.put_pieces([bytes(CHUNK_BYTES), DATA])
    other = replace(artifact, sha256=artifact_of(b"other").sha256)
    text = f"version 3: digest mismatch (got {short(artifact.sha256)}, expected {short(other.sha256)})"
    with raises(Corrupted, f"blobs: {text}"):
        blobs.read_artifact("version 3", other)


def test_foreign_files_are_ignored_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blobs = FolderBlobs(tmp_path, Durability.PROCESS)
    blobs.put(DIGEST, DATA)
    folder = tmp_path / DIGEST[:2]
    (tmp_path / "lost+found").mkdir()
    (folder / ".DS_Store").write_bytes(b"")
    (folder / "notes.new").write_bytes(b"")
    (folder / f"{DIGEST}.0123abcd.new").mkdir()
    (folder / f"{DIGEST}.89abcdef.new").write_bytes(b"half")
    blobs.sweep()
    assert files(tmp_path) == sorted([".DS_Store", "notes.new", DIGEST])
    assert caplog.messages == [
        f"{tmp_path}: left alone what a coordinator does not write: 'lost+found'",
        f"{folder}: left alone what a coordinator does not write: '.DS_Store', '{DIGEST}.0123abcd.new', 'notes.new'",
    ]


def test_a_full_disk_leaves_no_partial_file(blobs: FolderBlobs, tmp_path: Path) -> None:
    def work() -> None:
        with (
            full_disk(4096),
            raises(StorageFull, f"chunk {short(DIGEST)}: cannot be written: {DISK_PROBLEMS[errno.EFBIG]}"),
        ):
            blobs.put(DIGEST, DATA)
        assert files(tmp_path) == []
        assert blobs.missing([DIGEST]) == (DIGEST,)
        blobs.put(DIGEST, DATA)
        assert blobs.read(DIGEST) == DATA
        assert files(tmp_path) == [DIGEST]

    in_child(work)


def test_other_disk_errors_are_not_reported_as_full(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path, Durability.PROCESS)
    (tmp_path / DIGEST[:2]).write_text("a file where a folder should be")
    with pytest.raises(FileExistsError):
        blobs.put(DIGEST, DATA)
    assert stat.S_ISREG((tmp_path / DIGEST[:2]).stat().st_mode)
