"""Blobs: Chunks of Bundles and Versions in a folder, each under its SHA-256.

A blob is written aside, synced and renamed, so a name in the folder always has all its bytes. Writing the same
blob twice, also from two threads or processes, is harmless.

A disk or a person can damage a blob later. A reader never gets damaged bytes: ``read`` compares them with their name,
logs the damage once and raises Corrupted. ``missing`` reports a damaged blob as missing, and ``put`` replaces it, so
an operator repairs a Bundle or a Version by publishing the same content again.
"""

import hashlib
import logging
import os
import secrets
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Final

from fanin.edge.tensors import sha256_hex
from fanin.protos.chunks import CHUNK_BYTES, Artifact, ChunkRef, assemble, check_sha256, short
from fanin.protos.errors import Corrupted, InvalidInput, NotFound
from fanin.server.storage.disk import Disk, OwnEntries, full_disk_as_our_error, make_folder

LOG = logging.getLogger("fanin.server.storage.blobs")
MAX_KNOWN: Final = 100_000
"""Most blobs whose state is remembered, some 20 MB; more are verified at each read."""
_DRAFT: Final = ".new"
_FOLDER_NAME: Final = "[0-9a-f]{2}"
_BLOB_NAME: Final = r"[0-9a-f]{64}(\.[0-9a-f]{8}\.new)?"

_State = tuple[int, int, int]
"""Inode, size in bytes and time of the last change in ns; every write to a file changes it."""


class Blobs:
    """Chunks in a folder; two letters of the digest make a sub-folder, so that none holds millions."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        # Sub-folders whose names are durable.
        self._synced: set[Path] = set()
        # Blobs that this process has verified, with the state of their files then, and those that it found damaged.
        self._known: dict[str, _State] = {}
        self._damaged: set[str] = set()
        make_folder(folder, disk)

    def put(self, digest: str, data: bytes) -> None:
        """Store a Chunk, or repair it. Raises InvalidInput if the bytes are not what the name says, StorageFull."""
        check_sha256("chunk", digest)
        got = sha256_hex(data)
        if got != digest:
            raise InvalidInput(f"chunk: digest mismatch (got {short(got)}, expected {short(digest)})")
        with full_disk_as_our_error(f"chunk {short(digest)}"):
            for folder in self._place(digest, data):
                self._disk.sync_folder(folder)

    def put_artifact(self, data: bytes) -> Artifact:
        """Store all Chunks of some bytes."""
        return self.put_pieces((data,))

    def put_pieces(self, pieces: Iterable[bytes]) -> Artifact:
        """Store all Chunks of the bytes that consecutive pieces hold; few of them at a time are in memory.

        While one is written here, the next is made by another thread. Folders are synced once, in the end: the first of
        these syncs takes all new names to the disk, and the others find nothing.
        """
        digest, refs = hashlib.sha256(), []
        folders: dict[Path, None] = {}
        making = _named(_chunks(pieces), digest)
        with ThreadPoolExecutor(1, thread_name_prefix="blobs") as maker:
            made = maker.submit(next, making, None)
            while (found := made.result()) is not None:
                made = maker.submit(next, making, None)
                ref, data = found
                with full_disk_as_our_error(f"chunk {short(ref.sha256)}"):
                    folders.update(dict.fromkeys(self._place(ref.sha256, data)))
                refs.append(ref)
        size_bytes = sum(ref.size_bytes for ref in refs)
        artifact = Artifact(sha256=digest.hexdigest(), size_bytes=size_bytes, chunks=tuple(refs))
        with full_disk_as_our_error(f"artifact {short(artifact.sha256)}"):
            for folder in folders:
                self._disk.sync_folder(folder)
        return artifact

    def pieces(self, what: str, artifact: Artifact) -> Iterator[bytes]:
        """An Artifact's Chunks in order, each verified. Raises NotFound, Corrupted."""
        for index, ref in enumerate(artifact.chunks):
            piece = self._load(ref.sha256)
            self._check(ref.sha256, piece)
            if len(piece) != ref.size_bytes:
                raise Corrupted(f"blobs: {what}: chunk {index}: got {len(piece)} bytes, expected {ref.size_bytes}")
            yield piece

    def read(self, digest: str, offset: int = 0) -> bytes:
        """A Chunk from an offset on, verified. Raises NotFound, Corrupted; InvalidInput for an offset beyond its end.

        A file that has not changed since this process verified it is not hashed again.
        """
        check_sha256("chunk", digest)
        with self._open(digest) as file:
            state = _state_of(os.fstat(file.fileno()))
            if self._known.get(digest) != state:
                self._check(digest, file.read())
                self._remember(digest, state)
            size = state[1]
            if not 0 <= offset <= size:
                raise InvalidInput(f"chunk {short(digest)}: got offset {offset}, expected 0 to {size}")
            file.seek(offset)
            return file.read()

    def read_artifact(self, what: str, artifact: Artifact) -> bytes:
        """All bytes of an Artifact, verified. Raises NotFound, Corrupted."""
        try:
            return assemble(what, artifact, self._load)
        except InvalidInput as exc:
            for ref in artifact.chunks:
                self._check(ref.sha256, self._load(ref.sha256))
            raise Corrupted(f"blobs: {exc}") from exc

    def missing(self, digests: Iterable[str]) -> tuple[str, ...]:
        """Those of the digests that are not stored here, or whose bytes are damaged."""
        digests = tuple(digests)
        for digest in digests:
            check_sha256("chunk", digest)
        return tuple(digest for digest in digests if not self._is_intact(digest))

    def sweep(self) -> None:
        """Remove the drafts of a process that died while it wrote them. Only for the one that serves from the folder,
        before it serves."""
        folders, blobs = OwnEntries(_FOLDER_NAME, are_folders=True), OwnEntries(_BLOB_NAME)
        for folder in folders.of(self._folder):
            for path in blobs.of(folder):
                if path.suffix == _DRAFT:
                    path.unlink(missing_ok=True)

    def _path(self, digest: str) -> Path:
        return self._folder / digest[:2] / digest

    def _place(self, digest: str, data: bytes) -> tuple[Path, ...]:
        """Give durable bytes their name; the folders that must be synced before anybody is told of it."""
        path = self._path(digest)
        if not path.exists():
            self._write(path, data)
            return (path.parent,)
        # Compared: it may be damaged, or cut short by a power cut that came before it was durable.
        if path.read_bytes() != data:
            LOG.warning("blobs: chunk %s: was damaged on disk and is replaced", short(digest))
            self._write(path, data)
            self._damaged.discard(digest)
            return (path.parent,)
        # It may be another's who died, or has not come, before it was durable; if it is, all of this is quick.
        with path.open("rb") as file:
            self._disk.sync_file(file.fileno())
        return (path.parent, self._folder)

    def _open(self, digest: str) -> BinaryIO:
        try:
            return self._path(digest).open("rb")
        except FileNotFoundError as exc:
            raise NotFound(f"chunk {short(digest)}: not stored here") from exc

    def _load(self, digest: str) -> bytes:
        """The bytes of a blob as they are on disk."""
        with self._open(digest) as file:
            return file.read()

    def _check(self, digest: str, data: bytes) -> None:
        """Raise Corrupted if a blob's bytes are damaged, and log it the first time."""
        got = sha256_hex(data)
        if got == digest:
            return
        text = f"blobs: chunk {short(digest)}: damaged on disk (got {len(data)} bytes with digest {short(got)})"
        if digest not in self._damaged:
            self._damaged.add(digest)
            LOG.error("%s; publish its bundle or version again, or restore %s", text, self._path(digest))
        raise Corrupted(text)

    def _is_intact(self, digest: str) -> bool:
        try:
            self._check(digest, self._load(digest))
        except (NotFound, Corrupted):
            return False
        return True

    def _remember(self, digest: str, state: _State) -> None:
        if digest in self._known or len(self._known) < MAX_KNOWN:
            self._known[digest] = state

    def _write(self, path: Path, data: bytes) -> None:
        if path.parent not in self._synced:
            make_folder(path.parent, self._disk)
            self._synced.add(path.parent)
        draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_DRAFT}")
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                self._disk.sync_file(file.fileno())
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        self._remember(path.name, _state_of(path.stat()))


def _state_of(stat: os.stat_result) -> _State:
    # The time of the last change of the inode: unlike that of the last write no program can set it.
    return stat.st_ino, stat.st_size, stat.st_ctime_ns


def _chunks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes, cut as Chunks are."""
    held = bytearray()
    for piece in pieces:
        held += piece
        while len(held) >= CHUNK_BYTES:
            yield bytes(held[:CHUNK_BYTES])
            del held[:CHUNK_BYTES]
    if held:
        yield bytes(held)


def _named(chunks: Iterable[bytes], whole: "hashlib._Hash") -> Iterator[tuple[ChunkRef, bytes]]:
    """Each with its name; ``whole`` is told of all."""
    for data in chunks:
        whole.update(data)
        yield ChunkRef(sha256=sha256_hex(data), size_bytes=len(data)), data
