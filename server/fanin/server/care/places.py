"""Where a backup is stored: a folder, or a prefix of an object store by its URL.

Objects of a store appear whole or not at all, so only a folder needs drafts and syncs. Stores are reached by fsspec,
whose package for the protocol of the URL the user installs (``fanin[backup]`` has that of S3). Endpoints, credentials
and certificates are those of the environment, as the tools of each store read them.

Reference:
    https://filesystem-spec.readthedocs.io/en/latest/
"""

import errno
import hashlib
import os
import shutil
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Protocol
from urllib.parse import unquote, urlsplit

from fanin.edge.files import held, sync_folder
from fanin.protos.errors import InvalidInput, RuntimeMissing, StorageUnavailable, Untrusted
from fanin.server.storage.disk import disk_errors, write_file

_READ_BYTES: Final = 1 << 20


class BackupPlace(Protocol):
    """Where the files of a backup are."""

    def held(self) -> AbstractContextManager[Path]:
        """Use the place alone within this context, as far as the place can ensure that. Return a folder for drafts."""
        ...

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file by its path."""
        ...

    def put(self, source: Path, path: str, sha256: str) -> bool:
        """Store a file durably if it has this digest. Return whether it has."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Replace a small file at once."""
        ...

    def read(self, path: str) -> bytes | None:
        """Return a small file, None without one."""
        ...

    def digest(self, path: str) -> str:
        """Read a file and return the digest of its content, "" if there is none or it cannot be read."""
        ...

    def fetch(self, path: str, target: Path) -> str:
        """Copy a file to this machine and return the digest of what was written, "" without the file."""
        ...

    def remove(self, paths: list[str]) -> None:
        """Remove files."""
        ...


def place_of(text: str) -> "FolderPlace | ObjectPlace":
    """Return the place of a path or a URL.

    Raises:
        InvalidInput: The URL has no path, or no package knows its protocol.
        RuntimeMissing: The package for its protocol is not installed.
    """
    if "://" not in text:
        return FolderPlace(folder=Path(text))
    url = urlsplit(text)
    if url.scheme == "file":
        if url.netloc not in ("", "localhost") or not url.path.strip("/"):
            raise InvalidInput(f"backup {text}: expected file:///FOLDER, with three slashes", code="FN-1449")
        return FolderPlace(folder=Path(unquote(url.path)))
    if url.username or url.password:
        raise InvalidInput(
            f"backup {url.scheme}://...: has a password, which logs and lists of processes would show; give "
            "credentials by the environment",
            code="FN-1449",
        )
    if not url.netloc:
        raise InvalidInput(f"backup {text}: got no bucket, expected {url.scheme}://BUCKET/PREFIX", code="FN-1449")
    return ObjectPlace(text.rstrip("/"))


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderPlace:
    """A folder of this machine."""

    folder: Path

    def __str__(self) -> str:
        return str(self.folder)

    @contextmanager
    def held(self) -> Iterator[Path]:
        """See BackupPlace."""
        with held(self.folder, "wait for it, or back up to another folder", mode=0o700), disk_errors(str(self.folder)):
            drafts = self.folder / "database"
            drafts.mkdir(exist_ok=True, mode=0o700)
            yield drafts

    def sizes(self) -> dict[str, int]:
        """See BackupPlace."""
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): path.stat().st_size for path in files}

    def put(self, source: Path, path: str, sha256: str) -> bool:
        """See BackupPlace."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = target.with_name(f"{target.name}.draft")
        if copy_file(source, draft) != sha256:
            draft.unlink(missing_ok=True)
            return False
        draft.replace(target)
        for folder in (target.parent, target.parent.parent):
            sync_folder(folder)
        return True

    def write(self, path: str, data: bytes) -> None:
        """See BackupPlace."""
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_file(self.folder / path, data)

    def read(self, path: str) -> bytes | None:
        """See BackupPlace."""
        file = self.folder / path
        return file.read_bytes() if file.is_file() else None

    def digest(self, path: str) -> str:
        """See BackupPlace."""
        return file_digest(self.folder / path)

    def fetch(self, path: str, target: Path) -> str:
        """See BackupPlace."""
        return copy_file(self.folder / path, target)

    def remove(self, paths: list[str]) -> None:
        """See BackupPlace."""
        for path in paths:
            (self.folder / path).unlink(missing_ok=True)
        for folder in sorted((self.folder / "updates").glob("*/*"), reverse=True):
            if not any(folder.iterdir()):
                shutil.rmtree(folder)


class ObjectPlace:
    """A prefix of an object store."""

    def __init__(self, url: str) -> None:
        """Connect to the store of a URL, on first use."""
        self._url = url
        try:
            from fsspec.core import url_to_fs

            # A listing or a connection of before would hide what has changed since.
            self._store, self._root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as exc:
            raise RuntimeMissing(
                f"backup {url}: {exc}; run: pip install 'fanin[backup]' for s3://, or the package of fsspec for "
                "another store",
                code="FN-1452",
            ) from exc
        except ValueError as exc:
            raise InvalidInput(
                f"backup {url}: {exc}; give a folder, file:///FOLDER or s3://BUCKET/PREFIX", code="FN-1449"
            ) from exc

    def __str__(self) -> str:
        return self._url

    @contextmanager
    def held(self) -> Iterator[Path]:
        """See BackupPlace. A store has no lock: ``back_up`` compares the manifest before it removes a file."""
        with tempfile.TemporaryDirectory(prefix="fanin-backup-") as drafts:
            yield Path(drafts)

    def sizes(self) -> dict[str, int]:
        """See BackupPlace."""
        with self._errors():
            try:
                rows = self._store.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
            return {path.removeprefix(f"{self._root}/"): int(row["size"]) for path, row in rows.items()}

    def put(self, source: Path, path: str, sha256: str) -> bool:
        """See BackupPlace. The digest is computed first: a damaged file never replaces a whole one."""
        if file_digest(source) != sha256:
            return False
        with self._errors():
            self._store.put_file(str(source), f"{self._root}/{path}")
        return True

    def write(self, path: str, data: bytes) -> None:
        """See BackupPlace."""
        with self._errors():
            self._store.pipe_file(f"{self._root}/{path}", data)

    def read(self, path: str) -> bytes | None:
        """See BackupPlace."""
        with self._errors():
            try:
                return bytes(self._store.cat_file(f"{self._root}/{path}"))
            except FileNotFoundError:
                return None

    def digest(self, path: str) -> str:
        """See BackupPlace. The object is read: the checksums of stores are not all of the content alone."""
        with self._errors():
            try:
                with self._store.open(f"{self._root}/{path}", "rb") as file:
                    return _digest_of(file)
            except FileNotFoundError:
                return ""

    def fetch(self, path: str, target: Path) -> str:
        """See BackupPlace."""
        with self._errors():
            try:
                self._store.get_file(f"{self._root}/{path}", str(target))
            except FileNotFoundError:
                return ""
        with target.open("rb+") as file:
            os.fsync(file.fileno())
        return file_digest(target)

    def remove(self, paths: list[str]) -> None:
        """See BackupPlace."""
        with self._errors():
            if paths:
                self._store.rm([f"{self._root}/{path}" for path in paths])

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Map the errors of a store."""
        try:
            yield
        except FileNotFoundError as exc:
            raise InvalidInput(
                f"{self._url}: there is no such bucket; create it, or correct the URL", code="FN-1453"
            ) from exc
        except Exception as exc:  # The rim: each package of a store has a tree of errors of its own.
            if problem := _certificate_problem(exc):
                raise Untrusted(
                    f"{self._url}: the certificate of the store does not verify ({problem}); name the PEM file of its "
                    f"authority in the environment, for s3:// AWS_CA_BUNDLE, now {os.environ.get('AWS_CA_BUNDLE')!r}",
                    code="FN-1520",
                ) from exc
            text = f"{type(exc).__name__}: {exc}"[:300]
            raise StorageUnavailable(
                f"{self._url}: cannot be read or written ({text}); check the credentials and the endpoint in the "
                "environment, then repeat the command",
                text,
                code="FN-1453",
            ) from exc


def _certificate_problem(exc: BaseException | None) -> str:
    """Return why TLS has no trusted connection, "" if another cause is at the root of an error."""
    root = ""
    while exc is not None:
        match exc:
            # aiohttp's own errors are of these classes, too, without their attributes.
            case ssl.SSLCertVerificationError(verify_message=str(text)) | ssl.SSLError(reason=str(text)):
                root = text
            case FileNotFoundError(errno=errno.ENOENT):
                root = "no such file of authorities"
        exc = exc.__cause__ or exc.__context__
    return root


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, "" if there is none or it cannot be read."""
    try:
        with path.open("rb") as file:
            return _digest_of(file)
    except OSError:
        return ""


def _digest_of(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while data := file.read(_READ_BYTES):
        digest.update(data)
    return digest.hexdigest()


def copy_file(source: Path, target: Path) -> str:
    """Copy a file durably and return the digest of its content, "" if there is no such file."""
    digest = hashlib.sha256()
    try:
        with source.open("rb") as reader, target.open("wb") as writer:
            while data := reader.read(_READ_BYTES):
                digest.update(data)
                writer.write(data)
            writer.flush()
            os.fsync(writer.fileno())
    except FileNotFoundError:
        return ""
    return digest.hexdigest()
