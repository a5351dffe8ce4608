"""A repeated backup notices files that decayed, in the backup or in the coordinator's folder."""

import json
import shutil
from pathlib import Path

import pytest
from support.staleness import send, settle
from support.virtual import bundle_in, open_place, plan, start

from fanin.commands.care.backup import main, restore_main
from fanin.server.care.backup import SHARES
from fanin.simulation import run_virtual


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The folder of a coordinator with a Version, which is backed up."""

    async def publish() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(concurrency=1, buffer=1, quorum=1, max_rounds=9))
        await send(place, "device-0")
        await settle()
        await place.runs.stop()

    run_virtual(publish())
    assert main([str(tmp_path / "backup"), "--state", str(tmp_path / "state")]) == 0
    return tmp_path / "state"


def damage(folder: Path, *, is_manifest: bool = False) -> str:
    """Change three bytes of a Chunk, and return its path."""
    chunks = [path for path in (folder / "blobs").rglob("*") if path.is_file()]
    chunk = next(path for path in chunks if path.read_bytes().startswith(b"{") == is_manifest)
    data = bytearray(chunk.read_bytes())
    data[10:13] = bytes(byte ^ 1 for byte in data[10:13])
    chunk.chmod(0o600)
    chunk.write_bytes(data)
    return str(chunk.relative_to(folder))


def back_up(state: Path, capsys: pytest.CaptureFixture[str], *options: str, status: int = 0) -> dict[str, object]:
    """Repeat the backup, and return its row."""
    capsys.readouterr()
    assert main([str(state.with_name("backup")), "--state", str(state), "--json", *options]) == status
    row: dict[str, object] = json.loads(capsys.readouterr().out)
    return row


def test_a_damaged_backup_is_replaced(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = damage(state.with_name("backup"))
    row = back_up(state, capsys, "--verify")
    assert row["healed"] == [path]
    assert row["num_verified"] == row["num_files"]
    assert back_up(state, capsys, "--verify")["healed"] == []
    assert restore_main([str(state.with_name("backup")), "--state", str(state.with_name("new"))]) == 0


def test_backups_in_a_row_verify_every_file(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = damage(state.with_name("backup"))
    rows = [back_up(state, capsys) for _ in range(SHARES)]
    assert [row["healed"] for row in rows if row["healed"]] == [[path]]
    assert {row["num_new_files"] for row in rows} == {0}
    num_verified = [row["num_verified"] for row in rows]
    assert sum(each for each in num_verified if isinstance(each, int)) == rows[0]["num_files"]


def test_damage_in_the_folder_is_named_and_never_reaches_the_backup(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = damage(state)
    row = back_up(state, capsys, "--verify", status=1)
    assert (row["damaged"], row["lost"]) == ([path], [])
    assert restore_main([str(state.with_name("backup")), "--state", str(state.with_name("new"))]) == 0
    # The manifest of a Bundle lists other files, so every backup reads it.
    manifest = damage(state, is_manifest=True)
    assert manifest in str(back_up(state, capsys, status=1)["damaged"])
    shutil.copy(state.with_name("backup") / manifest, state / manifest)
    # Without any whole copy, the backup is written without the file.
    damage(state.with_name("backup"))
    row = back_up(state, capsys, "--verify", status=1)
    assert (row["damaged"], row["lost"]) == ([], [path])


def test_every_backup_notices_a_missing_file(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    payload = next(path for path in (state / "updates").rglob("*") if path.is_file())
    payload.unlink()
    assert back_up(state, capsys, status=1)["damaged"] == [str(payload.relative_to(state))]


def test_a_damaged_secret_of_a_backup_is_replaced(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (state / "tokens").mkdir(exist_ok=True)
    (state / "tokens" / "operator").write_text("secret")
    back_up(state, capsys)
    (secret,) = (state.with_name("backup") / "secrets").iterdir()
    secret.write_text("sEcret")
    back_up(state, capsys)
    assert secret.read_text() == "secret"
