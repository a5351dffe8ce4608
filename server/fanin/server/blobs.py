"""Blobs: Chunks of Bundles and Versions in a folder, each under its SHA-256.

A blob is written aside, synced and renamed, so a name in the folder always has all its bytes. Writing the same
blob twice, also from two threads or processes, is harmless.
"""

import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from fanin.edge.tensors import sha256_hex
from fanin.protos.chunks import Artifact, artifact_of, assemble, check_sha256, cut, short
from fanin.protos.errors import Corrupted, InvalidInput, NotFound
from fanin.server.disk import Disk, full_disk_as_our_error, make_folder


class Blobs:
    """Chunks in a folder; two letters of the digest make a sub-folder, so that none holds millions."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        # Sub-folders whose names are durable.
        self._synced: set[Path] = set()
        make_folder(folder, disk)

    def put(self, digest: str, data: bytes) -> None:
        """Store a Chunk. Raises InvalidInput if the bytes are not what the name says, StorageFull."""
        check_sha256("chunk", digest)
        got = sha256_hex(data)
        if got != digest:
            raise InvalidInput(f"chunk: digest mismatch (got {short(got)}, expected {short(digest)})")
        path = self._path(digest)
        with full_disk_as_our_error(f"chunk {short(digest)}"):
            if path.exists():
                self._sync(path)
            else:
                self._write(path, data)

    def put_artifact(self, data: bytes) -> Artifact:
        """Store all Chunks of some bytes."""
        for ref, piece in cut(data):
            self.put(ref.sha256, piece)
        return artifact_of(data)

    def read(self, digest: str, offset: int = 0) -> bytes:
        """A Chunk from an offset on. Raises NotFound; InvalidInput for an offset beyond its end."""
        check_sha256("chunk", digest)
        try:
            with self._path(digest).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if not 0 <= offset <= size:
                    raise InvalidInput(f"chunk {short(digest)}: got offset {offset}, expected 0 to {size}")
                file.seek(offset)
                return file.read()
        except FileNotFoundError as exc:
            raise NotFound(f"chunk {short(digest)}: not stored here") from exc

    def read_artifact(self, what: str, artifact: Artifact) -> bytes:
        """All bytes of an Artifact, verified. Raises NotFound, Corrupted."""
        try:
            return assemble(what, artifact, self.read)
        except InvalidInput as exc:
            raise Corrupted(f"blobs: {exc}") from exc

    def missing(self, digests: Iterable[str]) -> tuple[str, ...]:
        """Those of the digests that are not stored here."""
        digests = tuple(digests)
        for digest in digests:
            check_sha256("chunk", digest)
        return tuple(digest for digest in digests if not self._path(digest).exists())

    def _path(self, digest: str) -> Path:
        return self._folder / digest[:2] / digest

    def _sync(self, path: Path) -> None:
        """What is there may be another's who died, or has not come, before it was durable; if it is, this is quick."""
        with path.open("rb") as file:
            self._disk.sync_file(file.fileno())
        self._disk.sync_folder(path.parent)
        self._disk.sync_folder(self._folder)

    def _write(self, path: Path, data: bytes) -> None:
        if path.parent not in self._synced:
            make_folder(path.parent, self._disk)
            self._synced.add(path.parent)
        draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                self._disk.sync_file(file.fileno())
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        self._disk.sync_folder(path.parent)
