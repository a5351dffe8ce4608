"""The journals of round protocols on a device's disk."""

import stat
from pathlib import Path

import pytest

from fanin.clients.device.storage.journals import JournalStore
from fanin.protos.errors import Corrupted


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


def test_a_journal_that_is_lost_is_not_a_new_one(tmp_path: Path) -> None:
    store = JournalStore(tmp_path / "journals")
    store.put("run", b"keys")
    (tmp_path / "journals" / "run.journal").unlink()
    with pytest.raises(Corrupted, match="is lost; give up the attempt") as excinfo:
        JournalStore(tmp_path / "journals").get("run")
    assert excinfo.value.code == "FN-1634"
    store.put("run", b"ended")
    assert store.get("run") == b"ended"
