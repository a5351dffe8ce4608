"""The spool: uploads that stop at any byte and resume, and commits that take effect once."""

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.errors import raises
from support.full_disk import FILE_LIMIT, full_disk, in_child
from support.values import assignment, update

from fanin.protos.chunks import CHUNK_BYTES, Artifact, artifact_of, cut, short
from fanin.protos.errors import Corrupted, InvalidUpdate, StorageFull, Unavailable
from fanin.protos.messages import Piece, UpdateHeader
from fanin.server.storage.disk import Durability
from fanin.server.storage.spool import FolderSpool, Upload

PAYLOAD = bytes(index * 7 % 251 for index in range(2 * CHUNK_BYTES + 1000))
HEADER = replace(update(assignment())[0], payload=artifact_of(PAYLOAD))
NAME = HEADER.assignment_id


@pytest.fixture(params=Durability)
def spool(request: pytest.FixtureRequest, tmp_path: Path) -> FolderSpool:
    return FolderSpool(tmp_path / "spool", tmp_path / "updates", request.param)


def send(upload: Upload, stop: int = len(PAYLOAD), *, payload: bytes = PAYLOAD, piece_bytes: int = 300_000) -> None:
    """Send pieces from the upload's current offset up to the byte ``stop``."""
    while (start := upload.received_bytes) < stop:
        if upload.add(Piece(offset=start, data=payload[start : min(start + piece_bytes, stop)])):
            upload.store()


def spool_files(tmp_path: Path) -> list[str]:
    """Return the names of the files in the spool."""
    return sorted(path.name for path in (tmp_path / "spool").iterdir())


def committed_payload(spool: FolderSpool) -> bytes:
    return b"".join(spool.read(HEADER, "device"))


@pytest.mark.parametrize("piece_bytes", [1000, CHUNK_BYTES, CHUNK_BYTES + 1, len(PAYLOAD)])
def test_pieces_of_any_size_become_the_payload(spool: FolderSpool, tmp_path: Path, piece_bytes: int) -> None:
    upload = spool.open(HEADER, "device")
    assert upload.received_bytes == 0
    send(upload, piece_bytes=piece_bytes)
    assert upload.is_complete()
    spool.commit(upload, "device")
    upload.close()
    assert committed_payload(spool) == PAYLOAD
    assert spool_files(tmp_path) == []
    assert (tmp_path / "updates" / "run" / "1" / f"device.{HEADER.payload.sha256[:16]}.payload").read_bytes() == PAYLOAD


def test_an_upload_resumes_after_its_last_complete_chunk(spool: FolderSpool) -> None:
    upload = spool.open(HEADER, "device")
    send(upload, CHUNK_BYTES + 500)
    assert upload.received_bytes == CHUNK_BYTES + 500
    upload.close()
    upload = spool.open(HEADER, "device")
    assert upload.received_bytes == CHUNK_BYTES
    send(upload)
    spool.commit(upload, "device")
    upload.close()
    assert committed_payload(spool) == PAYLOAD


def test_a_complete_upload_without_a_commit_needs_no_more_bytes(spool: FolderSpool) -> None:
    upload = spool.open(HEADER, "device")
    send(upload)
    upload.close()
    upload = spool.open(HEADER, "device")
    assert upload.is_complete()
    assert upload.received_bytes == len(PAYLOAD)
    spool.commit(upload, "device")
    upload.close()
    assert committed_payload(spool) == PAYLOAD


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda data: data + b"torn", 2 * CHUNK_BYTES),
        (lambda data: data[:-1], CHUNK_BYTES),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), CHUNK_BYTES),
        (lambda data: bytes([data[0] ^ 1]) + data[1:], 0),
        (lambda _: b"", 0),
    ],
    ids=["longer", "shorter", "changed tail", "changed head", "empty"],
)
def test_only_the_verified_prefix_counts_after_a_crash(
    spool: FolderSpool, tmp_path: Path, damage: object, expected: int
) -> None:
    upload = spool.open(HEADER, "device")
    send(upload, 2 * CHUNK_BYTES)
    upload.close()
    part = tmp_path / "spool" / f"{NAME}.part"
    part.write_bytes(damage(part.read_bytes()))
    upload = spool.open(HEADER, "device")
    assert upload.received_bytes == expected
    assert part.stat().st_size == expected
    send(upload)
    spool.commit(upload, "device")
    upload.close()
    assert committed_payload(spool) == PAYLOAD


def test_another_header_starts_over(spool: FolderSpool, tmp_path: Path) -> None:
    upload = spool.open(HEADER, "device")
    send(upload, CHUNK_BYTES)
    upload.close()
    header = replace(HEADER, telemetry=replace(HEADER.telemetry, train_s=9.0))
    upload = spool.open(header, "device")
    assert upload.received_bytes == 0
    upload.close()
    assert spool_files(tmp_path) == [f"{NAME}.header", f"{NAME}.part"]


def test_a_truncated_note_starts_over(spool: FolderSpool, tmp_path: Path) -> None:
    upload = spool.open(HEADER, "device")
    send(upload, CHUNK_BYTES)
    upload.close()
    note = tmp_path / "spool" / f"{NAME}.header"
    note.write_bytes(note.read_bytes()[:10])
    upload = spool.open(HEADER, "device")
    assert upload.received_bytes == 0
    upload.close()


def chunk_error(header: UpdateHeader, index: int, data: bytes) -> str:
    digest, expected = artifact_of(data).sha256, header.payload.chunks[index].sha256
    return f"update: chunk {index}: digest mismatch (got {short(digest)}, expected {short(expected)})"


def test_a_changed_chunk_is_refused_when_it_is_complete_and_not_kept(spool: FolderSpool, tmp_path: Path) -> None:
    payload = PAYLOAD[: CHUNK_BYTES + 3] + b"\xff" + PAYLOAD[CHUNK_BYTES + 4 :]
    upload = spool.open(HEADER, "device")
    with raises(InvalidUpdate, chunk_error(HEADER, 1, payload[CHUNK_BYTES : 2 * CHUNK_BYTES])):
        send(upload, payload=payload)
    upload.close()
    assert (tmp_path / "spool" / f"{NAME}.part").stat().st_size == CHUNK_BYTES
    spool.discard(NAME)
    assert spool_files(tmp_path) == []
    assert list((tmp_path / "updates").iterdir()) == []


@pytest.mark.parametrize(
    ("piece", "text"),
    [
        (Piece(offset=1, data=b"x"), "update: got a piece at offset 1, expected 0"),
        (Piece(offset=0, data=b""), f"update: got bytes 0 to 0, expected 1 or more, up to {len(PAYLOAD)}"),
        (
            Piece(offset=0, data=PAYLOAD + b"x"),
            f"update: got bytes 0 to {len(PAYLOAD) + 1}, expected 1 or more, up to {len(PAYLOAD)}",
        ),
    ],
    ids=["elsewhere", "empty", "too long"],
)
def test_a_piece_that_does_not_fit_changes_nothing(spool: FolderSpool, piece: Piece, text: str) -> None:
    upload = spool.open(HEADER, "device")
    with raises(InvalidUpdate, text):
        upload.add(piece)
    assert upload.received_bytes == 0
    send(upload)
    spool.commit(upload, "device")
    upload.close()
    assert committed_payload(spool) == PAYLOAD


def test_valid_chunks_with_a_wrong_total_digest_are_not_committed(spool: FolderSpool, tmp_path: Path) -> None:
    payload = Artifact(sha256="0" * 64, size_bytes=len(PAYLOAD), chunks=tuple(ref for ref, _ in cut(PAYLOAD)))
    upload = spool.open(replace(HEADER, payload=payload), "device")
    send(upload)
    digest = artifact_of(PAYLOAD).sha256
    with raises(InvalidUpdate, f"update: digest mismatch (got {short(digest)}, expected 00000000..)"):
        spool.commit(upload, "device")
    upload.close()
    assert list((tmp_path / "updates").rglob("*.payload")) == []


def test_a_commit_can_be_repeated(spool: FolderSpool) -> None:
    upload = spool.open(HEADER, "device")
    send(upload)
    for _ in range(2):
        spool.commit(upload, "device")
        assert committed_payload(spool) == PAYLOAD
    upload.close()


@pytest.mark.parametrize("num_damaged", [0, 1])
@pytest.mark.parametrize("crash", ["before the note was removed", "after it"])
def test_a_committed_payload_without_a_record_is_not_sent_again(
    spool: FolderSpool, tmp_path: Path, crash: str, num_damaged: int
) -> None:
    upload = spool.open(HEADER, "device")
    send(upload)
    note = tmp_path / "spool" / f"{NAME}.header"
    header = note.read_bytes()
    spool.commit(upload, "device")
    upload.close()
    if crash != "after it":
        note.write_bytes(header)
    (path,) = (tmp_path / "updates").rglob("*.payload")
    path.write_bytes(PAYLOAD[: len(PAYLOAD) - num_damaged])
    new_spool = FolderSpool(tmp_path / "spool", tmp_path / "updates", Durability.PROCESS)
    resumed = new_spool.open(HEADER, "device")
    expected = 2 * CHUNK_BYTES if num_damaged else len(PAYLOAD)
    assert resumed.received_bytes == resumed.resumed_bytes == expected
    # The payload is an unfinished upload again, and no other file is left.
    assert spool_files(tmp_path) == [f"{NAME}.header", f"{NAME}.part"]
    assert not path.exists()
    send(resumed)
    new_spool.commit(resumed, "device")
    resumed.close()
    assert committed_payload(new_spool) == PAYLOAD
    assert spool_files(tmp_path) == []


def test_pieces_of_a_byte_take_no_more_memory_than_their_chunk(spool: FolderSpool) -> None:
    upload = spool.open(HEADER, "device")
    tracemalloc.start()
    try:
        for offset in range(20_000):
            upload.add(Piece(offset=offset, data=PAYLOAD[offset : offset + 1]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert upload.received_bytes == 20_000
    assert peak < CHUNK_BYTES
    send(upload)
    spool.commit(upload, "device")
    upload.close()
    assert committed_payload(spool) == PAYLOAD


def test_another_devices_payload_is_never_taken_back(spool: FolderSpool) -> None:
    upload = spool.open(HEADER, "device")
    send(upload)
    spool.commit(upload, "device")
    upload.close()
    other = spool.open(replace(HEADER, assignment_id="run.1.other"), "other")
    assert other.received_bytes == 0
    other.close()
    assert committed_payload(spool) == PAYLOAD


def test_a_replaced_upload_cannot_commit_the_bytes_of_the_later_one(spool: FolderSpool, tmp_path: Path) -> None:
    first = spool.open(HEADER, "device")
    send(first)
    other = bytes(len(PAYLOAD))
    later = replace(HEADER, payload=artifact_of(other))
    second = spool.open(later, "device")
    send(second, CHUNK_BYTES, payload=other)
    with raises(Unavailable, f"spool {NAME}: a later upload replaced this one; continue"):
        spool.commit(first, "device")
    first.close()
    assert list((tmp_path / "updates").rglob("*.payload")) == []
    send(second, payload=other)
    spool.commit(second, "device")
    second.close()
    assert b"".join(spool.read(later, "device")) == other


def test_a_payload_without_bytes_is_complete_at_once(spool: FolderSpool) -> None:
    upload = spool.open(replace(HEADER, payload=artifact_of(b"")), "device")
    assert upload.is_complete()
    spool.commit(upload, "device")
    upload.close()
    assert list(spool.read(replace(HEADER, payload=artifact_of(b"")), "device")) == []


def test_a_round_that_has_ended_keeps_its_set_only(spool: FolderSpool, tmp_path: Path) -> None:
    # A Run's id may contain dots: "run.1" is another Run with a Round 2 of its own.
    for name in ("run.1.a", "run.1.b", "run.10.a", "other.1.a", "run.1.2.a"):
        spool.open(replace(HEADER, assignment_id=name), "device").close()
    for round_number, device in ((1, "a"), (1, "b"), (10, "b")):
        upload = spool.open(
            replace(HEADER, assignment_id=f"run.{round_number}.{device}x", round=round_number), "device"
        )
        send(upload)
        spool.commit(upload, device)
        upload.close()
    name = f"{HEADER.payload.sha256[:16]}.payload"
    for _ in range(2):
        spool.clear_round("run", 1, {"a": replace(HEADER, round=1)})
        assert {path.rsplit(".", 1)[0] for path in spool_files(tmp_path)} == {"run.10.a", "other.1.a", "run.1.2.a"}
        payloads = {str(path.relative_to(tmp_path / "updates")) for path in tmp_path.rglob("*.payload")}
        assert payloads == {f"run/1/a.{name}", f"run/10/b.{name}"}
    spool.sweep([("other", 1)])
    assert {path.rsplit(".", 1)[0] for path in spool_files(tmp_path)} == {"other.1.a"}


def test_another_update_of_a_device_never_replaces_a_committed_one(spool: FolderSpool) -> None:
    upload = spool.open(HEADER, "device")
    send(upload)
    spool.commit(upload, "device")
    upload.close()
    other = bytes(len(PAYLOAD))
    later = replace(HEADER, payload=artifact_of(other))
    second = spool.open(later, "device")
    send(second, payload=other)
    spool.commit(second, "device")
    second.close()
    assert committed_payload(spool) == PAYLOAD
    spool.withdraw(later, "device")
    assert committed_payload(spool) == PAYLOAD


def test_a_committed_payload_that_was_changed_on_disk_is_reported(spool: FolderSpool, tmp_path: Path) -> None:
    upload = spool.open(HEADER, "device")
    send(upload)
    spool.commit(upload, "device")
    upload.close()
    (path,) = tmp_path.rglob("*.payload")
    path.write_bytes(bytes(len(PAYLOAD)))
    # The process that verified and wrote the payload does not verify it again.
    assert committed_payload(spool) == bytes(len(PAYLOAD))
    later = FolderSpool(tmp_path / "spool", tmp_path / "updates", Durability.PROCESS)
    what = path.relative_to(tmp_path)
    with raises(Corrupted, f"{what}: a committed update was changed on disk; its digest does not match its record"):
        committed_payload(later)


def test_an_update_that_the_store_refused_is_withdrawn(spool: FolderSpool, tmp_path: Path) -> None:
    upload = spool.open(HEADER, "device")
    send(upload)
    spool.commit(upload, "device")
    upload.close()
    for _ in range(2):
        spool.withdraw(HEADER, "device")
        assert list(tmp_path.rglob("*.payload")) == []


def test_a_committed_payload_that_is_missing_or_cut_is_corrupted(spool: FolderSpool, tmp_path: Path) -> None:
    path = tmp_path / "updates" / "run" / "1" / f"device.{HEADER.payload.sha256[:16]}.payload"
    what = path.relative_to(tmp_path)
    with raises(Corrupted, f"{what}: a committed update is missing"):
        committed_payload(spool)
    path.parent.mkdir(parents=True)
    path.write_bytes(PAYLOAD[:-1])
    with raises(Corrupted, f"{what}: got {len(PAYLOAD) - 1} bytes, expected {len(PAYLOAD)}"):
        committed_payload(spool)


FULL = f"spool {NAME}: cannot be written: {FILE_LIMIT}"


@pytest.mark.parametrize("limit", [1, CHUNK_BYTES + 5000], ids=["header", "second chunk"])
def test_on_a_full_disk_an_upload_keeps_complete_chunks_and_resumes_later(
    spool: FolderSpool, tmp_path: Path, limit: int
) -> None:
    def attempts() -> Iterator[Upload]:
        upload = spool.open(HEADER, "device")
        yield upload
        send(upload)

    def work() -> None:
        upload = None
        with full_disk(limit), raises(StorageFull, FULL):
            for attempt in attempts():
                upload = attempt
        if upload is not None:
            upload.close()
        assert list((tmp_path / "updates").iterdir()) == []

        upload = spool.open(HEADER, "device")
        assert upload.received_bytes == limit // CHUNK_BYTES * CHUNK_BYTES
        send(upload)
        spool.commit(upload, "device")
        upload.close()
        assert committed_payload(spool) == PAYLOAD
        assert spool_files(tmp_path) == []

    in_child(work)


def test_foreign_files_are_ignored_and_logged_once(
    spool: FolderSpool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    round_folder = tmp_path / "updates" / "run" / "1"
    round_folder.mkdir(parents=True)
    (round_folder / f"device.{HEADER.payload.sha256[:16]}.payload").write_bytes(PAYLOAD)
    for folder in (tmp_path / "spool", round_folder):
        (folder / ".DS_Store").write_bytes(b"")
        (folder / ".nfs0001").write_bytes(b"")
        (folder / "lost+found").mkdir()
    # As if the process had been killed during an upload.
    spool.open(HEADER, "other").close()
    for _ in range(2):
        spool.sweep([])
        spool.clear_round("run", 1, {})
    foreign = [".DS_Store", ".nfs0001", "lost+found"]
    assert spool_files(tmp_path) == sorted(path.name for path in round_folder.iterdir()) == foreign
    assert caplog.messages == [
        f"{folder}: left alone what a coordinator does not write: '.DS_Store', '.nfs0001', 'lost+found'"
        for folder in (tmp_path / "spool", round_folder)
    ]
