"""The files of a device: resumable downloads, Updates without a verdict, and the highest Versions seen."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.errors import raises
from support.full_disk import full_disk, in_child
from support.synced import durable_files, synced
from support.values import assignment, update

from fanin.clients.device.storage.cache import Cache, hold_folder
from fanin.protos.chunks import ChunkRef, artifact_of, short
from fanin.protos.errors import Conflict, Corrupted, InvalidInput, NotFound, StorageFull, Unavailable
from fanin.protos.messages import UNSEEN

DATA = bytes(index * 5 % 253 for index in range(10_000))
(REF,) = artifact_of(DATA).chunks
HEADER, PAYLOAD = update(assignment())
NAME = HEADER.assignment_id


class Connection:
    """A connection that sends a Chunk from an offset, and breaks after ``breaks_after`` pieces."""

    def __init__(self, data: bytes, breaks_after: int = -1) -> None:
        self.data = data
        self.breaks_after = breaks_after
        self.offsets: list[int] = []

    def __call__(self, offset: int) -> Iterator[bytes]:
        self.offsets.append(offset)
        for index, start in enumerate(range(offset, len(self.data), 1000)):
            if index == self.breaks_after:
                raise Unavailable("the line broke")
            yield self.data[start : start + 1000]


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path)


def chunk_files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "chunks").iterdir())


def test_a_chunk_is_fetched_once_and_read_by_its_name(cache: Cache, tmp_path: Path) -> None:
    assert not cache.chunks.has(REF)
    with raises(NotFound, f"chunk {REF.sha256}: not in the cache"):
        cache.chunks.read(REF.sha256)
    assert cache.chunks.fetch(REF, Connection(DATA)) == len(DATA)
    assert cache.chunks.has(REF)
    assert cache.chunks.read(REF.sha256) == DATA
    assert chunk_files(tmp_path) == [REF.sha256]


def test_an_interrupted_download_resumes_at_its_offset_after_a_restart(cache: Cache, tmp_path: Path) -> None:
    with raises(Unavailable, "the line broke"):
        cache.chunks.fetch(REF, Connection(DATA, breaks_after=3))
    connection = Connection(DATA)
    restarted = Cache(tmp_path)
    assert not restarted.chunks.has(REF)
    assert restarted.chunks.fetch(REF, connection) == len(DATA) - 3000
    assert connection.offsets == [3000]
    assert restarted.chunks.read(REF.sha256) == DATA


def test_bytes_that_do_not_verify_are_discarded(cache: Cache, tmp_path: Path) -> None:
    wrong_data = DATA[:-1] + b"\xff"
    with pytest.raises(InvalidInput, match="FN-0117"):
        cache.chunks.fetch(REF, Connection(wrong_data))
    assert chunk_files(tmp_path) == []
    connection = Connection(DATA)
    cache.chunks.fetch(REF, connection)
    assert connection.offsets == [0]


def test_more_bytes_than_announced_are_refused(cache: Cache, tmp_path: Path) -> None:
    connection = Connection(DATA + bytes(50_000_000))
    with raises(InvalidInput, f"chunk {short(REF.sha256)}: got {len(DATA) + 1000} bytes, expected {len(DATA)}"):
        cache.chunks.fetch(REF, connection)
    assert chunk_files(tmp_path) == []


def test_a_stream_that_ends_early_keeps_its_received_bytes(cache: Cache) -> None:
    with raises(Unavailable, f"chunk {short(REF.sha256)}: the stream ended at byte 4000 of {len(DATA)}"):
        cache.chunks.fetch(REF, Connection(DATA[:4000]))
    connection = Connection(DATA)
    cache.chunks.fetch(REF, connection)
    assert connection.offsets == [4000]


def test_a_part_that_is_too_long_starts_over(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "chunks" / f"{REF.sha256}.part").write_bytes(DATA + b"x")
    connection = Connection(DATA)
    cache.chunks.fetch(REF, connection)
    assert connection.offsets == [0]
    assert cache.chunks.read(REF.sha256) == DATA


def put(cache: Cache, data: bytes, age_s: int, folder: Path) -> ChunkRef:
    """Store a Chunk that was last used ``age_s`` seconds ago."""
    (ref,) = artifact_of(data).chunks
    cache.chunks.fetch(ref, lambda offset: [data[offset:]])
    os.utime(folder / "chunks" / ref.sha256, (1_000_000 - age_s,) * 2)
    return ref


def test_the_least_recently_used_chunks_are_removed_but_no_needed_one(tmp_path: Path) -> None:
    cache = Cache(tmp_path, max_bytes=250)
    oldest, older, newer, needed = (
        put(cache, bytes([fill]) * 100, age, tmp_path) for fill, age in ((1, 30), (2, 20), (3, 10), (4, 99))
    )
    cache.chunks.trim([needed.sha256])
    assert [cache.chunks.has(ref) for ref in (oldest, older, newer, needed)] == [False, False, True, True]


def test_reading_a_chunk_renews_its_time_of_use(tmp_path: Path) -> None:
    cache = Cache(tmp_path, max_bytes=100)
    old, young = put(cache, b"a" * 100, 30, tmp_path), put(cache, b"b" * 100, 20, tmp_path)
    cache.chunks.read(old.sha256)
    cache.chunks.trim([])
    assert (cache.chunks.has(old), cache.chunks.has(young)) == (True, False)


def test_only_chunks_that_do_not_verify_are_removed(cache: Cache, tmp_path: Path) -> None:
    cache.chunks.fetch(REF, Connection(DATA))
    cache.chunks.remove_damaged([REF])
    assert cache.chunks.has(REF)
    (tmp_path / "chunks" / REF.sha256).write_bytes(DATA[:-1])
    for _ in range(2):
        cache.chunks.remove_damaged([REF])
        assert not cache.chunks.has(REF)


def test_an_update_without_a_verdict_survives_a_restart(cache: Cache, tmp_path: Path) -> None:
    assert cache.updates.header(NAME) is None
    cache.updates.put(HEADER, PAYLOAD)
    restarted = Cache(tmp_path)
    assert restarted.updates.header(NAME) == HEADER
    assert restarted.updates.read(NAME, 0, len(PAYLOAD)) == PAYLOAD
    assert restarted.updates.read(NAME, 8, 4) == PAYLOAD[8:12]
    restarted.updates.clear()
    assert restarted.updates.header(NAME) is None


@pytest.mark.parametrize("damage", ["no header", "empty header", "torn header", "no payload", "torn payload"])
def test_an_incomplete_update_does_not_count(cache: Cache, tmp_path: Path, damage: str) -> None:
    cache.updates.put(HEADER, PAYLOAD)
    fault, part = damage.split()
    path = tmp_path / "updates" / f"{NAME}.{part}"
    if fault == "no":
        path.unlink()
    else:
        path.write_bytes(b"" if fault == "empty" else path.read_bytes()[:-1])
    assert cache.updates.header(NAME) is None
    cache.updates.put(HEADER, PAYLOAD)
    assert cache.updates.header(NAME) == HEADER


def test_an_update_whose_payload_a_power_cut_erased_does_not_count(cache: Cache, tmp_path: Path) -> None:
    cache.updates.put(HEADER, PAYLOAD)
    (tmp_path / "updates" / f"{NAME}.payload").write_bytes(bytes(len(PAYLOAD)))
    # The restarted process cannot trust the payload on the disk.
    restarted = Cache(tmp_path)
    assert restarted.updates.header(NAME) is None
    restarted.updates.put(HEADER, PAYLOAD)
    assert restarted.updates.header(NAME) == Cache(tmp_path).updates.header(NAME) == HEADER


def test_the_highest_version_only_increases_and_survives_a_restart(cache: Cache, tmp_path: Path) -> None:
    assert cache.records.highest_version("run") == UNSEEN
    orders = (((1, 0), (1, 0)), ((1, 5), (1, 5)), ((1, 3), (1, 5)), ((2, 3), (2, 3)), ((1, 2**63 - 3), (2, 3)))
    for order, expected in orders:
        cache.records.raise_version("run", order)
        assert Cache(tmp_path).records.highest_version("run") == expected
    assert cache.records.highest_version("other") == UNSEEN
    assert json.loads((tmp_path / "seen.json").read_text()) == {"run": [2, 3]}


def test_files_that_must_survive_a_power_cut_have_their_names_synced(cache: Cache, tmp_path: Path) -> None:
    with synced(tmp_path) as syncs:
        cache.records.raise_version("run", (1, 5))
        cache.key()
        cache.updates.put(HEADER, PAYLOAD)
    # The payload before the header, with which the Update exists and its first byte may be sent.
    update = [tmp_path / "updates" / f"{NAME}.{part}" for part in ("payload", "header")]
    assert durable_files(syncs) == [*(tmp_path / name for name in ("seen.json", "device.key", "device.pub")), *update]


def test_a_folder_has_one_process_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "device"
    with hold_folder(folder):
        assert folder.stat().st_mode & 0o777 == 0o700
        text = f"{folder}: in use by process {os.getpid()}; stop it, or give another --state"
        with raises(Conflict, text), hold_folder(folder):
            pass
    with hold_folder(folder):
        pass


def test_each_device_has_its_own_key(cache: Cache, tmp_path: Path) -> None:
    assert cache.key().public == Cache(tmp_path).key().public != Cache(tmp_path / "other").key().public


def test_on_a_full_disk_no_incomplete_file_counts(cache: Cache, tmp_path: Path) -> None:
    cache.records.raise_version("run", (1, 3))

    def work() -> None:
        with full_disk(4):
            for call in (
                lambda: cache.updates.put(HEADER, PAYLOAD),
                lambda: cache.records.raise_version("run", (1, 4)),
                lambda: cache.chunks.fetch(REF, Connection(DATA)),
            ):
                with pytest.raises(StorageFull, match="cannot be written: the limit on file sizes is reached"):
                    call()
        assert cache.updates.header(NAME) is None
        assert list((tmp_path / "updates").iterdir()) == []
        assert cache.records.highest_version("run") == (1, 3)
        assert not cache.chunks.has(REF)

        cache.updates.put(HEADER, PAYLOAD)
        cache.records.raise_version("run", (1, 4))
        cache.chunks.fetch(REF, Connection(DATA))
        assert (cache.updates.header(NAME), cache.records.highest_version("run"), cache.chunks.read(REF.sha256)) == (
            HEADER,
            (1, 4),
            DATA,
        )

    in_child(work)


def test_a_damaged_record_of_seen_versions_is_reported(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.records.raise_version("run", (1, 3))
    for damage in (b"", b'{"run": ', b'{"run": "3"}', b'{"run": 3}', b'{"run": [1, "3"]}', b"[3]", b"\xff"):
        (tmp_path / "seen.json").write_bytes(damage)
        for call in (lambda: cache.records.highest_version("run"), lambda: Cache(tmp_path)):
            with pytest.raises(Corrupted, match="FN-0835"):
                call()


@pytest.mark.parametrize("damage", [DATA[:-1], b"!" + DATA[1:], b""], ids=["cut", "changed", "empty"])
def test_a_chunk_that_was_damaged_on_disk_is_downloaded_again(
    cache: Cache, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    cache.chunks.fetch(REF, Connection(DATA))
    (tmp_path / "chunks" / REF.sha256).write_bytes(damage)
    restarted = Cache(tmp_path)
    assert not restarted.chunks.has(REF)
    assert caplog.messages == [f"cache: chunk {short(REF.sha256)}: damaged on this disk, removed and downloaded again"]
    connection = Connection(DATA)
    restarted.chunks.fetch(REF, connection)
    assert connection.offsets == [0]
    assert restarted.chunks.has(REF)


def test_a_part_that_was_damaged_on_disk_is_downloaded_again(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "chunks" / f"{REF.sha256}.part").write_bytes(bytes(5000))
    connection = Connection(DATA)
    with pytest.raises(Unavailable, match="FN-0826"):
        cache.chunks.fetch(REF, connection)
    cache.chunks.fetch(REF, connection)
    assert connection.offsets == [5000, 0]
    assert cache.chunks.read(REF.sha256) == DATA


def test_foreign_files_are_ignored(tmp_path: Path) -> None:
    cache = Cache(tmp_path, max_bytes=0)
    cache.chunks.fetch(REF, Connection(DATA))
    cache.updates.put(HEADER, PAYLOAD)
    for folder in ("chunks", "updates"):
        (tmp_path / folder / ".DS_Store").write_bytes(b"foreign")
        (tmp_path / folder / "lost+found").mkdir()
    cache.chunks.trim([])
    cache.updates.clear()
    for folder in ("chunks", "updates"):
        assert sorted(path.name for path in (tmp_path / folder).iterdir()) == [".DS_Store", "lost+found"]
