"""The database engine: SQLite in a file, at the newest migration.

SQLite runs with a write-ahead log. With ``durability = host`` it syncs every commit (``synchronous=FULL``), with
``process`` only checkpoints. The coordinator uses one connection, from one thread at a time.
"""

import errno
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Final

from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext, RevisionStep
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, ExceptionContext, create_engine, event, inspect
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DatabaseError
from sqlalchemy.pool import ConnectionPoolEntry, StaticPool

from fanin.edge.files import disk_problem, storage_error
from fanin.protos.errors import Conflict, Corrupted, FaninError, InvalidInput, StorageUnavailable
from fanin.protos.release import __version__
from fanin.server.storage.disk import Durability, failed_write
from fanin.server.storage.lanes import Durations
from fanin.server.storage.sqlite import schema

LOG: Final = logging.getLogger("fanin.server.storage.engine")
RELEASE_FILE: Final = "release"
"""The file beside the database with the release that opened it last, for the error of an older one."""
INCREMENTAL: Final = 2
"""The auto_vacuum mode in which free pages are returned to the disk on request (``care.give_back``)."""
_WRITES: Final = "fanin_writes"
"""The execution option of a transaction that writes."""
_TIMES: Final = "fanin_write_times"
"""The execution option with the durations of these transactions."""
_NOT_WRITABLE: Final = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY)
"""A file that this user may not open or write, or that is a folder."""
BUSY_S: Final = 30
"""Seconds that a transaction waits for that of another process."""
_LOCKED: Final = "another process holds the database; end that process, or wait for it"


def open_engine(path: Path, durability: Durability, *, upgrade: bool = True) -> Engine:
    """Open the database in a file.

    Args:
        path: The file.
        durability: What a commit survives.
        upgrade: Whether to create the database or migrate it to the newest form.

    Raises:
        Corrupted: The file is not a database, is damaged, or was written by a newer fanin. Without ``upgrade`` also if
            an older fanin wrote it.
        InvalidInput: The file or its folder cannot be opened or written.
        StorageFull: The database cannot grow.
        StorageUnavailable: Another process holds the database, or it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    connect, options = {"check_same_thread": False, "timeout": BUSY_S}, {_TIMES: Durations()}
    engine = create_engine(f"sqlite:///{path}", poolclass=StaticPool, connect_args=connect, execution_options=options)
    synchronous = {Durability.HOST: "FULL", Durability.PROCESS: "NORMAL"}[durability]

    @event.listens_for(engine, "connect")
    def configure(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
        # Otherwise the driver decides where transactions begin, and leaves reads and DDL out of them.
        connection.isolation_level = None
        cursor = connection.cursor()
        if cursor.execute("PRAGMA page_count").fetchone()[0] == 0:
            # Before the journal mode, which writes the file: only an empty one accepts it, and others would be written.
            cursor.execute("PRAGMA auto_vacuum=INCREMENTAL")
        for pragma in ("journal_mode=WAL", f"synchronous={synchronous}", "foreign_keys=ON", "secure_delete=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if _WRITES in connection.get_execution_options() else "BEGIN")

    @event.listens_for(engine, "handle_error")
    def translate(context: ExceptionContext) -> None:
        error = context.original_exception
        if isinstance(error, sqlite3.Error):
            _translate(error, path)

    try:
        with engine.connect() as connection:
            _check_integrity(connection, path)
            _check_known(connection, path)
            form = MigrationContext.configure(connection).get_current_revision()
        # A second connection: alembic does not commit in a transaction that an earlier query has begun.
        with engine.connect() as connection:
            if upgrade:
                _upgrade(connection, path, form)
            else:
                _check_form(connection, path)
    except (DatabaseError, CommandError) as exc:
        engine.dispose()
        reason = exc.orig if isinstance(exc, DatabaseError) else exc
        if _primary_code(reason) in _NOT_WRITABLE:
            raise InvalidInput(
                f"{path}: cannot be opened or written ({reason}); {_remedy(path)}", code="FN-0502"
            ) from exc
        raise Corrupted(
            f"{path}: not a database of a coordinator ({reason}); restore a backup of the folder", code="FN-0504"
        ) from exc
    except FaninError:
        engine.dispose()
        raise

    # A file that cannot be opened at the start is the operator's mistake. One that cannot be written later may recover.
    @event.listens_for(engine, "handle_error")
    def wait_for_file(context: ExceptionContext) -> None:
        if _primary_code(context.original_exception) in _NOT_WRITABLE:
            text = f"{path}: cannot be opened or written now ({context.original_exception}); {_remedy(path)}"
            raise StorageUnavailable(text, _remedy(path), code="FN-0502")

    return engine


def open_reader(path: Path) -> Engine:
    """Return an engine that only reads a database that ``open_engine`` opened, from any number of threads.

    With a write-ahead log, it neither waits for a transaction nor delays one. It connects when it is first used.
    """
    engine = create_engine(f"sqlite:///{path}", connect_args={"check_same_thread": False, "timeout": 30})

    @event.listens_for(engine, "connect")
    def configure(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA query_only=ON")
        cursor.close()

    @event.listens_for(engine, "handle_error")
    def translate(context: ExceptionContext) -> None:
        error = context.original_exception
        if isinstance(error, sqlite3.Error):
            _translate(error, path)

    return engine


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction that writes. It waits for the write lock before it reads.

    A transaction that reads first and then writes fails in SQLite if another connection wrote in between.

    Reference: https://www.sqlite.org/isolation.html
    """
    with write_times(engine).timed(), engine.execution_options(**{_WRITES: True}).begin() as connection:
        yield connection


def write_times(engine: Engine) -> Durations:
    """Return the durations of the transactions that wrote, from the wait for the write lock to the commit."""
    times = engine.get_execution_options()[_TIMES]
    assert isinstance(times, Durations), "open_engine sets it"
    return times


def truncate_log(engine: Engine) -> bool:
    """Empty the write-ahead log, which has old pages. Return False if a reader hinders it.

    Reference: https://www.sqlite.org/pragma.html#pragma_wal_checkpoint
    """
    with engine.connect() as connection:
        file = connection.connection.driver_connection
        assert isinstance(file, sqlite3.Connection), "the engine opens SQLite"
        file.execute("PRAGMA busy_timeout = 0")
        is_busy, _, _ = file.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        file.execute(f"PRAGMA busy_timeout = {1000 * BUSY_S}")
    return not is_busy


def touch(engine: Engine) -> None:
    """Write to the database, without a change of the record. Raises the errors of a transaction.

    The number that SQLite reserves for applications is written again. fanin does not use it.
    """
    with writing(engine) as connection:
        connection.exec_driver_sql("PRAGMA user_version = 0")


def migrate(connection: Connection, form: str = "head") -> None:
    """Migrate the database to a form, the newest one by default.

    Reference: https://alembic.sqlalchemy.org/en/latest/api/runtime.html (EnvironmentContext without env.py)
    """
    script = _migrations()

    def steps(current: str, _context: MigrationContext) -> list[RevisionStep]:
        return script._upgrade_revs(form, current)

    with EnvironmentContext(Config(), script, fn=steps) as environment:
        environment.configure(connection=connection, target_metadata=schema.METADATA, transactional_ddl=True)
        with environment.begin_transaction():
            environment.run_migrations()


def _upgrade(connection: Connection, path: Path, form: str | None) -> None:
    """Bring a database to the newest form. None is the form of an empty one."""
    if form is None:
        _create(connection)
    elif form == known_forms()[-1]:
        _remove_copies(path)
    else:
        _keep_copy(path, form)
        migrate(connection)
        if connection.exec_driver_sql("PRAGMA auto_vacuum").scalar_one() != INCREMENTAL:
            # A database of an older form gets the mode by a rewrite of the file.
            connection.commit()
            memory = connection.connection.driver_connection
            assert isinstance(memory, sqlite3.Connection)
            memory.execute("PRAGMA auto_vacuum=INCREMENTAL")
            memory.execute("VACUUM")


def copy_database(source: Path, target: Path) -> None:
    """Write a snapshot of a database to a file. Another process may write to the source meanwhile.

    One read transaction covers all pages, and in the write-ahead mode it keeps no writer waiting.

    Reference: https://www.sqlite.org/backup.html
    """
    with closing(sqlite3.connect(source, timeout=30)) as reader, closing(sqlite3.connect(target)) as copy:
        reader.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE")
    with target.open("rb") as file:
        os.fsync(file.fileno())


def _keep_copy(path: Path, form: str) -> None:
    """Copy a database before it is migrated. The copy stays until the first start after the migration.

    A process that is killed while it copies leaves a draft, and one that is killed while it migrates leaves the
    database as it was: the migration is one transaction.
    """
    copy = path.with_name(f"{path.name}.form-{form}")
    draft = path.with_name(f"{path.name}.draft")
    draft.unlink(missing_ok=True)
    copy_database(path, draft)
    draft.chmod(0o600)
    draft.replace(copy)
    LOG.warning(
        "%s: written by %s, and is migrated from form %s to %s for fanin %s; a copy stays in %s until the next start",
        *(path, _release_of(path), form, known_forms()[-1], __version__, copy.name),
    )


def _remove_copies(path: Path) -> None:
    for copy in path.parent.glob(f"{path.name}.form-*"):
        copy.unlink()
        LOG.info("%s: removed, because the migrated database works", copy)


def _release_of(path: Path) -> str:
    """Return the fanin that opened a database last, as far as it is known."""
    note = path.with_name(RELEASE_FILE)
    text = note.read_text("utf-8", errors="replace").strip() if note.is_file() else ""
    return f"fanin {text[:40]}" if text and text.isprintable() else "another fanin"


def _create(connection: Connection) -> None:
    """Create the tables of the newest form in one transaction.

    A process that opens many databases, such as a simulation, migrates only one: migrations take 20 ms.
    """
    with connection.execution_options(**{_WRITES: True}).begin():
        for statement in _definitions():
            connection.exec_driver_sql(statement)


@cache
def _definitions() -> tuple[str, ...]:
    """Return the statements of what the migrations leave in an empty database, their number included."""
    engine = create_engine("sqlite://", poolclass=StaticPool)
    with engine.connect() as connection:
        migrate(connection)
        memory = connection.connection.driver_connection
        assert isinstance(memory, sqlite3.Connection)
        statements = tuple(memory.iterdump())
    engine.dispose()
    return tuple(statement for statement in statements if statement not in ("BEGIN TRANSACTION;", "COMMIT;"))


def _translate(error: sqlite3.Error, path: Path) -> None:
    """Raise our own error for a result code of SQLite, if there is one.

    Reference:
        https://www.sqlite.org/rescode.html
    """
    primary = _primary_code(error)
    if primary == sqlite3.SQLITE_CORRUPT:
        raise Corrupted(
            f"{path}: damaged ({error}); stop the coordinator and restore a backup of the folder", code="FN-0504"
        )
    if primary == sqlite3.SQLITE_FULL:
        raise storage_error(str(path), OSError(errno.ENOSPC, ""))
    if primary == sqlite3.SQLITE_IOERR:
        # SQLite has one code for a quota, a limit on file sizes, a read-only disk and a broken one, and hides errno.
        cause = failed_write(_log_of(path)) or failed_write(path)
        if cause is not None and cause.errno != errno.EIO:
            raise storage_error(str(path), cause)
        raise OSError(errno.EIO, f"{path}: the disk failed ({error}, {error.sqlite_errorname})")
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        raise StorageUnavailable(f"{path}: {_LOCKED} ({error})", _LOCKED, code="FN-0503")
    if primary == sqlite3.SQLITE_CONSTRAINT:
        # Operators read this one, so it does not name the file.
        raise Conflict(
            f"the record already has this entry ({error}); read the state again, then decide", code="FN-0509"
        )


def _remedy(path: Path) -> str:
    """Return why a database cannot be opened or written, and what to do."""
    cause = failed_write(path) or failed_write(_log_of(path))
    return "check the owner and the permissions of the file and of its folder" if cause is None else disk_problem(cause)


def _log_of(path: Path) -> Path:
    """Return the write-ahead log of a database, to which every transaction writes first."""
    return path.with_name(f"{path.name}-wal")


def _primary_code(error: BaseException | None) -> int | None:
    """Return the primary result code of an error of SQLite. Errors that the driver itself raises have none."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _check_integrity(connection: Connection, path: Path) -> None:
    """Raise Corrupted if a page of the database is damaged. Without this check the damage shows up in some later call.

    Reference: https://www.sqlite.org/pragma.html#pragma_quick_check
    """
    problem = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
    if problem != "ok":
        raise Corrupted(f"{path}: damaged ({problem.splitlines()[-1]}); restore a backup of the folder", code="FN-0504")


def _check_known(connection: Connection, path: Path) -> None:
    """Raise Corrupted if another program or a newer fanin wrote the database."""
    known = known_forms()
    form = MigrationContext.configure(connection).get_current_revision()
    tables = inspect(connection).get_table_names() if form is None else []
    foreign = sorted(set(tables) - set(schema.METADATA.tables) - {"alembic_version"})
    if foreign:
        raise Corrupted(
            f"{path}: not a database of a coordinator (table {foreign[0]} is of another program); restore a backup of "
            "the folder",
            code="FN-0504",
        )
    if form is not None and form not in known:
        raise Corrupted(
            f"{path}: written by {_release_of(path)} (got form {form}), and this is fanin {__version__} (expected "
            f"{known[0]} to {known[-1]}); install that fanin: a database cannot be downgraded. Or restore a backup of "
            "the folder that this fanin wrote",
            code="FN-0506",
        )


def form_of(engine: Engine) -> str:
    """Return the form of a database, which an open database always has."""
    with engine.connect() as connection:
        form = MigrationContext.configure(connection).get_current_revision()
    assert form is not None, "an open database has a form"
    return form


def known_forms() -> tuple[str, ...]:
    """Return the forms that this fanin knows, oldest first."""
    return tuple(sorted(revision.revision for revision in _migrations().walk_revisions()))


def _check_form(connection: Connection, path: Path) -> None:
    form = MigrationContext.configure(connection).get_current_revision()
    newest = _migrations().get_current_head()
    if form != newest:
        raise Corrupted(
            f"{path}: the database has form {form}, expected {newest}; let a coordinator of this fanin open it once, "
            "or look with the fanin that wrote it",
            code="FN-0506",
        )


@cache
def _migrations() -> ScriptDirectory:
    """Return the migrations. Each is a file that is loaded once, because a process may open many databases."""
    return ScriptDirectory(str(Path(__file__).parent / "migrations"))
