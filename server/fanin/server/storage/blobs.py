"""Blobs: Chunks of Bundles and Versions in a folder, each under its SHA-256.

A blob is written to a draft, synced and renamed, so a file under its final name is always complete. Writing the same
blob twice is safe, even from two threads or processes.

A disk or a person can damage a blob later: its bytes change, cannot be read, or a folder has its name. A reader never
receives damaged bytes: ``read`` compares them with their digest, logs the damage once and raises Corrupted. ``missing``
reports a damaged blob as missing, and ``put`` replaces it. So an operator repairs a Bundle or a Version by publishing
the same content again.
"""

import errno
import hashlib
import logging
import os
import secrets
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import BinaryIO, Final

from fanin.edge.tensors import sha256_hex
from fanin.protos.chunks import CHUNK_BYTES, Artifact, ChunkRef, assemble, check_sha256, short
from fanin.protos.errors import Corrupted, InvalidInput, NotFound
from fanin.server.storage.disk import Disk, OwnEntries, disk_errors, make_folder

LOG = logging.getLogger("fanin.server.storage.blobs")
MAX_KNOWN: Final = 100_000
"""Blobs whose state is remembered, in some 20 MB. Further blobs are verified at each read."""
MAX_DRAFTS: Final = 16
"""Files of one Artifact that are open, and synced together, at a time."""
_UNREADABLE: Final = frozenset({errno.EIO, errno.EISDIR})
"""Errors of a file that a repetition does not repair: a bad sector, and a folder of this name."""
_DRAFT: Final = ".new"
_FOLDER_NAME: Final = "[0-9a-f]{2}"
_BLOB_NAME: Final = r"[0-9a-f]{64}(\.[0-9a-f]{8}\.new)?"

_State = tuple[int, int, int]
"""Inode, size in bytes, and time of the last change in ns. Every write to a file changes the state."""


class FolderBlobs:
    """Chunks in a folder. The first two letters of the digest name a subfolder, so that none has millions of files."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        # Subfolders whose names are durable.
        self._synced: set[Path] = set()
        # Blobs that this process has verified, with the state of their files at that time, and damaged blobs.
        self._known: dict[str, _State] = {}
        self._damaged: set[str] = set()
        # Held while the age of a blob changes, and while an old one is removed.
        self._aging = Lock()
        make_folder(folder, disk)

    def put(self, digest: str, data: bytes) -> None:
        """Store a Chunk, or repair it. Raises InvalidInput if the digest is wrong, StorageFull."""
        check_sha256("chunk", digest)
        actual = sha256_hex(data)
        if actual != digest:
            raise InvalidInput(
                f"chunk: digest mismatch (got {short(actual)}, expected {short(digest)})", code="FN-0117"
            )
        with disk_errors(f"chunk {short(digest)}"), _Drafts(self._disk) as drafts:
            folders = self._place(digest, data, drafts)
            self._settle(drafts)
            for folder in folders:
                self._disk.sync_folder(folder)

    def put_pieces(self, pieces: Iterable[bytes]) -> Artifact:
        """Store bytes that arrive in consecutive pieces as Chunks. Only a few Chunks are in memory at a time.

        While one Chunk is written, another thread computes the next one. Files are synced together, and folders once at
        the end: a sync takes some ms, and the file system does many at a time.
        """
        digest, refs = hashlib.sha256(), []
        folders: dict[Path, None] = {}
        chunks = named(cut(pieces), digest)
        with ThreadPoolExecutor(1, thread_name_prefix="blobs") as thread, _Drafts(self._disk) as drafts:
            upcoming = thread.submit(next, chunks, None)
            while (chunk := upcoming.result()) is not None:
                upcoming = thread.submit(next, chunks, None)
                ref, data = chunk
                with disk_errors(f"chunk {short(ref.sha256)}"):
                    folders.update(dict.fromkeys(self._place(ref.sha256, data, drafts)))
                    if len(drafts.files) == MAX_DRAFTS:
                        self._settle(drafts)
                refs.append(ref)
            size_bytes = sum(ref.size_bytes for ref in refs)
            artifact = Artifact(sha256=digest.hexdigest(), size_bytes=size_bytes, chunks=tuple(refs))
            with disk_errors(f"artifact {short(artifact.sha256)}"):
                self._settle(drafts)
                self._disk.sync_all(tuple(folders))
        return artifact

    def pieces(self, what: str, artifact: Artifact) -> Iterator[bytes]:
        """Yield the verified Chunks of an Artifact in order. Raises NotFound, Corrupted."""
        for index, ref in enumerate(artifact.chunks):
            piece = self.read(ref.sha256)
            if len(piece) != ref.size_bytes:
                raise Corrupted(
                    f"blobs: {what}: chunk {index}: got {len(piece)} bytes, expected {ref.size_bytes}", code="FN-0521"
                )
            yield piece

    def read(self, digest: str, offset: int = 0, size_bytes: int = -1) -> bytes:
        """Return a verified Chunk from an offset on, or at most ``size_bytes`` of it.

        A file that has not changed since this process verified it is not hashed again.

        Raises:
            NotFound: The Chunk is not stored here.
            Corrupted: The Chunk is damaged.
            InvalidInput: The offset is beyond the end of the Chunk.
        """
        check_sha256("chunk", digest)
        with self._readable(digest), self._open(digest) as file:
            size = self._verify(digest, file)
            if not 0 <= offset <= size:
                raise InvalidInput(f"chunk {short(digest)}: got offset {offset}, expected 0 to {size}", code="FN-0120")
            file.seek(offset)
            return file.read(size_bytes)

    def read_artifact(self, what: str, artifact: Artifact) -> bytes:
        """Return all bytes of an Artifact, verified. Raises NotFound, Corrupted."""
        try:
            return assemble(what, artifact, self._load)
        except InvalidInput as exc:
            for ref in artifact.chunks:
                self._check(ref.sha256, self._load(ref.sha256))
            raise Corrupted(f"blobs: {exc}", code="FN-0521") from exc

    def missing(self, digests: Iterable[str]) -> tuple[str, ...]:
        """Return those of the digests whose Chunks are not stored here, or are damaged."""
        # Each digest once: the file of a Chunk may have to be hashed.
        digests = tuple(dict.fromkeys(digests))
        for digest in digests:
            check_sha256("chunk", digest)
        lacking = tuple(digest for digest in digests if not self._is_intact(digest))
        self.renew(set(digests).difference(lacking))
        return lacking

    def renew(self, digests: Iterable[str]) -> None:
        """Keep stored blobs from ``remove_older`` for a while."""
        for digest in digests:
            self._renew(digest)

    def older_than(self, before_s: float) -> set[str]:
        """Return the digests of the blobs that were neither stored nor renewed since a wall time."""
        folders, blobs = OwnEntries(_FOLDER_NAME, are_folders=True), OwnEntries(_BLOB_NAME)
        paths = (path for folder in folders.of(self._folder) for path in blobs.of(folder))
        return {path.name for path in paths if not path.suffix and path.is_file() and _is_older(path, before_s)}

    def stored(self, digests: Iterable[str]) -> set[str]:
        """Return those of these blobs that are stored, intact or not."""
        return {digest for digest in digests if self._path(digest).exists()}

    def remove_older(self, digests: Iterable[str], before_s: float) -> int:
        """Remove those of these blobs that were neither stored nor renewed since a wall time. Returns their number."""
        num_removed = 0
        for digest in digests:
            path = self._path(digest)
            with self._aging:
                if _is_older(path, before_s):
                    path.unlink(missing_ok=True)
                    self._known.pop(digest, None)
                    num_removed += 1
        return num_removed

    def sweep(self) -> None:
        """Remove the drafts of a process that died while it wrote them.

        Only the coordinator of the folder may call this, before it serves.
        """
        folders, blobs = OwnEntries(_FOLDER_NAME, are_folders=True), OwnEntries(_BLOB_NAME)
        for folder in folders.of(self._folder):
            for path in blobs.of(folder):
                if path.suffix == _DRAFT:
                    path.unlink(missing_ok=True)

    def _path(self, digest: str) -> Path:
        return self._folder / digest[:2] / digest

    def _place(self, digest: str, data: bytes, drafts: "_Drafts") -> tuple[Path, ...]:
        """Write bytes to a draft unless they are stored. Return the folders to sync before the blob is announced."""
        path = self._path(digest)
        if not self._renew(digest):
            self._write(path, data, drafts)
            return (path.parent,)
        # The file may be damaged, or cut short by a power cut before it was durable. So the bytes are compared.
        if not self._has(digest, data):
            LOG.warning("blobs: chunk %s: was damaged on disk and is replaced", short(digest))
            if path.is_dir():
                # Its content is not ours. A file cannot replace it.
                path.rename(path.with_name(f"{path.name}.{secrets.token_hex(4)}.moved"))
            self._write(path, data, drafts)
            self._damaged.discard(digest)
            return (path.parent,)
        # Another process may have written the file and not synced it. If it is durable already, this sync is quick.
        with path.open("rb") as file:
            self._disk.sync_file(file.fileno())
        return (path.parent, self._folder)

    def _has(self, digest: str, data: bytes) -> bool:
        try:
            return self._load(digest) == data
        except Corrupted:
            return False

    def _open(self, digest: str) -> BinaryIO:
        try:
            return self._path(digest).open("rb")
        except FileNotFoundError as exc:
            raise NotFound(f"chunk {short(digest)}: not stored here", code="FN-0520") from exc

    def _verify(self, digest: str, file: BinaryIO) -> int:
        """Return the size of a blob, and hash its file if that changed since it was verified. Raises Corrupted."""
        state = _state_of(os.fstat(file.fileno()))
        if self._known.get(digest) != state:
            self._check(digest, file.read())
            self._remember(digest, state)
        return state[1]

    def _renew(self, digest: str) -> bool:
        """Set the age of a blob to 0. Return whether it is stored."""
        path = self._path(digest)
        with self._aging:
            try:
                before = _state_of(path.stat())
                os.utime(path)
                # The time of the last change is part of the state, and the bytes are the same.
                if self._known.get(digest) == before:
                    self._known[digest] = _state_of(path.stat())
            except (FileNotFoundError, NotADirectoryError):
                return False
        return True

    def _load(self, digest: str) -> bytes:
        """Return the bytes of a blob from the disk, without verification."""
        with self._readable(digest), self._open(digest) as file:
            return file.read()

    @contextmanager
    def _readable(self, digest: str) -> Iterator[None]:
        """Raise Corrupted in place of the error of a file that cannot be read."""
        try:
            yield
        except OSError as exc:
            if exc.errno not in _UNREADABLE:
                raise
            raise self._damage(digest, exc.strerror or type(exc).__name__) from exc

    def _check(self, digest: str, data: bytes) -> None:
        """Raise Corrupted if a blob's bytes are damaged, and log it the first time."""
        actual = sha256_hex(data)
        if actual != digest:
            raise self._damage(digest, f"got {len(data)} bytes with digest {short(actual)}")

    def _damage(self, digest: str, problem: str) -> Corrupted:
        """Return the error for a damaged blob, and log it the first time."""
        text = f"blobs: chunk {short(digest)}: damaged on disk ({problem})"
        if digest not in self._damaged:
            self._damaged.add(digest)
            LOG.error("%s; publish its bundle or version again, or restore %s", text, self._path(digest))
        return Corrupted(text, code="FN-0521")

    def _is_intact(self, digest: str) -> bool:
        try:
            with self._readable(digest), self._open(digest) as file:
                self._verify(digest, file)
        except (NotFound, Corrupted):
            return False
        return True

    def _remember(self, digest: str, state: _State) -> None:
        if digest in self._known or len(self._known) < MAX_KNOWN:
            self._known[digest] = state

    def _write(self, path: Path, data: bytes, drafts: "_Drafts") -> None:
        if path.parent not in self._synced:
            make_folder(path.parent, self._disk)
            self._synced.add(path.parent)
        drafts.write(path, data)

    def _settle(self, drafts: "_Drafts") -> None:
        """Give durable drafts their final names."""
        for path in drafts.settle():
            self._remember(path.name, _state_of(path.stat()))


class _Drafts:
    """Files that are written and neither durable nor under their final name. Leaving the context removes them."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.files: list[tuple[Path, Path, BinaryIO]] = []

    def __enter__(self) -> "_Drafts":
        return self

    def __exit__(self, *_exception: object) -> None:
        for _, draft, file in self.files:
            with suppress(OSError):
                file.close()
            draft.unlink(missing_ok=True)

    def write(self, path: Path, data: bytes) -> None:
        """Write a draft of a file."""
        draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_DRAFT}")
        file = draft.open("wb")
        self.files.append((path, draft, file))
        file.write(data)
        file.flush()

    def settle(self) -> Iterator[Path]:
        """Make the drafts durable, then yield each under its final name."""
        self._disk.sync_all([file.fileno() for _, _, file in self.files])
        while self.files:
            path, draft, file = self.files[0]
            file.close()
            draft.replace(path)
            del self.files[0]
            yield path


def _is_older(path: Path, before_s: float) -> bool:
    try:
        return path.stat().st_mtime < before_s
    except FileNotFoundError:
        return False


def _state_of(stat: os.stat_result) -> _State:
    # The time of the last change of the inode: no program can set it, unlike the time of the last write.
    return stat.st_ino, stat.st_size, stat.st_ctime_ns


def cut(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the bytes of consecutive pieces in the size of Chunks."""
    buffered = bytearray()
    for piece in pieces:
        buffered += piece
        while len(buffered) >= CHUNK_BYTES:
            yield bytes(buffered[:CHUNK_BYTES])
            del buffered[:CHUNK_BYTES]
    if buffered:
        yield bytes(buffered)


def named(chunks: Iterable[bytes], total: "hashlib._Hash") -> Iterator[tuple[ChunkRef, bytes]]:
    """Yield each Chunk with its reference, and add its bytes to the digest ``total``."""
    for data in chunks:
        total.update(data)
        yield ChunkRef(sha256=sha256_hex(data), size_bytes=len(data)), data
