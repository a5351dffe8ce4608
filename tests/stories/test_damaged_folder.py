"""A damaged coordinator's folder: ``fanin serve`` reports the damage and what to do, and changes nothing."""

import gc
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.commands import Fanin, fanin_in_process, one_line, usage_line

from fanin.commands.console.terminal import DEVICE_TOKEN, OPERATOR_TOKEN
from fanin.protos.messages import Role
from fanin.protos.release import __version__
from fanin.server.access.authority import local_identity
from fanin.server.access.registry import Registry
from fanin.server.administration.token_files import ensure_token
from fanin.server.folder import open_state
from fanin.server.storage.disk import Durability
from fanin.server.storage.lanes import inline

DATA = b"a chunk"


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Fanin]:
    """The command line. The umask is restored afterwards, because ``fanin serve`` changes it."""
    umask = os.umask(0o022)
    yield fanin_in_process(capsys, monkeypatch)
    os.umask(umask)


@pytest.fixture(scope="module")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a coordinator that has served."""
    state = tmp_path_factory.mktemp("served") / "state"
    archive = open_state(state, Durability.PROCESS, (inline, inline), time.time)
    registry = Registry(archive.devices, time.time)
    ensure_token(state / DEVICE_TOKEN, Role.DEVICE, registry)
    ensure_token(state / OPERATOR_TOKEN, Role.ADMIN, registry)
    local_identity(state / "tls", ("localhost", "127.0.0.1", "::1"), datetime.now(UTC))
    archive.blobs.put_pieces([DATA])
    del archive, registry
    # The database is closed here and not during a test, because closing it moves the write-ahead log into it.
    gc.collect()
    return state


@pytest.fixture
def state(tmp_path: Path, served_folder: Path) -> Path:
    """A copy of that folder."""
    return Path(shutil.copytree(served_folder, tmp_path / "state"))


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files except those that every access to a folder changes."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name not in ("lock", "fanin.db-shm"))
    files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    # An empty write-ahead log changes nothing.
    return {name: data for name, data in files.items() if data or name != "fanin.db-wal"}


def lose_database(state: Path) -> None:
    for path in state.glob("fanin.db*"):
        path.unlink()


def lose_database_and_tokens(state: Path) -> None:
    lose_database(state)
    for path in (state / "tokens").iterdir():
        path.unlink()


def empty_database(state: Path) -> None:
    lose_database(state)
    (state / "fanin.db").touch()


def newer_database(state: Path) -> None:
    with closing(sqlite3.connect(state / "fanin.db")) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")


def database_folder(state: Path) -> None:
    lose_database(state)
    (state / "fanin.db").mkdir()
    (state / "fanin.db" / "file").touch()


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing database": (
        lose_database,
        "fanin.db: missing, but blobs, tokens of an earlier coordinator are there; restore a backup of the folder ",
    ),
    "blobs alone": (lose_database_and_tokens, "fanin.db: missing, but blobs of an earlier coordinator are there; "),
    "empty database": (empty_database, "fanin.db: empty, but blobs, tokens of an earlier coordinator are there; "),
    "other file": (
        lambda state: (lose_database(state), (state / "fanin.db").write_bytes(b"garbage" * 1000)),
        "fanin.db: not a database of a coordinator (file is not a database); restore a backup of the folder",
    ),
    "newer database": (newer_database, f"fanin.db: written by fanin {__version__} (got form 9999)"),
    "database is a folder": (database_folder, "fanin.db: cannot be opened or written (unable to open database file); "),
    "empty token": (
        lambda state: (state / DEVICE_TOKEN).write_bytes(b""),
        "tokens/device.token: got 0 bytes that are no token, expected one line of text; restore it from a backup, or ",
    ),
    "foreign token": (
        lambda state: (state / OPERATOR_TOKEN).write_bytes(b"another"),
        "tokens/operator.token: got a token that fanin.db does not have for admins; restore the fanin.db ",
    ),
    "garbage ca.pem": (
        lambda state: (state / "tls" / "ca.pem").write_bytes(b"garbage"),
        "tls/ca.pem: damaged, or not a certificate; restore it from a backup or from a device, or remove this file ",
    ),
    "garbage ca.key": (
        lambda state: (state / "tls" / "ca.key").write_bytes(b"garbage"),
        "tls/ca.key: not readable as a private key without a password; restore ",
    ),
    "tls is missing": (
        lambda state: shutil.rmtree(state / "tls"),
        "tls: has no authority, expected ca.key and ca.pem of the coordinator that wrote fanin.db; restore ",
    ),
    "tls has no authority": (
        lambda state: [(state / "tls" / name).unlink() for name in ("ca.key", "ca.pem")],
        "tls: has no authority, expected ca.key and ca.pem of the coordinator that wrote fanin.db; restore ",
    ),
    "garbage ca.pem, and a token that would be issued": (
        lambda state: ((state / "tls" / "ca.pem").write_bytes(b"garbage"), (state / OPERATOR_TOKEN).unlink()),
        "tls/ca.pem: damaged, or not a certificate; restore it from a backup or from a device, or remove this file ",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_folder_is_refused_in_one_line_and_not_changed(fanin: Fanin, state: Path, case: str) -> None:
    damage, text = DAMAGE[case]
    damage(state)
    before = contents(state)
    line = one_line(fanin("serve", "--state", state, "--listen", "127.0.0.1:0", "--no-web"), "serve")
    assert line.startswith(f"{state}/{text}"), line
    assert contents(state) == before


def assert_starts(fanin: Fanin, state: Path) -> None:
    """Check that a start fails only at its last step, the file with the address, whose draft a folder blocks."""
    (state / "address.new").mkdir()
    line = one_line(fanin("serve", "--state", state, "--listen", "127.0.0.1:0", "--no-web"), "serve")
    assert line == f"{state / 'address.new'}: Is a directory"


def test_a_foreign_file_among_the_updates_does_not_prove_an_earlier_coordinator(tmp_path: Path, fanin: Fanin) -> None:
    (tmp_path / "updates").mkdir()
    (tmp_path / "updates" / ".DS_Store").touch()
    assert_starts(fanin, tmp_path)


def test_an_empty_folder_in_place_of_the_authority_gets_a_new_one(state: Path, fanin: Fanin) -> None:
    before = (state / "tls" / "ca.pem").read_bytes()
    shutil.rmtree(state / "tls")
    (state / "tls").mkdir()
    assert_starts(fanin, state)
    assert (state / "tls" / "ca.pem").read_bytes() != before


def test_verify_does_not_create_a_missing_database(fanin: Fanin, state: Path) -> None:
    empty_database(state)
    assert one_line(fanin("verify", "run", "--state", state), "verify").startswith(f"{state}/fanin.db: empty, but ")
    assert (state / "fanin.db").stat().st_size == 0


def test_a_garbage_server_key_is_replaced(state: Path, fanin: Fanin) -> None:
    (state / "tls" / "server.key").write_bytes(b"garbage")
    assert_starts(fanin, state)
    assert b"PRIVATE KEY" in (state / "tls" / "server.key").read_bytes()


@pytest.mark.parametrize("folder_mode", [0o700, 0o755])
def test_keys_and_tokens_that_others_can_read_are_named(
    state: Path, fanin: Fanin, caplog: pytest.LogCaptureFixture, folder_mode: int
) -> None:
    state.chmod(folder_mode)
    for database in state.glob("fanin.db*"):
        database.chmod(0o600)
    files = [state / "tls" / "ca.key", state / "tokens" / "operator.token"]
    for file in files:
        file.chmod(0o644)
    assert_starts(fanin, state)
    warnings = [line.partition("; run: ")[2] for line in caplog.messages if "can read or change" in line]
    assert warnings == ([] if folder_mode == 0o700 else [f"chmod go= {files[0]} {files[1]}"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--name", "b\u00fccher"), "name: got 'b\u00fccher', expected a host name of ASCII letters"),
        (("--name", ""), "name: got '', expected a host name of ASCII letters"),
        (("--listen", "nobody.invalid:1"), "nobody.invalid:1: cannot be listened on ("),
        (
            ("--listen", "192.0.2.1:7443"),
            "192.0.2.1:7443: cannot be listened on (Cannot assign requested address); this machine does not have the ",
        ),
    ],
)
def test_an_invalid_name_is_refused_in_one_line(
    fanin: Fanin, tmp_path: Path, options: tuple[str, str], text: str
) -> None:
    listen = () if "--listen" in options else ("--listen", "127.0.0.1:0", "--no-web")
    line = one_line(fanin("serve", "--state", tmp_path / "state", *listen, *options), "serve")
    assert line.startswith(text), line


def test_a_host_that_is_no_name_is_wrong_usage(fanin: Fanin, tmp_path: Path) -> None:
    line = usage_line(fanin("serve", "--state", tmp_path / "state", "--listen", "a..b:1"), "serve")
    assert line.startswith("listen: got 'a..b:1', expected HOST:PORT")


@pytest.mark.parametrize("entry", ["file", "folder/lock"])
def test_a_path_that_cannot_be_a_folder_is_named(fanin: Fanin, tmp_path: Path, entry: str) -> None:
    folder, _, lock = entry.partition("/")
    (tmp_path / folder / lock).mkdir(parents=True) if lock else (tmp_path / folder).touch()
    line = one_line(fanin("serve", "--state", tmp_path / folder, "--listen", "127.0.0.1:0", "--no-web"), "serve")
    assert line.startswith(f"{tmp_path / entry}: ")


def test_a_coordinator_that_cannot_write_its_address_stops_in_one_line(fanin: Fanin, state: Path) -> None:
    # The coordinator serves by then, so everything that it has started must end too.
    assert_starts(fanin, state)
    assert not (state / "address").exists()
