"""The files and folders that ``fanin fetch`` writes, each replaced as a unit.

    .NAME.TOKEN.new     the draft, which becomes NAME when it is complete
    .NAME.TOKEN.old     the folder that the draft replaces, until both renames are done

A folder is replaced by two renames, a file by one. After a kill between the two, the next fetch to NAME puts the old
folder back (``restore``). After a kill before that, it removes the draft.

A fetch locks its draft while it runs, and a kill releases the lock. So a locked draft is never removed, and no folder
is put back whose draft is locked. The parent folder is locked while a draft is created or removed: no draft is without
its lock at that time.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from fanin.edge.bundles.bundle import CHUNKS_FOLDER, FETCHED_FOLDER, MANIFEST_FILE, SIGNATURE_FILE
from fanin.edge.files import sync_folder
from fanin.edge.ranges import RANGES
from fanin.protos.errors import Conflict

PARAMETERS: Final = "parameters"
FACTS: Final = "version.json"
WRITTEN: Final = re.compile(
    rf"{PARAMETERS}|{RANGES}|{re.escape(FACTS)}|{FETCHED_FOLDER}/({re.escape(MANIFEST_FILE)}|{re.escape(SIGNATURE_FILE)}|"
    rf"{CHUNKS_FOLDER}/[0-9a-f]{{64}})"
)
"""Relative names of the files in a fetched folder."""
NEW: Final = ".new"
OLD: Final = ".old"
"""Suffixes of a draft, and of the folder that it replaces."""


def put(out: Path, write: Callable[[Path], None], *, is_file: bool, option: str, force: bool) -> bool:
    """Write a file or a folder, all or nothing.

    Args:
        out: The file or folder.
        write: Writes the content into an empty file or folder.
        is_file: Whether it is a file.
        option: The option that names ``out``, for errors.
        force: Replace an earlier result.

    Returns:
        True if it was written, False if ``out`` already holds the same files.

    Raises:
        Conflict: ``out`` has other content.
        OSError: A file cannot be written. The error names ``out``.
    """
    place = out.resolve()
    try:
        with _draft_of(place, is_file=is_file) as draft:
            aside = draft.with_suffix(OLD)
            write(draft)
            contents = _contents(draft)
            if out.exists():
                # An earlier download is good enough if it holds at least these files.
                if contents.items() <= _contents(out).items():
                    return False
                check_replaced(out, option, force=force)
            for path in (draft, *draft.rglob("*")):
                _sync(path)
            if place.is_dir():
                swap(place, draft, aside)
            else:
                draft.replace(place)
            sync_folder(place.parent)
        _remove(aside)
    except OSError as exc:
        # The error names the draft, which the user does not know.
        raise OSError(exc.errno, exc.strerror, str(out)) from exc
    return True


def swap(place: Path, draft: Path, aside: Path) -> None:
    """Rename the folder ``place`` to ``aside`` and ``draft`` to ``place``; if that fails, ``place`` is as before."""
    place.rename(aside)
    try:
        draft.rename(place)
    except BaseException:
        aside.rename(place)
        raise


def restore(place: Path) -> None:
    """Repair a folder whose replacement was killed: put the old folder back if there is no new one, or delete it."""
    for aside in filter(Path.is_dir, _own(place, OLD)):
        if _is_in_use(aside.with_suffix(NEW)):
            continue  # its fetch is between the renames
        if place.exists():
            _remove(aside)
        else:
            aside.rename(place)
        sync_folder(place.parent)


def check_replaced(out: Path, option: str, *, force: bool) -> None:
    """Raise Conflict if ``out`` may not be replaced: without --force, or a folder with entries of others."""
    others = _others(out) if out.is_dir() else ()
    if others:
        raise Conflict(
            f"{out}: something else is there, such as {others[0]}; name another {option}, or move it away",
            code="FN-1013",
        )
    if not force:
        raise Conflict(
            f"{out}: has {_earlier(out)}, which differs; replace it with --force, or name another {option}",
            code="FN-1013",
        )


def _earlier(out: Path) -> str:
    """Return the content of a file or folder in words: that of an earlier fetch, as far as it is known."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        facts = json.loads((out / FACTS).read_text(encoding="utf-8"))
        return f"version {facts['version']} of run {facts['run_id']}"
    return "another version or another file" if out.is_file() else "another version"


@contextmanager
def _draft_of(place: Path, *, is_file: bool) -> Iterator[Path]:
    """Create an empty draft, which is locked, and remove those of killed fetches.

    Yields:
        The draft. It is removed at the end if it is still there.
    """
    draft = place.with_name(f".{place.name}.{secrets.token_hex(4)}{NEW}")
    with ExitStack() as stack:
        with _locked(place.parent, wait=True):
            for left in _own(place, NEW):
                if _is_in_use(left) is False:
                    _remove(left)
            if is_file:
                draft.touch(exist_ok=False)
            else:
                draft.mkdir()
            stack.callback(_remove, draft)
            stack.enter_context(_locked(draft, wait=False))
        yield draft


def _own(place: Path, suffix: str) -> list[Path]:
    """Return the drafts of a place, or the folders that they replaced, without any that no fetch wrote."""
    name = re.compile(rf"\.{re.escape(place.name)}\.[0-9a-f]{{8}}{re.escape(suffix)}")
    paths = [each for each in place.parent.glob(f".*{suffix}") if name.fullmatch(each.name) and not each.is_symlink()]
    return [each for each in paths if not _others(each)]


@contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[bool | None]:
    """Lock a file or folder. Yields False if another process has the lock, and None if its disk has no locks."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        is_locked: bool | None = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_locked = False
        except OSError:
            is_locked = None  # such as NFS
        yield is_locked
    finally:
        os.close(descriptor)


def _is_in_use(draft: Path) -> bool | None:
    """Return whether a fetch writes a draft now; None if that is unknown."""
    try:
        with _locked(draft, wait=False) as is_locked:
            return None if is_locked is None else not is_locked
    except FileNotFoundError:
        return False


def _others(folder: Path) -> tuple[Path, ...]:
    """Return the entries of a folder and its subfolders that fetch does not write. A file has none."""
    folders = {folder / FETCHED_FOLDER, folder / FETCHED_FOLDER / CHUNKS_FOLDER}
    return tuple(
        path
        for path in sorted(folder.rglob("*"))
        if path.is_symlink()
        or not (path in folders if path.is_dir() else WRITTEN.fullmatch(path.relative_to(folder).as_posix()))
    )


def _contents(path: Path) -> dict[str, bytes]:
    """Return the bytes of a file, or of each file in a folder, by relative name."""
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    """Delete a file or a folder; another fetch may delete it at the same time."""
    with suppress(FileNotFoundError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
