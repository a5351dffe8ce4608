"""Where the files of public data come from: a folder of the user's, a cache, the system's package, or a mirror.

Order of search, for each file of a data set:

1. the folder that the variable FANIN_DATA names, in ``<data set>/<file>``; if it is set, nothing else is looked at
2. the cache, ``$XDG_CACHE_HOME/fanin`` or ``~/.cache/fanin``
3. the folder of the system's package
4. the official mirror, into the cache

What did not come from the user's own folder must have the SHA-256 written here, which is that of the unpacked
content: packers differ in what they write around it.
"""

import gzip
import http.client
import os
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fanin.edge.tensors import sha256_hex
from fanin.protos.errors import InvalidInput, StorageFull

DATA_VARIABLE: Final = "FANIN_DATA"
TIMEOUT_S: Final = 30.0
"""For the mirror to answer, and between any two pieces of a file."""
MAX_UNPACKED_BYTES: Final = 1 << 28
"""Most that a file in the user's folder may unpack to: five times the largest that is known here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A file of a data set: name, the mirror's address, and what it unpacks to if it is a ``.gz`` file, or holds."""

    name: str
    url: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """Files that belong together; ``package`` is the folder in which a system's package keeps them."""

    name: str
    files: tuple[DataFile, ...]
    package: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where to look. ``data`` is the user's folder; ``fetch(url, max_bytes)`` raises OSError or HTTPException."""

    data: Path | None
    cache: Path
    fetch: Callable[[str, int], bytes]


def places_from(environ: Mapping[str, str]) -> Places:
    """The places that an environment names."""
    data, cache = environ.get(DATA_VARIABLE, ""), environ.get("XDG_CACHE_HOME", "")
    return Places(
        data=Path(data) if data else None,
        cache=(Path(cache) if cache else Path.home() / ".cache") / "fanin",
        fetch=fetch_url,
    )


def fetch_url(url: str, max_bytes: int) -> bytes:
    """What an address holds, cut off one byte after ``max_bytes``."""
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
        data: bytes = response.read(max_bytes + 1)
    return data


def read_files(places: Places, wanted: DataSet) -> Iterator[bytes]:
    """The unpacked content of each file of a data set, one at a time. Raises InvalidInput, StorageFull."""
    for file in wanted.files:
        if places.data is not None:
            yield _read_own(places.data, wanted, file)
        else:
            yield _read_found(places, wanted, file) or _download(places, wanted, file)


def _read_own(folder: Path, wanted: DataSet, file: DataFile) -> bytes:
    path = folder / wanted.name / file.name
    if not path.is_file():
        raise InvalidInput(f"{path}: no such file, but {DATA_VARIABLE} names that folder; {_advice(wanted)}")
    return _unpack(path, MAX_UNPACKED_BYTES)


def _read_found(places: Places, wanted: DataSet, file: DataFile) -> bytes | None:
    """What the cache or the system's package has; None if neither has it as it should be."""
    for folder in (places.cache / wanted.name, wanted.package):
        if folder is not None and (folder / file.name).is_file():
            try:
                return _checked(folder / file.name, file)
            except InvalidInput:
                # Damaged, or another edition: the next place may have it right, and the mirror replaces the cache's.
                continue
    return None


def _download(places: Places, wanted: DataSet, file: DataFile) -> bytes:
    """Fetch a file into the cache; it gets its name only when it is whole and right."""
    try:
        # No packed form is longer than what it unpacks to.
        data = places.fetch(file.url, file.size_bytes)
    except (OSError, http.client.HTTPException) as exc:
        raise InvalidInput(
            f"{wanted.name}: no good {file.name} on this machine, and {file.url} cannot be fetched "
            f"({type(exc).__name__}: {exc}); {_advice(wanted)}"
        ) from exc
    folder = places.cache / wanted.name
    draft: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=file.name, delete=False) as written:
            draft = Path(written.name)
            written.write(data)
        content = _checked(draft, file, called=file.url)
        draft.replace(folder / file.name)
    except OSError as exc:
        raise StorageFull(f"{folder}: cannot be written ({exc}); set XDG_CACHE_HOME to a folder that can") from exc
    finally:
        if draft is not None:
            draft.unlink(missing_ok=True)
    return content


def _checked(path: Path, file: DataFile, called: str = "") -> bytes:
    content = _unpack(path, file.size_bytes, called)
    if sha256_hex(content) != file.sha256:
        raise InvalidInput(f"{called or path}: got SHA-256 {sha256_hex(content)} unpacked, expected {file.sha256}")
    return content


def _unpack(path: Path, max_bytes: int, called: str = "") -> bytes:
    """The content of a plain or a ``.gz`` file. Raises InvalidInput if it is longer, or is no gzip file."""
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as packed:
            content = packed.read(max_bytes + 1)
    except (OSError, EOFError, zlib.error) as exc:
        raise InvalidInput(f"{called or path}: cannot be read ({exc})") from exc
    if len(content) > max_bytes:
        raise InvalidInput(f"{called or path}: unpacks to more than {max_bytes} bytes, expected no more")
    return content


def _advice(wanted: DataSet) -> str:
    files = ", ".join(f"{file.name} ({file.sha256})" for file in wanted.files)
    return (
        f"put the files into FOLDER/{wanted.name} and set {DATA_VARIABLE} to FOLDER; they come from "
        f"{wanted.files[0].url.rpartition('/')[0]}; name (SHA-256 of the unpacked content): {files}"
    )


def default_places() -> Places:
    """The places that this process's environment names."""
    return places_from(os.environ)
