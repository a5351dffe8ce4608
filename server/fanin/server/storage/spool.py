"""The spool: where an Update's Chunks lie until it is committed, and where committed payloads stay.

    spool/<assignment>.header   the header that was announced
    spool/<assignment>.part     the payload's bytes so far; only whole, verified Chunks count
    updates/<run>/<round>/<device>.<digest>.payload

An upload goes on after any break: ``open`` verifies what is there and says where to go on. A header that
differs from the one before starts over. ``commit`` syncs and renames; until then nothing of an Update exists
for anybody else, so a half-sent or invalid one leaves no trace but its file here, which ``discard`` removes.

Files with other names are foreign: a file manager, NFS or mkfs creates some. They are logged once and left alone.
"""

import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from io import BufferedRandom
from pathlib import Path
from typing import Final

from fanin.protos.chunks import CHUNK_BYTES, check_digest, short
from fanin.protos.convert import header_to_proto
from fanin.protos.errors import Corrupted, InvalidInput, InvalidUpdate, Unavailable
from fanin.protos.messages import Piece, UpdateHeader
from fanin.server.storage.disk import Disk, OwnEntries, full_disk_as_our_error, make_folder

_READ_BYTES: Final = CHUNK_BYTES
_NAME_CHARS: Final = 16
_MAX_HELD: Final = 1024
_PAYLOAD: Final = ".payload"
_UPLOAD_NAME: Final = r"[^.].*\.[0-9]+\.[^.]+\.(part|header)"
_PAYLOAD_NAME: Final = r"[^.].*\.[0-9a-f]{16}\.payload"


class Spool:
    """The folder of uploads under way and of committed payloads."""

    def __init__(self, uploads: Path, updates: Path, disk: Disk) -> None:
        self._uploads = uploads
        self._updates = updates
        self._disk = disk
        # Payloads of open Rounds that this process has verified, and folders whose names are durable.
        self._own: set[Path] = set()
        self._synced: set[Path] = set()
        self._upload_files, self._payload_files = OwnEntries(_UPLOAD_NAME), OwnEntries(_PAYLOAD_NAME)
        for folder in (uploads, updates):
            make_folder(folder, disk)

    def open(self, header: UpdateHeader, device: str) -> "Upload":
        """Begin an upload, or go on with it, for a device of which the store has no Update. Raises StorageFull."""
        part = self._uploads / f"{header.assignment_id}.part"
        note = self._uploads / f"{header.assignment_id}.header"
        announced = header_to_proto(header).SerializeToString(deterministic=True)
        with full_disk_as_our_error(f"spool {header.assignment_id}"):
            if not note.exists() or note.read_bytes() != announced:
                part.unlink(missing_ok=True)
                note.write_bytes(announced)
            if not part.exists():
                self._take_back(self._payload(header, device), part)
            return Upload(part, header)

    def commit(self, upload: "Upload", device: str) -> None:
        """Make a whole upload durable under its final name; repeating it is harmless.

        Raises InvalidUpdate if the bytes as a whole do not have the announced digest, StorageFull, Unavailable if a
        later upload under another header took this one's place.
        """
        path = self._payload(upload.header, device)
        with full_disk_as_our_error(f"spool {upload.header.assignment_id}"):
            upload.verify_whole(self._disk)
            if upload.is_at(path):
                return
            if not upload.is_at(upload.part):
                raise Unavailable(f"spool {upload.header.assignment_id}: a later upload took this one's place; go on")
            # A folder that was made in vain, by a process that died before it was synced, is made known as well.
            is_known = path.parent in self._synced
            path.parent.mkdir(parents=True, exist_ok=True)
            upload.part.replace(path)
            self._disk.sync_folder(path.parent)
            if not is_known:
                self._disk.sync_folder(path.parent.parent)
                self._disk.sync_folder(self._updates)
                self._synced.add(path.parent)
            self._own.add(path)
        self.discard(upload.header.assignment_id)

    def discard(self, assignment_id: str) -> None:
        """Forget an upload."""
        for suffix in (".part", ".header"):
            (self._uploads / f"{assignment_id}{suffix}").unlink(missing_ok=True)

    def withdraw(self, header: UpdateHeader, device: str) -> None:
        """Remove a payload that the store did not record: its Round had closed, or has another of this device."""
        path = self._payload(header, device)
        self._own.discard(path)
        path.unlink(missing_ok=True)

    def clear_round(self, run_id: str, round_number: int, keep: Mapping[str, UpdateHeader]) -> None:
        """Forget what devices sent in vain for a Round whose Updates no longer count: uploads, and payloads other than
        those of ``keep``, by device, whose Update the store could not record, and that never came back."""
        for path in self._upload_files.of(self._uploads):
            if _round_of(path) == (run_id, round_number):
                path.unlink(missing_ok=True)
        kept = {self._payload(header, device) for device, header in keep.items()}
        folder = self._updates / run_id / str(round_number)
        for path in self._payload_files.of(folder) if folder.exists() else ():
            self._own.discard(path)
            if path not in kept:
                path.unlink(missing_ok=True)
        self._synced.discard(folder)

    def sweep(self, open_rounds: Collection[tuple[str, int]]) -> None:
        """Forget the uploads of all Rounds but these: what a process left that ended right after a Round did."""
        for path in self._upload_files.of(self._uploads):
            if _round_of(path) not in open_rounds:
                path.unlink(missing_ok=True)

    def read(self, header: UpdateHeader, device: str) -> Iterator[memoryview]:
        """A committed payload in consecutive pieces, verified. Raises Corrupted, for a wrong digest at the end.

        What this process has just verified and written is not hashed again.
        """
        path = self._payload(header, device)
        is_own = path in self._own
        # Relative: the text reaches operators, who must not learn where the folder is.
        what, digest = path.relative_to(self._updates.parent), hashlib.sha256()
        try:
            with path.open("rb") as file:
                got = os.fstat(file.fileno()).st_size
                if got != header.payload.size_bytes:
                    raise Corrupted(f"{what}: got {got} bytes, expected {header.payload.size_bytes}")
                while piece := file.read(_READ_BYTES):
                    if not is_own:
                        digest.update(piece)
                    yield memoryview(piece)
        except FileNotFoundError as exc:
            raise Corrupted(f"{what}: a committed update is missing") from exc
        if not is_own and digest.hexdigest() != header.payload.sha256:
            raise Corrupted(f"{what}: a committed update was changed on disk; its digest does not match its record")

    def _take_back(self, payload: Path, part: Path) -> None:
        """A payload that ``commit`` has put in place and the store never recorded, for the coordinator died or the
        database failed in between, is this upload's again: none of its bytes has to be sent twice."""
        with contextlib.suppress(FileNotFoundError):
            payload.replace(part)
            self._own.discard(payload)

    def _payload(self, header: UpdateHeader, device: str) -> Path:
        # Named by content too: another Update of the same device can never take a committed one's place.
        name = f"{device}.{header.payload.sha256[:_NAME_CHARS]}{_PAYLOAD}"
        return self._updates / header.run_id / str(header.round) / name


def _round_of(path: Path) -> tuple[str, int]:
    """The Run and Round of a file of an upload, named ``run.round.tag.suffix``."""
    run_id, number, _, _ = path.name.rsplit(".", 3)
    return run_id, int(number)


class Upload:
    """One upload under way. ``received_bytes`` is where the next piece begins, ``resumed_bytes`` where the first."""

    def __init__(self, part: Path, header: UpdateHeader) -> None:
        self.part = part
        self.header = header
        # Bytes of a Chunk that is not whole yet.
        self._held: deque[memoryview] = deque()
        self._num_held = 0
        self._digest = hashlib.sha256()
        self._num_chunks = self._verified_chunks()
        whole = sum(ref.size_bytes for ref in header.payload.chunks[: self._num_chunks])
        self._file: BufferedRandom = part.open("r+b") if part.exists() else part.open("w+b")
        try:
            self._file.truncate(whole)
            self._file.seek(whole)
        except OSError:
            self._file.close()
            raise
        self.received_bytes = whole
        self.resumed_bytes = whole

    def is_whole(self) -> bool:
        """Whether all Chunks are here and verified."""
        return self._num_chunks == len(self.header.payload.chunks)

    def is_at(self, path: Path) -> bool:
        """Whether this upload's bytes are the file of that name."""
        return path.exists() and os.path.samestat(path.stat(), os.fstat(self._file.fileno()))

    def append(self, piece: Piece) -> None:
        """``take`` the next bytes, and ``store`` what is whole."""
        if self.take(piece):
            self.store()

    def take(self, piece: Piece) -> bool:
        """Add the next bytes in memory, which takes no time; whether a Chunk is whole now, for ``store``.

        Raises InvalidUpdate for a piece elsewhere or too many bytes.
        """
        if piece.offset != self.received_bytes:
            raise InvalidUpdate(f"update: got a piece at offset {piece.offset}, expected {self.received_bytes}")
        end = piece.offset + len(piece.data)
        if not piece.data or end > self.header.payload.size_bytes:
            raise InvalidUpdate(
                f"update: got bytes {piece.offset} to {end}, expected some, up to {self.header.payload.size_bytes}"
            )
        if len(self._held) >= _MAX_HELD:
            # Pieces of a byte each would take hundreds of times their size.
            self._held = deque([memoryview(b"".join(self._held))])
        self._held.append(memoryview(piece.data))
        self._num_held += len(piece.data)
        self.received_bytes = end
        return self._num_held >= self.header.payload.chunks[self._num_chunks].size_bytes

    def store(self) -> None:
        """Verify each Chunk that is whole, and write it.

        Raises InvalidUpdate for a Chunk with another digest, StorageFull.
        """
        while not self.is_whole():
            ref = self.header.payload.chunks[self._num_chunks]
            if self._num_held < ref.size_bytes:
                return
            parts, digest = self._next(ref.size_bytes), hashlib.sha256()
            for part in parts:
                digest.update(part)
            try:
                check_digest(f"update: chunk {self._num_chunks}", ref, ref.size_bytes, digest.hexdigest())
            except InvalidInput as exc:
                raise InvalidUpdate(str(exc)) from exc
            with full_disk_as_our_error(f"spool {self.header.assignment_id}"):
                self._file.writelines(parts)
                self._file.flush()
            for part in parts:
                self._digest.update(part)
            self._num_chunks += 1

    def _next(self, size_bytes: int) -> list[memoryview]:
        """The first bytes that are held, which they are then no longer; nothing is copied."""
        parts: list[memoryview] = []
        self._num_held -= size_bytes
        while size_bytes:
            part = self._held.popleft()
            if len(part) > size_bytes:
                self._held.appendleft(part[size_bytes:])
                part = part[:size_bytes]
            parts.append(part)
            size_bytes -= len(part)
        return parts

    def verify_whole(self, disk: Disk) -> None:
        """Check the digest of all bytes, and make them durable. Raises InvalidUpdate."""
        self._file.flush()
        got = self._digest.hexdigest()
        if got != self.header.payload.sha256:
            raise InvalidUpdate(
                f"update: digest mismatch (got {short(got)}, expected {short(self.header.payload.sha256)})"
            )
        disk.sync_file(self._file.fileno())

    def close(self) -> None:
        """Let go of the file; what is whole stays for the next ``Spool.open``. After a full disk the file cannot
        be flushed either, and that is no second error."""
        try:
            self._file.close()
        except OSError:
            self._file.close()

    def _verified_chunks(self) -> int:
        """How many leading Chunks of the file verify; a torn tail after a crash does not count."""
        if not self.part.exists():
            return 0
        with self.part.open("rb") as file:
            for index, ref in enumerate(self.header.payload.chunks):
                data = file.read(ref.size_bytes)
                if hashlib.sha256(data).hexdigest() != ref.sha256:
                    return index
                self._digest.update(data)
        return len(self.header.payload.chunks)
