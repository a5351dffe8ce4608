"""The place of the ledgers: two files that a copy, or a database that was put back, does not agree with.

``fanin.place.0`` and ``fanin.place.1`` are written in turn, each by a durable rename. Each has the number of the write,
the token of the place, the rows of all ledgers, and the inode and the change time (``ctime``) of the other file. No
program sets the change time of a file: ``cp -a``, ``rsync`` and ``tar`` restore the other times alone.

The place is the one that wrote the database if
    1. both files are there, and the newer one has inode and change time of the older one,
    2. the populations have the token of the newer one, and
    3. the database has at least as many rows.

The first condition fails in a copy of the folder, and in a folder whose files were put back. The second one fails for
the database of another folder. The third one fails for an earlier database of this folder. A kill never lets one of
them fail: a rename leaves the older or the newer pair, and rows are counted after their transaction.

A change of owner or permissions of one of the two files changes its change time, too, and cannot be told from a copy.
"""

import json
import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from fanin.server.storage.disk import write_file

PLACE_FILES: Final = ("fanin.place.0", "fanin.place.1")
_UNKNOWN: Final = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerPlace:
    """What one of the two files has.

    Attributes:
        number: The number of the write. The larger one is the newer file.
        token: The token of the place, random.
        rows: The rows of all ledgers at the write.
        other: Inode and change time of the other file in nanoseconds, when this one was written.
    """

    number: int
    token: str
    rows: int
    other: tuple[int, int]


def find_place(folder: Path) -> LedgerPlace | None:
    """Return what the newer file has, or None if the older one is not the one that the newer one was written beside."""
    first, second = (_read(folder / name) for name in PLACE_FILES)
    if first is None or second is None:
        return None
    newer, older = (first, 1) if first.number > second.number else (second, 0)
    return newer if newer.other == _stat(folder / PLACE_FILES[older]) else None


def begin_place(folder: Path, rows: int) -> LedgerPlace:
    """Write both files with a new token.

    Raises StorageFull, StorageUnavailable.
    """
    place = LedgerPlace(number=1, token=secrets.token_hex(16), rows=rows, other=_UNKNOWN)
    for name in PLACE_FILES:
        # A kill between the two leaves no pair: the first one does not know the other one.
        (folder / name).unlink(missing_ok=True)
    _write(folder / PLACE_FILES[1], place)
    return count_rows(folder, place, rows)


def count_rows(folder: Path, place: LedgerPlace, rows: int) -> LedgerPlace:
    """Replace the older file by one with the rows of the ledgers, after the transaction that appended one.

    Raises StorageFull, StorageUnavailable.
    """
    newer, older = PLACE_FILES[place.number % 2], PLACE_FILES[1 - place.number % 2]
    counted = replace(place, number=place.number + 1, rows=rows, other=_stat(folder / newer))
    _write(folder / older, counted)
    return counted


def _write(path: Path, place: LedgerPlace) -> None:
    write_file(path, f"{json.dumps(asdict(place))}\n".encode())


def _read(path: Path) -> LedgerPlace | None:
    """Return what a file has, or None if it is missing or damaged."""
    try:
        fields = json.loads(path.read_bytes())
        number, rows, (inode, changed) = int(fields["number"]), int(fields["rows"]), fields["other"]
        return LedgerPlace(number=number, token=str(fields["token"]), rows=rows, other=(int(inode), int(changed)))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _stat(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_ino, stat.st_ctime_ns
