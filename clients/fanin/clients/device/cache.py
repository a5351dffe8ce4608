"""What a device keeps on disk: its key, Chunks, the Updates not yet accepted, and the Versions it has seen.

    lock                     held by the process that is this device
    device.key               the Ed25519 key that is this device
    seen.json                {run id: highest Version number}
    served                   the Publication whose model the app is served
    chunks/<sha256>          verified Chunks, least recently used first to go
    chunks/<sha256>.part     a Chunk under way
    updates/<assignment>.header, .payload

Chunks are named by content, so a Bundle that many Rounds use is fetched once, and a cut download goes on. A Chunk that
is damaged on this disk is removed and downloaded again. Files with other names are foreign (``.DS_Store``,
``lost+found``) and left alone.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from fanin.edge.bundles.keys import SigningKey, load_or_create_key
from fanin.edge.files import replace_file
from fanin.edge.tensors import sha256_hex
from fanin.protos.chunks import ChunkRef, check_digest, short
from fanin.protos.convert import header_from_proto, header_to_proto, publication_from_proto, publication_to_proto
from fanin.protos.errors import Conflict, Corrupted, InvalidInput, NotFound, StorageFull, Unavailable
from fanin.protos.messages import Publication, UpdateHeader
from fanin.v1 import fleet_pb2 as pb

DEFAULT_MAX_BYTES: Final = 256 << 20
LOG = logging.getLogger("fanin.clients")
_CHUNK_NAME: Final = re.compile(r"[0-9a-f]{64}(\.part)?", re.ASCII)
_UPDATE_NAME: Final = re.compile(r"[^.].*\.(payload|header|header\.new)", re.ASCII)


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Keep a device's folder to this process; two on one folder would drop each other's Updates.

    The lock is the kernel's, so it goes with the process, however that ends. Raises Conflict if it is taken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise Conflict(f"{folder}: in use by another process; stop it, or give another --state") from exc
        yield


class Cache:
    """A device's folder; one process at a time (``hold_folder``).

    Raises Corrupted if the record of the Versions that it has seen is damaged.
    """

    def __init__(self, folder: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._folder = folder
        self._chunks = folder / "chunks"
        self._updates = folder / "updates"
        self._max_bytes = max_bytes
        # Assignments whose Update this process has written, or has found to be whole.
        self._whole: set[str] = set()
        # Chunks that this process has verified.
        self._verified: set[str] = set()
        for made in (self._chunks, self._updates):
            made.mkdir(parents=True, exist_ok=True)
        # At the start, where a person may see it, and not in the middle of the first Assignment.
        self._all_seen()

    @staticmethod
    def is_device(folder: Path) -> bool:
        """Whether a folder is a device's."""
        return (folder / "device.key").is_file()

    def key(self) -> SigningKey:
        """The device's key, made on first use."""
        return load_or_create_key(self._folder / "device.key")

    def seen(self, run_id: str) -> int:
        """The highest Version number that this device has verified in a Run; -1 for none."""
        return self._all_seen().get(run_id, -1)

    def remember_seen(self, run_id: str, number: int) -> None:
        """Raise what ``seen`` tells; durable before it returns, or an old Version could come back.

        Raises StorageFull.
        """
        all_seen = self._all_seen()
        if all_seen.get(run_id, -1) >= number:
            return
        _replace(self._folder / "seen.json", json.dumps(all_seen | {run_id: number}).encode())

    def put_served(self, publication: Publication) -> None:
        """Remember whose model is served; durable before it returns. Raises StorageFull."""
        _replace(self._folder / "served", publication_to_proto(publication).SerializeToString())

    def served(self) -> Publication | None:
        """The Publication whose model was served last; None if there is none, or if its record does not parse."""
        try:
            return publication_from_proto(pb.Publication.FromString((self._folder / "served").read_bytes()))
        except (FileNotFoundError, DecodeError, InvalidInput):
            return None

    def has(self, ref: ChunkRef) -> bool:
        """Whether a Chunk is here. A damaged one is removed: it is verified once in each process."""
        path = self._chunks / ref.sha256
        if not path.exists():
            return False
        if ref.sha256 not in self._verified:
            self.forget((ref,))
            self._verified.add(ref.sha256)
        return path.exists()

    def read(self, sha256: str) -> bytes:
        """A Chunk's bytes; the caller verifies them. Raises NotFound."""
        path = self._chunks / sha256
        try:
            data = path.read_bytes()
            os.utime(path)
        except FileNotFoundError as exc:
            raise NotFound(f"chunk {sha256}: not in the cache") from exc
        return data

    def fetch(self, ref: ChunkRef, download: Callable[[int], Iterable[bytes]]) -> int:
        """Get a Chunk from where an earlier try stopped; ``download`` streams from an offset.

        Returns the bytes that came over the line. What arrived stays after any failure. Raises InvalidInput if
        the whole does not verify, and then begins anew next time; Unavailable if the stream ended early, or if what an
        earlier try left may be damaged; StorageFull.
        """
        part = self._chunks / f"{ref.sha256}.part"
        received, digest = 0, hashlib.sha256()
        try:
            with part.open("a+b") as file:
                offset = file.tell()
                if offset > ref.size_bytes:
                    file.truncate(offset := 0)
                if offset:
                    file.seek(0)
                    digest.update(file.read())
                for data in download(offset):
                    file.write(data)
                    digest.update(data)
                    received += len(data)
                    if offset + received > ref.size_bytes:
                        break
        except OSError as exc:
            raise StorageFull(f"{part}: cannot be written ({exc})") from exc
        size = offset + received
        if size < ref.size_bytes:
            raise Unavailable(f"chunk {short(ref.sha256)}: the stream ended at byte {size} of {ref.size_bytes}")
        try:
            check_digest(f"chunk {short(ref.sha256)}", ref, size, digest.hexdigest())
        except InvalidInput as exc:
            part.unlink()
            if offset:
                raise Unavailable(
                    f"{exc}; the part that was here may be damaged, all of it is downloaded again"
                ) from exc
            raise
        part.replace(self._chunks / ref.sha256)
        self._verified.add(ref.sha256)
        return received

    def forget(self, refs: Iterable[ChunkRef]) -> None:
        """Drop those of these Chunks whose bytes are not what their names say; the others are at no fault."""
        for ref in refs:
            path = self._chunks / ref.sha256
            if path.exists() and sha256_hex(path.read_bytes()) != ref.sha256:
                LOG.warning("cache: chunk %s: damaged on this disk, removed and downloaded again", short(ref.sha256))
                path.unlink()

    def trim(self, keep: Iterable[str]) -> None:
        """Drop the Chunks used longest ago until the rest fits, but none of ``keep``."""
        kept = set(keep)
        paths = sorted(_own(self._chunks, _CHUNK_NAME), key=lambda path: path.stat().st_mtime)
        total = sum(path.stat().st_size for path in paths)
        for path in paths:
            if total <= self._max_bytes:
                return
            if path.name not in kept:
                total -= path.stat().st_size
                path.unlink()

    def put_update(self, header: UpdateHeader, payload: bytes) -> None:
        """Keep an Update until it is accepted; the header is written last and makes it count. Raises StorageFull.

        The header alone is synced: should a power cut come before the system has written the payload, ``update`` finds
        that out by its digest, and the device trains once more.
        """
        payload_path, header_path = self._update_paths(header.assignment_id)
        try:
            payload_path.write_bytes(payload)
        except OSError as exc:
            payload_path.unlink(missing_ok=True)
            raise StorageFull(f"{payload_path}: cannot be written ({exc})") from exc
        _replace(header_path, header_to_proto(header).SerializeToString())
        self._whole.add(header.assignment_id)

    def update(self, assignment_id: str) -> UpdateHeader | None:
        """The header of the Update made for an Assignment, if it is whole; one that does not parse is not."""
        payload_path, header_path = self._update_paths(assignment_id)
        if not header_path.exists():
            return None
        try:
            header = header_from_proto(pb.UpdateHeader.FromString(header_path.read_bytes()))
        except (DecodeError, InvalidInput):
            return None
        if not payload_path.exists() or payload_path.stat().st_size != header.payload.size_bytes:
            return None
        if assignment_id not in self._whole:
            with payload_path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != header.payload.sha256:
                    return None
            self._whole.add(assignment_id)
        return header

    def read_update(self, assignment_id: str, offset: int, size_bytes: int) -> bytes:
        """A piece of an Update's payload."""
        with self._update_paths(assignment_id)[0].open("rb") as file:
            file.seek(offset)
            return file.read(size_bytes)

    def forget_updates(self) -> None:
        """Drop all Updates: a device works for one Round at a time."""
        self._whole.clear()
        for path in _own(self._updates, _UPDATE_NAME):
            path.unlink()

    def _update_paths(self, assignment_id: str) -> tuple[Path, Path]:
        return self._updates / f"{assignment_id}.payload", self._updates / f"{assignment_id}.header"

    def _all_seen(self) -> dict[str, int]:
        path = self._folder / "seen.json"
        try:
            seen = dict(json.loads(path.read_text())) if path.exists() else {}
            if not all(isinstance(name, str) and type(number) is int for name, number in seen.items()):
                raise ValueError("expected an object of version numbers by run")
            return seen
        except (ValueError, TypeError) as exc:
            # Going on without it would let an old Version back in; that is for a person to decide.
            raise Corrupted(f"{path}: not readable ({exc}); remove it to forget which versions were seen") from exc


def _own(folder: Path, name: re.Pattern[str]) -> list[Path]:
    """The files of a folder that this module writes."""
    with os.scandir(folder) as entries:
        own = [one.name for one in entries if name.fullmatch(one.name) and one.is_file(follow_symlinks=False)]
    return [folder / one for one in own]


def _replace(path: Path, data: bytes) -> None:
    """Replace a file durably: after a power cut the old one must not be back. Raises StorageFull."""
    try:
        replace_file(path, data)
    except OSError as exc:
        raise StorageFull(f"{path}: cannot be written ({exc})") from exc
