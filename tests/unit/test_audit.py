"""The audit log: whoever keeps a head notices an edit, an exchange, a removal and a cut."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.commands import Fanin, fanin_in_process

from fanin.commands.administration.audit import line_of
from fanin.protos.errors import Corrupted
from fanin.protos.messages import AuditChain, AuditEntry, AuditPage
from fanin.server.storage.access import next_entry
from fanin.server.storage.disk import Durability
from fanin.server.storage.records import AuditFact
from fanin.server.storage.sqlite.administration import SqliteAudit
from fanin.server.storage.sqlite.engine import open_engine

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
FACTS = st.builds(AuditFact, principal=TEXTS, call=TEXTS, subject=TEXTS, outcome=TEXTS)
HEAD_OF_NOTHING = "0" * 64


def log_of(facts: list[AuditFact]) -> list[AuditEntry]:
    entries: list[AuditEntry] = []
    for number, fact in enumerate(facts):
        entries.append(next_entry(entries[-1] if entries else None, fact, 1.5 + number))
    return entries


def is_good(entries: list[AuditEntry], head: str = "") -> bool:
    chain = AuditChain(head)
    try:
        chain.add(entries)
        chain.finish(AuditPage(entries=(), num_entries=len(entries)))
    except Corrupted:
        return False
    return True


LOGS = st.lists(FACTS, min_size=2, max_size=6).map(log_of)


@given(LOGS, st.data())
def test_a_log_passes_with_each_of_its_heads_and_fails_when_it_is_cut_before_it(
    entries: list[AuditEntry], data: st.DataObject
) -> None:
    kept = data.draw(st.integers(1, len(entries)))
    head = entries[kept - 1].digest
    assert is_good(entries, head)
    assert is_good(entries[:kept], head)
    assert not is_good(entries[: kept - 1], head)


@given(LOGS, st.data())
def test_an_edit_an_exchange_and_a_removal_are_noticed(entries: list[AuditEntry], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(entries) - 1))
    name = data.draw(st.sampled_from([field.name for field in fields(AuditEntry)]))
    value = getattr(entries[place], name)
    other = data.draw(st.integers(1, 1 << 40) if isinstance(value, int) else TEXTS)
    if other != value:
        edited = list(entries)
        edited[place] = replace(edited[place], **{name: other})
        assert not is_good(edited)
    if place:
        swapped = list(entries)
        swapped[place - 1], swapped[place] = swapped[place], swapped[place - 1]
        assert not is_good(swapped)
    if place < len(entries) - 1:
        assert not is_good(entries[:place] + entries[place + 1 :])


@given(LOGS, FACTS, st.data())
def test_a_log_that_was_rewritten_with_right_digests_does_not_contain_the_head(
    entries: list[AuditEntry], fact: AuditFact, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(entries) - 1))
    facts = [AuditFact(principal=e.principal, call=e.call, subject=e.subject, outcome=e.outcome) for e in entries]
    if facts[place] == fact:
        return
    facts[place] = fact
    rewritten = log_of(facts)
    assert is_good(rewritten)
    assert not is_good(rewritten, entries[-1].digest)


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    return fanin_in_process(capsys, monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A coordinator's folder at rest, with 1,203 entries: three pages."""
    engine = open_engine(tmp_path / "fanin.db", Durability.PROCESS)
    audit = SqliteAudit(engine)
    for number in range(3):
        audit.append(AuditFact(principal="admin anna", call="Command", subject=f"run {number}: stop\u202e"), 1.0)
    entry = audit.audit_page(3).entries[0]
    rows = []
    for number in range(1_200):
        entry = next_entry(entry, AuditFact(principal="device a", call="Enroll", subject=str(number)), 2.0)
        rows.append(tuple(getattr(entry, field.name) for field in fields(AuditEntry)))
    with closing(sqlite3.connect(tmp_path / "fanin.db")) as database:
        database.executemany("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        database.commit()
    yield tmp_path
    engine.dispose()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ("UPDATE audit SET outcome = 'refused FN-0012' WHERE sequence = 2", "digest"),
        ("DELETE FROM audit WHERE sequence = 700", "entries were removed"),
        ("DELETE FROM audit WHERE sequence > 900", "the log was cut"),
        ("DELETE FROM audit", "the log was cut"),
        (
            "INSERT INTO audit SELECT 0, time_us, principal, call, subject, outcome, digest FROM audit LIMIT 1",
            "inserted",
        ),
        (
            "INSERT INTO audit SELECT -5, time_us, principal, call, subject, outcome, digest FROM audit LIMIT 1",
            "inserted",
        ),
        ("DROP TABLE audit", "cannot be read"),
        ("UPDATE audit SET subject = CAST(x'ff00' AS TEXT) WHERE sequence = 600", "cannot be read"),
        ("UPDATE audit SET subject = x'ff00' WHERE sequence = 600", "another type"),
        ("UPDATE audit SET time_us = 'x' WHERE sequence = 600", "another type"),
        ("UPDATE audit SET subject = CASE sequence WHEN 1 THEN 'run 1: stop' ELSE 'run 0: stop' END", "digest"),
    ],
)
def test_the_command_finds_what_was_done_to_the_database(fanin: Fanin, folder: Path, change: str, code: str) -> None:
    good = fanin("audit", "verify", "--state", folder)
    assert (good.status, good.err) == (0, "")
    head = good.out.split("head ")[1].strip()
    assert good.out == f"1203 entries verified, head {head}\n"
    again = fanin("audit", "verify", "--state", folder, "--head", head)
    assert again.out == f"1203 entries verified, head {head}; entry 1203 is the given head\n"
    with closing(sqlite3.connect(folder / "fanin.db")) as database:
        database.execute(change)
        database.commit()
    bad = fanin("audit", "verify", "--state", folder, "--head", head)
    assert bad.status == 1
    assert code in bad.out
    without = fanin("audit", "verify", "--state", folder)
    assert without.status == (0 if "the log was cut" in code else 1)
    assert "Traceback" not in without.err + bad.err


def test_a_restore_is_an_entry_that_explains_a_lost_head(
    fanin: Fanin, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = fanin("audit", "verify", "--state", folder).out.split("head ")[1].strip()
    site = tmp_path_factory.mktemp("site")
    backup, state = site / "backup", site / "restored"
    assert fanin("backup", backup, "--state", folder).status == 0
    engine = open_engine(folder / "fanin.db", Durability.PROCESS)
    SqliteAudit(engine).append(AuditFact(principal="admin anna", call="Command", subject="run 9: stop"), 3.0)
    after = SqliteAudit(engine).audit_page(1).head
    engine.dispose()
    assert fanin("restore", backup, "--state", state).status == 0

    kept = fanin("audit", "verify", "--state", state, "--head", before)
    assert kept.status == 0
    assert "entry 1203 is the given head" in kept.out
    assert "coordinator: Restore the backup of 20" in kept.out
    assert f"whose head was {before} at entry 1203 [done]" in kept.out
    lost = fanin("audit", "verify", "--state", state, "--head", after)
    assert lost.status == 1
    assert "FN-1475" in lost.out
    assert "entry 1204, the backup of 20" in lost.out
    row = json.loads(fanin("audit", "verify", "--state", state, "--json").out)
    assert [entry["sequence"] for entry in row["restores"]] == [1204]


def test_a_damaged_audit_log_does_not_stop_a_restore(
    fanin: Fanin, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with closing(sqlite3.connect(folder / "fanin.db")) as database:
        database.execute("UPDATE audit SET time_us = 'x' WHERE sequence = 1203")
        database.commit()
    site = tmp_path_factory.mktemp("site")
    backup, state = site / "backup", site / "restored"
    assert fanin("backup", backup, "--state", folder).status == 0
    restored = fanin("restore", backup, "--state", state)
    assert restored.status == 0
    assert "the restore was not recorded" in restored.err
    assert "another type" in fanin("audit", "verify", "--state", state).out


@pytest.mark.parametrize("head", ["5a31", ""])
def test_a_head_of_another_form_is_wrong_usage(fanin: Fanin, folder: Path, head: str) -> None:
    outcome = fanin("audit", "verify", "--state", folder, "--head", head)
    assert outcome.status == 2
    assert "FN-1402" in outcome.err


def test_a_folder_without_a_log_verifies_as_empty(fanin: Fanin, tmp_path: Path) -> None:
    open_engine(tmp_path / "fanin.db", Durability.PROCESS).dispose()
    assert fanin("audit", "verify", "--state", tmp_path).out == f"0 entries verified, head {HEAD_OF_NOTHING}\n"


def test_a_subject_is_one_line_of_the_list_and_a_long_one_has_a_digest(tmp_path: Path) -> None:
    engine = open_engine(tmp_path / "fanin.db", Durability.PROCESS)
    audit = SqliteAudit(engine)
    for subject in ("device a: -x\n     9 1970-01-01 00:00:00Z admin a: Forged", "x" * 262_130, "x" * 262_131):
        audit.append(AuditFact(principal="admin anna", call="ChangeDevice", subject=subject), 1.0)
    entries = audit.audit_page(1).entries
    engine.dispose()
    assert [len(entry.subject) for entry in entries[1:]] == [4_000, 4_000]
    assert entries[1].subject != entries[2].subject
    assert is_good(list(entries))
    assert line_of(entries[0]).count("\n") == 1
