"""``fanin device`` on several devices: selections, the question before a change, and what a bad id harms."""

import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import Fanin, Outcome, fanin_in_process
from support.hosted import Hosted

from fanin.server.storage.disk import Durability
from fanin.server.storage.records import EnrolledDevice
from fanin.server.storage.sqlite.devices import SqliteDevices
from fanin.server.storage.sqlite.engine import open_engine

DEVICES = sorted(EnrolledDevice(public_key=f"{number:064x}").device_id for number in range(6))
OLD_S = 40 * 86_400.0


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    """A coordinator with six devices, of which the last two enrolled long ago and never checked in."""
    host = Hosted(tmp_path)
    host.state.mkdir()
    engine = open_engine(host.state / "fanin.db", Durability.PROCESS)
    devices = {one.device_id: one for one in (EnrolledDevice(public_key=f"{number:064x}") for number in range(6))}
    store = SqliteDevices(engine)
    store.enroll([devices[each] for each in DEVICES[:4]], time.time())
    store.enroll([devices[each] for each in DEVICES[4:]], time.time() - OLD_S)
    engine.dispose()
    host.start()
    (host.state / "tokens").mkdir()
    (host.state / "tokens" / "operator.token").write_text(host.operator_token)
    (host.state / "address").write_text(host.address)
    yield host
    host.stop()


@pytest.fixture
def device(host: Hosted, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """``fanin device`` with this coordinator."""
    run = fanin_in_process(capsys, monkeypatch)
    return lambda *words: run("device", *words, "--state", host.state)


def ids(outcome: Outcome) -> list[str]:
    """Return the ids of a list in JSON."""
    return [row["device_id"] for row in json.loads(outcome.out)["devices"]]


def at_terminal(host: Hosted, keys: bytes, *words: str) -> Outcome:
    """Run ``fanin device`` for a user who presses these keys."""
    keyboard, terminal = pty.openpty()
    os.write(keyboard, keys)
    command = [sys.executable, "-m", "fanin.commands.main", "device", *words, "--state", str(host.state)]
    completed = subprocess.run(command, stdin=terminal, capture_output=True, text=True, check=False)
    os.close(keyboard)
    os.close(terminal)
    return Outcome(completed.returncode, completed.stdout, completed.stderr)


def test_a_selection_is_listed_changed_after_a_question_and_audited(device: Fanin, host: Hosted) -> None:
    prefixes = ("--prefix", DEVICES[3][:8], "--prefix", DEVICES[0][:8], "--prefix", DEVICES[0][:9])
    assert ids(device("list", *prefixes, "--json")) == [DEVICES[0], DEVICES[3]]
    assert ids(device("list", "--unseen-days", "30", "--json")) == DEVICES[4:]
    assert ids(device("list", "--unseen-days", "50", "--json")) == []
    assert "no device is selected" in device("list", "--unseen-days", "50").out

    shown = device("remove", "--unseen-days", "30", "--dry-run")
    assert shown.status == 0 and all(each in shown.out for each in DEVICES[4:])
    unasked = device("remove", "--unseen-days", "30")
    assert unasked.status == 1 and "FN-1472" in unasked.err
    denied = at_terminal(host, b"n\n", "remove", "--unseen-days", "30")
    assert denied.status == 1 and "remove 2 devices? [y/N]" in denied.err and "FN-1473" in denied.err
    assert ids(device("list", "--json")) == DEVICES
    assert at_terminal(host, b"y\n", "remove", "--unseen-days", "30").status == 0
    assert ids(device("list", "--json")) == DEVICES[:4]

    assert device("label", *DEVICES[:2], "ward 3", "--yes").status == 0
    labels = [row["label"] for row in json.loads(device("list", "--json").out)["devices"]]
    assert labels == ["ward 3", "ward 3", "", ""]
    # The filter knows the tags from before the change.
    assert device("tag", *DEVICES[1:4], "floor=2", "ward=3", "--yes").out.count(": tagged") == 3
    moved = device("tag", "--tag", "ward=3", "--prefix", DEVICES[1][:8], "--prefix", DEVICES[2][:8], "ward=4", "--yes")
    assert moved.status == 0, moved.err
    assert device("tag", "--tag", "floor=2", "--remove", "floor", "--yes").out.count(": tagged") == 3
    tags = [row["tags"] for row in json.loads(device("list", "--json").out)["devices"]]
    assert tags == [{}, {"ward": "4"}, {"ward": "4"}, {"ward": "3"}]
    with host.administrator() as administrator:
        entries = [entry for entry in administrator.audit_page().entries if entry.call == "ChangeDevice"]
    changed = [f"device {each}: remove" for each in DEVICES[4:]]
    assert [entry.subject for entry in entries][:2] == changed
    assert len(entries) == 12


def test_one_bad_id_leaves_the_others_and_a_wrong_selection_changes_none(device: Fanin) -> None:
    unknown = "0" * len(DEVICES[0])
    outcome = device("ban", DEVICES[0], unknown, "not an id", DEVICES[1], "--reason", "lost", "--yes", "--json")
    assert outcome.status == 1
    row = json.loads(outcome.out)
    assert ids(outcome) == DEVICES[:2]
    assert row["not_changed"][unknown]["code"] == "FN-1414" and set(row["not_changed"]) == {unknown, "not an id"}
    text = device("remove", "--only", "banned", "--yes")
    assert text.status == 1 and text.out.count("FN-1499") == 0 and text.out.count("not changed: ") == 2
    assert ids(device("list", "--only", "banned", "--json")) == DEVICES[:2]
    assert device("unban", "--only", "banned", "--yes").out.count(": unbanned") == 2
    assert ids(device("list", "--only", "banned", "--json")) == []
    for words in (["ban"], ["ban", DEVICES[0], "--only", "new"], ["label", "x"], ["tag", "ward=3"]):
        refused = device(*words)
        assert refused.status == 2 and "FN-1471" in refused.err, refused
