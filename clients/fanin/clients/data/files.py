"""The files of public data sets: a user's folder, a cache, a system package, or the official mirror.

Order of search for each file:

1. ``<data set>/<file>`` in the folder that the variable FANIN_DATA names. If it is set, the search ends here.
2. The cache, ``$XDG_CACHE_HOME/fanin`` or ``~/.cache/fanin``.
3. The folder of a system package.
4. The official mirror; the download is stored in the cache.

A file from places 2 to 4 must have the SHA-256 of its data set here. The digest is that of the unpacked content,
because packers write different headers.
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
"""Seconds until the mirror must answer, and between two pieces of a file."""
MAX_UNPACKED_BYTES: Final = 1 << 28
"""Limit of a file in the user's folder, unpacked: five times the largest known file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A file of a data set: name, address on the mirror, and size and digest of its unpacked content."""

    name: str
    url: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """The files of a data set. ``package`` is the folder of a system package with these files."""

    name: str
    files: tuple[DataFile, ...]
    package: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The places of the search.

    ``data`` is the user's folder. ``fetch(url, max_bytes)`` raises OSError or HTTPException.
    """

    data: Path | None
    cache: Path
    fetch: Callable[[str, int], bytes]


def places_from(environ: Mapping[str, str]) -> Places:
    """Return the places that an environment names."""
    data, cache = environ.get(DATA_VARIABLE, ""), environ.get("XDG_CACHE_HOME", "")
    return Places(
        data=Path(data) if data else None,
        cache=(Path(cache) if cache else Path.home() / ".cache") / "fanin",
        fetch=fetch_url,
    )


def fetch_url(url: str, max_bytes: int) -> bytes:
    """Return the content of an address, truncated one byte after ``max_bytes``."""
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
        data: bytes = response.read(max_bytes + 1)
    return data


def read_files(places: Places, data_set: DataSet) -> Iterator[bytes]:
    """Yield the unpacked content of each file of a data set. Raises InvalidInput, StorageFull."""
    for file in data_set.files:
        if places.data is not None:
            yield _read_own(places.data, data_set, file)
        else:
            yield _read_installed(places, data_set, file) or _download(places, data_set, file)


def _read_own(folder: Path, data_set: DataSet, file: DataFile) -> bytes:
    path = folder / data_set.name / file.name
    if not path.is_file():
        raise InvalidInput(
            f"{path}: no such file, but {DATA_VARIABLE} names that folder; {_advice(data_set)}", code="FN-0861"
        )
    return _unpack(path, MAX_UNPACKED_BYTES)


def _read_installed(places: Places, data_set: DataSet, file: DataFile) -> bytes | None:
    """Return the file from the cache or the system package; None if neither has an intact copy."""
    for folder in (places.cache / data_set.name, data_set.package):
        if folder is not None and (folder / file.name).is_file():
            try:
                return _checked(folder / file.name, file)
            except InvalidInput:
                # Damaged, or another edition: the next place may be intact, and a download replaces the cache.
                continue
    return None


def _download(places: Places, data_set: DataSet, file: DataFile) -> bytes:
    """Download a file into the cache; it gets its name only when it is complete and verified."""
    try:
        # The packed form is never longer than the unpacked content.
        data = places.fetch(file.url, file.size_bytes)
    except (OSError, http.client.HTTPException) as exc:
        raise InvalidInput(
            f"{data_set.name}: no valid {file.name} on this machine, and {file.url} cannot be fetched "
            f"({type(exc).__name__}: {exc}); {_advice(data_set)}",
            code="FN-0861",
        ) from exc
    folder = places.cache / data_set.name
    draft: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=file.name, delete=False) as temporary:
            draft = Path(temporary.name)
            temporary.write(data)
        content = _checked(draft, file, called=file.url)
        draft.replace(folder / file.name)
    except OSError as exc:
        raise StorageFull(
            f"{folder}: cannot be written ({exc}); set XDG_CACHE_HOME to a folder that can", code="FN-0863"
        ) from exc
    finally:
        if draft is not None:
            draft.unlink(missing_ok=True)
    return content


def _checked(path: Path, file: DataFile, called: str = "") -> bytes:
    content = _unpack(path, file.size_bytes, called)
    if sha256_hex(content) != file.sha256:
        raise InvalidInput(
            f"{called or path}: got SHA-256 {sha256_hex(content)} unpacked, expected {file.sha256}", code="FN-0864"
        )
    return content


def _unpack(path: Path, max_bytes: int, called: str = "") -> bytes:
    """Return the content of a plain or ``.gz`` file. Raises InvalidInput if it is too long or damaged."""
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as packed:
            content = packed.read(max_bytes + 1)
    except (OSError, EOFError, zlib.error) as exc:
        raise InvalidInput(f"{called or path}: cannot be read ({exc})", code="FN-0864") from exc
    if len(content) > max_bytes:
        raise InvalidInput(
            f"{called or path}: unpacks to more than {max_bytes} bytes, expected no more", code="FN-0864"
        )
    return content


def _advice(data_set: DataSet) -> str:
    files = ", ".join(f"{file.name} ({file.sha256})" for file in data_set.files)
    return (
        f"put the files into FOLDER/{data_set.name} and set {DATA_VARIABLE} to FOLDER; they come from "
        f"{data_set.files[0].url.rpartition('/')[0]}; name (SHA-256 of the unpacked content): {files}"
    )


def default_places() -> Places:
    """Return the places that this process's environment names."""
    return places_from(os.environ)
