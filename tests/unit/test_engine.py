"""Opening the database: files that are no database, newer formats, and the remains of a killed process."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from threading import Thread

import pytest
from sqlalchemy import Engine, create_engine, event, text
from support.errors import raises

from fanin.protos.errors import Corrupted, InvalidInput, StorageUnavailable
from fanin.protos.messages import NewToken, Role
from fanin.protos.release import __version__
from fanin.server.storage.disk import Durability
from fanin.server.storage.sqlite.devices import SqliteDevices
from fanin.server.storage.sqlite.engine import INCREMENTAL, migrate, open_engine, writing

TOKEN = NewToken(name="a", role=Role.DEVICE, sha256="a" * 64)


def test_a_database_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fanin.db"
    engine = open_engine(path, Durability.PROCESS)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    (tmp_path / "release").write_text("99.1\n")
    for upgrade in (True, False):
        with raises(
            Corrupted,
            f"{path}: written by fanin 99.1 (got form 9999), and this is fanin {__version__} (expected 0001 to 0016); "
            "install that fanin: a database cannot be downgraded. Or restore a backup of the folder that this fanin "
            "wrote",
        ):
            open_engine(path, Durability.PROCESS, upgrade=upgrade)


def test_an_older_database_is_copied_before_it_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "fanin.db"
    older = create_engine(f"sqlite:///{path}")
    with older.connect() as connection:
        migrate(connection, "0008")
    older.dispose()
    copy = tmp_path / "fanin.db.form-0008"
    for exists in (True, False):
        # The copy is removed by the first start after the migration.
        open_engine(path, Durability.PROCESS).dispose()
        assert copy.exists() is exists
        # Free pages of a database of any form can be returned to the disk.
        with closing(sqlite3.connect(path)) as database:
            assert database.execute("PRAGMA auto_vacuum").fetchone() == (INCREMENTAL,)
        if exists:
            with pytest.raises(Corrupted, match="the database has form 0008"):
                open_engine(copy, Durability.PROCESS, upgrade=False)


def test_a_new_database_has_what_the_migrations_leave(tmp_path: Path) -> None:
    open_engine(tmp_path / "new.db", Durability.PROCESS).dispose()
    migrated_engine = create_engine(f"sqlite:///{tmp_path / 'migrated.db'}")
    with migrated_engine.connect() as connection:
        migrate(connection)
    migrated_engine.dispose()
    dumps = []
    for name in ("new.db", "migrated.db"):
        with closing(sqlite3.connect(tmp_path / name)) as database:
            # The order of a table's constraints differs from one migration to the next.
            dumps.append(sorted(part.strip(" ,;") for line in database.iterdump() for part in line.split("\n")))
    assert dumps[0] == dumps[1]
    assert any("one_update_an_assignment" in part for part in dumps[0])


@pytest.mark.parametrize(("form", "last_table"), [(None, 4), ("0001", 2)])
def test_a_process_that_ends_before_the_newest_form_leaves_a_folder_that_opens(
    tmp_path: Path, form: str | None, last_table: int
) -> None:
    path = tmp_path / "fanin.db"
    if form is None:
        # The statements for a new database are known, so the process ends while it creates the tables in the file.
        open_engine(tmp_path / "other.db", Durability.HOST).dispose()
    else:
        older_engine = create_engine(f"sqlite:///{path}")
        with older_engine.connect() as connection:
            migrate(connection, form)
        older_engine.dispose()
    child = os.fork()
    if child == 0:
        num_tables = 0

        @event.listens_for(Engine, "after_cursor_execute")
        def exit_process(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
            nonlocal num_tables
            num_tables += "CREATE TABLE" in statement
            if num_tables == last_table:
                os._exit(9)

        open_engine(path, Durability.HOST)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    engine = open_engine(path, Durability.HOST)
    assert SqliteDevices(engine).num_devices == 0
    engine.dispose()


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fanin.db"
    path.write_bytes(b"something else, and long enough to be looked at" * 100)
    with raises(
        Corrupted,
        f"{path}: not a database of a coordinator (file is not a database); restore a backup of the folder",
    ):
        open_engine(path, Durability.PROCESS)


def test_a_database_that_cannot_be_opened_is_not_reported_as_damaged(tmp_path: Path) -> None:
    path = tmp_path / "fanin.db"
    path.mkdir()
    with raises(
        InvalidInput,
        f"{path}: cannot be opened or written (unable to open database file); check the owner and the permissions of "
        "the file and of its folder",
    ):
        open_engine(path, Durability.PROCESS)


def test_a_read_only_database_is_not_reported_as_damaged(tmp_path: Path) -> None:
    path = tmp_path / "fanin.db"
    engine = open_engine(path, Durability.PROCESS)
    with engine.connect() as connection:
        connection.execute(text("PRAGMA query_only = ON"))
    # As if the file's owner had changed while the coordinator serves. The driver tries again later.
    remedy = "check the owner and the permissions of the file and of its folder"
    problem = f"{path}: cannot be opened or written now (attempt to write a readonly database); {remedy}"
    with raises(StorageUnavailable, problem):
        SqliteDevices(engine).add_token(TOKEN, 1.0)
    with engine.connect() as connection:
        connection.execute(text("PRAGMA query_only = OFF"))
    SqliteDevices(engine).add_token(TOKEN, 1.0)
    engine.dispose()


def test_a_transaction_that_writes_excludes_others_before_it_reads(tmp_path: Path) -> None:
    """SQLite fails a transaction that reads first if another connection writes before it does."""
    first, second = (open_engine(tmp_path / "fanin.db", Durability.PROCESS) for _ in range(2))
    insert = "INSERT INTO bundles (bundle_sha256, bundle_proto) VALUES ('first', '')"
    other = Thread(target=SqliteDevices(second).add_token, args=(TOKEN, 1.0))
    with writing(first) as connection:
        assert connection.execute(text("SELECT count(*) FROM bundles")).scalar() == 0
        other.start()
        other.join(0.3)
        connection.execute(text(insert))
    other.join()
    assert SqliteDevices(first).find_token(TOKEN.sha256) is not None
    first.dispose()
    second.dispose()


def test_a_disk_that_fails_is_not_reported_as_full(tmp_path: Path) -> None:
    path = tmp_path / "fanin.db"
    engine = open_engine(path, Durability.PROCESS)
    links = {link.name: str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    descriptors = [int(name) for name, target in links.items() if target in (str(path), f"{path}-wal")]
    folder = os.open(tmp_path, os.O_RDONLY)
    for descriptor in descriptors:
        # Reads from a folder's descriptor fail, as they do on a broken disk.
        os.dup2(folder, descriptor)
    os.close(folder)
    # A write by another connection forces SQLite to read the file again.
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA user_version = 1")
    with raises(OSError, f"[Errno 5] {path}: the disk failed (disk I/O error, SQLITE_IOERR_READ)"):
        SqliteDevices(engine)


def test_a_damaged_page_is_detected_when_the_database_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "fanin.db"
    open_engine(path, Durability.PROCESS).dispose()
    data = bytearray(path.read_bytes())
    # The second page is a table or an index. Its first byte is the page type.
    page = int.from_bytes(data[16:18], "big")
    data[page] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(Corrupted, match=rf"^{path}: damaged \(.+\); restore a backup of the folder\n"):
        open_engine(path, Durability.PROCESS)


def test_a_database_of_another_program_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "fanin.db"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE songs (title)")
    with raises(
        Corrupted,
        f"{path}: not a database of a coordinator (table songs is of another program); restore a backup of the folder",
    ):
        open_engine(path, Durability.PROCESS)
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("songs",)]
