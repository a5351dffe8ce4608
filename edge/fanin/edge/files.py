"""Files that are replaced as a unit, folders of one process, and the entries that belong to another program.

After a crash or a loss of power the name of a replaced file has the old bytes or the new bytes.

``replace_file`` writes a draft in the same folder, syncs the draft, renames it and syncs the folder. Without the first
sync a loss of power can leave an empty file under the new name. Without the second one the old file can come back.
"""

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Final

from fanin.protos.errors import Conflict, InvalidInput, StorageFull, StorageUnavailable

DRAFT_SUFFIX: Final = ".new"
MAX_LOCK_CHARS: Final = 20
LOST_FOUND: Final = "lost+found"
"""The folder of an ext file system for files whose names are lost, in the top folder of a disk."""

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a write that finds no room. A smaller one, or a later one, may succeed."""
_NOT_ALLOWED: Final = "the user of this process may not write there; correct the owner or the permissions"
DISK_PROBLEMS: Final[Mapping[int, str]] = MappingProxyType(
    {
        errno.ENOSPC: "no space is left on the disk; free some",
        errno.EDQUOT: "the disk quota of the user of this process is used up; free some, or raise it",
        errno.EFBIG: "the limit on file sizes is reached; raise it (ulimit -f, or LimitFSIZE= in systemd)",
        errno.EROFS: "the disk is mounted read-only; the kernel's log (dmesg) has the reason. Mount it writable",
        errno.EACCES: _NOT_ALLOWED,
        errno.EPERM: _NOT_ALLOWED,
        errno.EMFILE: "this process has too many open files; raise its limit (ulimit -n, or LimitNOFILE= in systemd)",
        errno.ENFILE: "this machine has too many open files; close some, or raise fs.file-max",
        errno.EIO: "the disk reports an error of input or output; the kernel's log (dmesg) has the reason",
    }
)
"""Cause and remedy of a failed write, without a path, by the number of the error."""


def disk_problem(error: OSError) -> str:
    """Return cause and remedy of a failed write, without a path."""
    return DISK_PROBLEMS.get(error.errno or 0, error.strerror or type(error).__name__)


def storage_error(what: str, error: OSError) -> StorageFull | StorageUnavailable:
    """Return our error for a failed write. ``what`` names the file; the message adds cause and remedy."""
    kind = StorageFull if error.errno in FULL else StorageUnavailable
    return kind(f"{what}: cannot be written: {disk_problem(error)}", disk_problem(error))


def without_foreign(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Return the paths without those of systems and tools, such as ``.DS_Store``, ``._a.csv`` and ``.nfs0001``.

    Nobody writes such files on purpose, so they are never data, and a folder with nothing else is empty.
    """
    return tuple(path for path in paths if not path.name.startswith(".") and path.name != LOST_FOUND)


def replace_file(
    path: Path, data: bytes | Sequence[bytes | memoryview], *, mode: int = 0o666, writer: str = ""
) -> None:
    """Replace a file, or create it; its bytes and its name are durable on return.

    Args:
        path: The file. Its folder must exist.
        data: The new content, perhaps in pieces.
        mode: Permissions of the new file, reduced by the umask.
        writer: Name of this process, if others may replace the same file at the same time.

    Raises:
        OSError: The disk is full or the folder is not writable. The old file is unchanged and the draft is removed.
    """
    draft = path.with_name(f"{path.name}{f'.{writer}' if writer else ''}{DRAFT_SUFFIX}")
    try:
        # A draft that a killed process left may have other permissions.
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.writelines((data,) if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def new_folder(what: str, folder: object) -> Path:
    """Return the path of a folder to write, which must not exist yet or must be empty. Nothing is created.

    Foreign files do not count (``without_foreign``).

    Args:
        what: Name of the argument, for the message.
        folder: The folder.

    Raises:
        InvalidInput: It is not a path, is a file, cannot be read, or holds files.
    """
    if not isinstance(folder, str | Path) or not str(folder):
        raise InvalidInput(
            f"{what}: got {folder!r}, expected the path of a new folder, a str or a pathlib.Path", code="FN-0397"
        )
    path = Path(folder)
    try:
        is_used = bool(without_foreign(path.iterdir()))
    except FileNotFoundError:
        return path
    except (OSError, ValueError) as exc:
        raise InvalidInput(
            f"{what}: {path} is no folder ({exc}), expected a new folder; name another path", code="FN-0397"
        ) from exc
    if is_used:
        raise InvalidInput(
            f"{what}: {path} is not empty, expected a new folder; name another one, or remove it", code="FN-0397"
        )
    return path


@contextmanager
def held(folder: Path, remedy: str, *, lock: str = "lock", mode: int = 0o777) -> Iterator[None]:
    """Reserve a folder for this process; create it if it is missing.

    The kernel holds the lock, so it ends with the process in any case.

    Args:
        folder: The folder.
        remedy: The end of the error: what to do instead.
        lock: The name of the lock file. It has the number of the last process that held the folder.
        mode: Permissions of a new folder, reduced by the umask.

    Raises:
        Conflict: Another process, or another part of this one, holds the folder.
        StorageFull: The disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=mode)
    with (folder / lock).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            file.seek(0)
            number = file.read(MAX_LOCK_CHARS).strip()
            holder = f"process {number}" if number.isascii() and number.isdecimal() else "another process"
            raise Conflict(f"{folder}: in use by {holder}; {remedy}", code="FN-0399") from exc
        try:
            # Not buffered: a full disk would fail a second time when the file is closed.
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"{os.getpid()}\n".encode())
        except OSError as exc:
            raise storage_error(f"{folder / lock}", exc) from exc
        yield


def is_held(folder: Path, *, lock: str = "lock") -> bool:
    """Return whether a process holds a folder (``held``). Raises OSError if the lock cannot be read."""
    try:
        with (folder / lock).open() as file:
            # It is free again at once; a process that starts in this moment would have to be started again.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: syncing a file does not sync its name."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
