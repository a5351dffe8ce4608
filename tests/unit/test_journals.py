"""The journals of round protocols on a device's disk."""

import stat
from pathlib import Path

from fanin.clients.device.storage.journals import JournalStore


def test_a_journal_is_replaced_as_a_whole_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    store = JournalStore(tmp_path / "journals")
    assert store.get("run") == b""
    store.put("run", b"secret")
    store.put("other", b"")
    store.put("run", b"later")
    assert (JournalStore(tmp_path / "journals").get("run"), store.get("other")) == (b"later", b"")
    assert stat.S_IMODE((tmp_path / "journals" / "run.journal").stat().st_mode) == 0o600
    assert sorted(path.name for path in (tmp_path / "journals").iterdir()) == ["other.journal", "run.journal"]
