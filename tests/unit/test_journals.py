"""The journals of round protocols on a device's disk."""

import itertools
import stat
from pathlib import Path

import pytest

from fanin.clients.device.storage.journals import JournalStore
from fanin.edge.masking.journal import AttemptEnded, Fact, KeysDrawn, PayloadMasked, SharesOpened, record_of
from fanin.protos.errors import Corrupted

KEYS = KeysDrawn(terms=b"terms", sealing=b"c" * 32, masking=b"s" * 32, seed=b"b" * 32, answer=b"message 1")
FACTS: tuple[Fact, ...] = (KEYS, SharesOpened(received=b"message 4"), PayloadMasked(sha256=b"d" * 32))


class Killed(Exception):
    """The process ends here."""


class MortalPath(type(Path())):  # type: ignore[misc]  # the class of a path depends on the system
    """A path whose file is renamed to its place only so often: then the process is killed, before or after it."""

    renames = itertools.count()
    kill_at = -1

    def replace(self, target: Path) -> Path:
        """Rename a draft, unless the process is killed before. The moment after is the one before the next."""
        if next(MortalPath.renames) == MortalPath.kill_at:
            raise Killed
        renamed: Path = super().replace(target)
        return renamed


def journal_of(facts: tuple[Fact, ...]) -> bytes:
    return b"".join(map(record_of, facts))


def test_a_journal_is_replaced_as_a_whole_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    store = JournalStore(tmp_path / "journals")
    assert store.get("run") == b""
    store.put("run", b"secret")
    store.put("other", b"")
    store.put("run", b"later")
    assert (JournalStore(tmp_path / "journals").get("run"), store.get("other")) == (b"later", b"")
    assert stat.S_IMODE((tmp_path / "journals" / "run.journal").stat().st_mode) == 0o600
    names = sorted(path.name for path in (tmp_path / "journals").iterdir())
    assert names == ["other.begun", "other.journal", "run.begun", "run.journal"]


@pytest.mark.parametrize("num_left", [0, 1, 2, None])
def test_a_journal_that_lost_whole_records_is_damaged(tmp_path: Path, num_left: int | None) -> None:
    """Cut exactly between two records, emptied, or lost. Each record that is left has its own digest."""
    store, path = JournalStore(tmp_path / "journals"), tmp_path / "journals" / "run.journal"
    for number in range(1, len(FACTS) + 1):
        store.put("run", journal_of(FACTS[:number]))
    path.unlink() if num_left is None else path.write_bytes(journal_of(FACTS[:num_left]))
    for _ in range(2):
        with pytest.raises(Corrupted, match="give up the attempt") as excinfo:
            JournalStore(tmp_path / "journals").get("run")
        assert excinfo.value.code == "FN-1634"
    ended = journal_of((AttemptEnded(terms=b"terms", gave_shares=b"\1"),))
    JournalStore(tmp_path / "journals").put("run", ended)
    assert JournalStore(tmp_path / "journals").get("run") == ended


@pytest.mark.parametrize("content", [None, b"", b"0" * 64])
def test_a_journal_whose_mark_is_lost_or_damaged_is_damaged(tmp_path: Path, content: bytes | None) -> None:
    store, mark = JournalStore(tmp_path / "journals"), tmp_path / "journals" / "run.begun"
    store.put("run", journal_of(FACTS))
    mark.unlink() if content is None else mark.write_bytes(content)
    with pytest.raises(Corrupted) as excinfo:
        JournalStore(tmp_path / "journals").get("run")
    assert excinfo.value.code == "FN-1634"


def test_a_kill_between_two_writes_damages_no_journal_and_loses_no_record(
    tmp_path: Path,
) -> None:
    """The journal is the old one or the new one, and after ``put`` has returned it is the new one."""
    contents = [b"", *(journal_of(FACTS[:number]) for number in (1, 2, 3)), journal_of(FACTS[:1])]
    for kill_at in range(100):
        folder = MortalPath(tmp_path / f"{kill_at}")
        MortalPath.renames, MortalPath.kill_at = itertools.count(), kill_at
        done = 0
        try:
            for content in contents[1:]:
                JournalStore(folder).put("run", content)
                done += 1
        except Killed:
            pass
        found = JournalStore(Path(folder)).get("run")
        assert found in contents[done : done + 2], (kill_at, done)
        # What was found is settled: the other one of the two is damage from now on.
        for other in contents[done : done + 2]:
            if other != found:
                (Path(folder) / "run.journal").write_bytes(other)
                with pytest.raises(Corrupted):
                    JournalStore(Path(folder)).get("run")
        if done == len(contents) - 1:
            break
    assert kill_at == 3 * (len(contents) - 1)


def test_a_kill_does_not_make_a_damaged_journal_whole(tmp_path: Path) -> None:
    for kill_at in range(3):
        folder = MortalPath(tmp_path / f"{kill_at}")
        MortalPath.kill_at = -1
        JournalStore(folder).put("run", journal_of(FACTS))
        (folder / "run.journal").write_bytes(journal_of(FACTS[:1]))
        MortalPath.renames, MortalPath.kill_at = itertools.count(), kill_at
        ended = journal_of((AttemptEnded(terms=b"terms", gave_shares=b"\1"),))
        with pytest.raises(Killed):
            JournalStore(folder).put("run", ended)
        if kill_at < 2:
            with pytest.raises(Corrupted):
                JournalStore(Path(folder)).get("run")
        else:
            assert JournalStore(Path(folder)).get("run") == ended
