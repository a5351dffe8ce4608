"""The spool: Chunks of Updates until they are committed, and payloads of committed Updates.

    spool/<assignment>.header   the announced header
    spool/<assignment>.part     the payload so far; only complete, verified Chunks count
    updates/<run>/<round>/<device>.<digest>.payload

An upload resumes after any interruption: ``open`` verifies the stored bytes and reports the offset to resume from. An
upload with another header starts from zero. ``commit`` syncs and renames the file. An Update that is not committed has
no effect. It leaves no trace but the two files in ``spool/``, which ``discard`` removes.

Files with other names are foreign: a file manager, NFS or mkfs creates some. They are logged once and left alone.
"""

import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from io import BufferedRandom
from pathlib import Path
from typing import Final

from fanin.protos.chunks import CHUNK_BYTES, check_digest, short
from fanin.protos.errors import Corrupted, InvalidInput, InvalidUpdate, Unavailable
from fanin.protos.messages import Piece, UpdateHeader
from fanin.server.storage.disk import Disk, OwnEntries, disk_errors, make_folder
from fanin.server.storage.protocols.files import Upload
from fanin.server.storage.records import recorded_header

_READ_BYTES: Final = CHUNK_BYTES
_NAME_CHARS: Final = 16
_MAX_PENDING: Final = 1024
_PAYLOAD: Final = ".payload"
_UPLOAD_NAME: Final = r"[^.].*\.[0-9]+\.[^.]+\.(part|header)"
_PAYLOAD_NAME: Final = r"[^.].*\.[0-9a-f]{16}\.payload"


class FolderSpool:
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

    def open(self, header: UpdateHeader, device: str) -> "FolderUpload":
        """Start or resume the upload of a device whose Update is not recorded yet. Raises StorageFull."""
        part = self._uploads / f"{header.assignment_id}.part"
        note = self._uploads / f"{header.assignment_id}.header"
        announced = recorded_header(header)
        with disk_errors(f"spool {header.assignment_id}"):
            if not note.exists() or note.read_bytes() != announced:
                part.unlink(missing_ok=True)
                note.write_bytes(announced)
            if not part.exists():
                self._take_back(self._payload(header, device), part)
            return FolderUpload(part, header, announced)

    def commit(self, upload: Upload, device: str) -> None:
        """Make a complete upload durable under its final name. It may be repeated.

        Raises:
            InvalidUpdate: The payload does not have the announced digest.
            StorageFull: The disk is full.
            Unavailable: A later upload with another header has replaced this one.
        """
        assert isinstance(upload, FolderUpload), "a spool commits uploads that it opened"
        path = self._payload(upload.header, device)
        with disk_errors(f"spool {upload.header.assignment_id}"):
            upload.verify(self._disk)
            if upload.is_at(path):
                return
            if not upload.is_at(upload.part):
                raise Unavailable(
                    f"spool {upload.header.assignment_id}: a later upload replaced this one; continue", code="FN-0517"
                )
            # An existing folder may not be durable: the process that created it may have died before the sync.
            is_known = path.parent in self._synced
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                upload.part.replace(path)
            except FileNotFoundError:
                # ``remove_committed`` removed the empty folder in between.
                is_known = False
                path.parent.mkdir(parents=True, exist_ok=True)
                upload.part.replace(path)
            self._disk.sync_all((path.parent,) if is_known else (path.parent, path.parent.parent, self._updates))
            self._synced.add(path.parent)
            self._own.add(path)
        self.discard(upload.header.assignment_id)

    def discard(self, assignment_id: str) -> None:
        """Remove an upload."""
        for suffix in (".part", ".header"):
            (self._uploads / f"{assignment_id}{suffix}").unlink(missing_ok=True)

    def withdraw(self, header: UpdateHeader, device: str) -> None:
        """Remove a payload that is not recorded: its Round had closed, or has another Update of the device."""
        path = self._payload(header, device)
        self._own.discard(path)
        path.unlink(missing_ok=True)

    def remove_committed(self, updates: Iterable[tuple[UpdateHeader, str]]) -> None:
        """Remove committed payloads that no Version is computed from any more, and folders that are then empty.

        The removal is durable: what was recorded as erased does not return after a loss of power.
        """
        changed = set[Path]()
        for header, device in updates:
            self.withdraw(header, device)
            folder = self._payload(header, device).parent
            changed.add(folder)
            # A Run of a million Rounds must not leave a million empty folders. Others have payloads of other Rounds.
            with contextlib.suppress(OSError):
                folder.rmdir()
                self._synced.discard(folder)
                changed.add(folder.parent)
        self._disk.sync_all([folder for folder in sorted(changed) if folder.is_dir()])

    def clear_round(self, run_id: str, round_number: int, keep: Mapping[str, UpdateHeader]) -> None:
        """Remove the files that devices sent in vain for a Round whose Updates no longer count.

        These are all uploads, and the payloads that the record does not have because the database failed and the
        device never returned.

        Args:
            run_id: The Run.
            round_number: The Round that the files were made for.
            keep: The recorded Updates, by device. Their payloads stay.
        """
        for path in self._upload_files.of(self._uploads):
            if _round_of(path) == (run_id, round_number):
                path.unlink(missing_ok=True)
        payloads = {self._payload(header, device) for device, header in keep.items()}
        folder = self._updates / run_id / str(round_number)
        for path in self._payload_files.of(folder) if folder.exists() else ():
            self._own.discard(path)
            if path not in payloads:
                path.unlink(missing_ok=True)
        self._synced.discard(folder)

    def newest_round(self, run_id: str) -> int:
        """Return the number of the newest Round of a Run that has a payload, or 0 without one."""
        folder = self._updates / run_id
        rounds = [path for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []
        # The newest first: a Run may have a million folders, and only one of them must be read.
        for path in sorted(rounds, key=lambda path: int(path.name), reverse=True):
            if path.is_dir() and any(self._payload_files.of(path)):
                return int(path.name)
        return 0

    def sweep(self, open_rounds: Collection[tuple[str, int]]) -> None:
        """Remove the uploads for all Rounds but these. A process that ended right after a Round leaves such files."""
        for path in self._upload_files.of(self._uploads):
            if _round_of(path) not in open_rounds:
                path.unlink(missing_ok=True)

    def read(self, header: UpdateHeader, device: str) -> Iterator[memoryview]:
        """Yield a committed payload in consecutive slices.

        A payload that this process has verified and written is not hashed again.

        Raises:
            Corrupted: The payload is missing or damaged. A wrong digest is raised after the last slice.
        """
        path = self._payload(header, device)
        is_own = path in self._own
        # A relative path, because operators read it and must not learn the location of the folder.
        what, digest = path.relative_to(self._updates.parent), hashlib.sha256()
        try:
            with path.open("rb") as file:
                size_bytes = os.fstat(file.fileno()).st_size
                if size_bytes != header.payload.size_bytes:
                    raise Corrupted(
                        f"{what}: got {size_bytes} bytes, expected {header.payload.size_bytes}", code="FN-0515"
                    )
                while piece := file.read(_READ_BYTES):
                    if not is_own:
                        digest.update(piece)
                    yield memoryview(piece)
        except FileNotFoundError as exc:
            raise Corrupted(f"{what}: a committed update is missing", code="FN-0515") from exc
        if not is_own and digest.hexdigest() != header.payload.sha256:
            raise Corrupted(
                f"{what}: a committed update was changed on disk; its digest does not match its record", code="FN-0515"
            )

    def read_part(self, header: UpdateHeader, device: str, offset: int, size_bytes: int) -> bytes:
        """Return bytes of a committed payload that ``read`` has verified in this process. Raises Corrupted."""
        path = self._payload(header, device)
        what = path.relative_to(self._updates.parent)
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(offset)
                data = file.read(size_bytes)
        except FileNotFoundError as exc:
            raise Corrupted(f"{what}: a committed update is missing", code="FN-0515") from exc
        if len(data) != size_bytes:
            raise Corrupted(f"{what}: got {len(data)} bytes at offset {offset}, expected {size_bytes}", code="FN-0515")
        return data

    def _take_back(self, payload: Path, part: Path) -> None:
        """Turn a payload that was never recorded into an upload again, so that the device sends no byte twice.

        This happens if the coordinator dies or the database fails after ``commit``.
        """
        with contextlib.suppress(FileNotFoundError):
            payload.replace(part)
            self._own.discard(payload)

    def _payload(self, header: UpdateHeader, device: str) -> Path:
        return self._updates / payload_name(header, device)


def payload_name(header: UpdateHeader, device: str) -> str:
    """Return the path of a committed payload below ``updates/``.

    The name has the digest, so another Update of the device can never replace a committed one.
    """
    name = f"{device}.{header.payload.sha256[:_NAME_CHARS]}{_PAYLOAD}"
    return f"{header.run_id}/{header.round}/{name}"


def _round_of(path: Path) -> tuple[str, int]:
    """Return the Run and the Round of an upload's file, which is named ``run.round.tag.suffix``."""
    run_id, number, _, _ = path.name.rsplit(".", 3)
    return run_id, int(number)


class FolderUpload:
    """One upload under way.

    Attributes:
        header: The announced header.
        header_proto: Its form in the record.
        received_bytes: The offset of the next piece.
        resumed_bytes: The offset of the first piece.
    """

    def __init__(self, part: Path, header: UpdateHeader, header_proto: bytes) -> None:
        self.part = part
        self.header = header
        self.header_proto = header_proto
        # Bytes in memory.
        self._pending: deque[memoryview] = deque()
        self._num_pending = 0
        self._digest = hashlib.sha256()
        # Of the Chunk that is not complete yet: the bytes in the file, and their digest.
        self._num_written, self._chunk_digest = 0, hashlib.sha256()
        self._num_chunks = self._verified_chunks()
        stored_bytes = sum(ref.size_bytes for ref in header.payload.chunks[: self._num_chunks])
        self._file: BufferedRandom = part.open("r+b") if part.exists() else part.open("w+b")
        try:
            self._file.truncate(stored_bytes)
            self._file.seek(stored_bytes)
        except OSError:
            self._file.close()
            raise
        self.received_bytes = stored_bytes
        self.resumed_bytes = stored_bytes

    def is_complete(self) -> bool:
        """Return whether all Chunks are stored and verified."""
        return self._num_chunks == len(self.header.payload.chunks)

    def is_at(self, path: Path) -> bool:
        """Return whether ``path`` names the file of this upload."""
        return path.exists() and os.path.samestat(path.stat(), os.fstat(self._file.fileno()))

    def add(self, piece: Piece) -> bool:
        """Add the next bytes in memory, without blocking.

        Returns:
            Whether a Chunk is complete now. Then call ``store``.

        Raises:
            InvalidUpdate: The piece does not start at ``received_bytes``, is empty, or exceeds the payload.
        """
        if piece.offset != self.received_bytes:
            raise InvalidUpdate(
                f"update: got a piece at offset {piece.offset}, expected {self.received_bytes}", code="FN-0130"
            )
        end = piece.offset + len(piece.data)
        if not piece.data or end > self.header.payload.size_bytes:
            raise InvalidUpdate(
                f"update: got bytes {piece.offset} to {end}, expected 1 or more, up to "
                f"{self.header.payload.size_bytes}",
                code="FN-0130",
            )
        if len(self._pending) >= _MAX_PENDING:
            # Each piece has an overhead. Many pieces of one byte would need hundreds of times their size.
            self._pending = deque([memoryview(b"".join(self._pending))])
        self._pending.append(memoryview(piece.data))
        self._num_pending += len(piece.data)
        self.received_bytes = end
        return self._num_pending >= self.header.payload.chunks[self._num_chunks].size_bytes - self._num_written

    def store(self) -> None:
        """Write all bytes in memory, and verify each complete Chunk. An incomplete one counts as not received.

        Raises InvalidUpdate for a wrong digest, StorageFull.
        """
        while self._num_pending:
            ref = self.header.payload.chunks[self._num_chunks]
            parts = self._next(min(self._num_pending, ref.size_bytes - self._num_written))
            for part in parts:
                self._chunk_digest.update(part)
                self._digest.update(part)
                self._num_written += len(part)
            is_complete = self._num_written == ref.size_bytes
            if is_complete:
                try:
                    check_digest(
                        f"update: chunk {self._num_chunks}", ref, ref.size_bytes, self._chunk_digest.hexdigest()
                    )
                except InvalidInput as exc:
                    self._file.truncate(sum(ref.size_bytes for ref in self.header.payload.chunks[: self._num_chunks]))
                    raise InvalidUpdate(str(exc), code=exc.code) from exc
            with disk_errors(f"spool {self.header.assignment_id}"):
                self._file.writelines(parts)
                self._file.flush()
            if is_complete:
                self._num_chunks += 1
                self._num_written, self._chunk_digest = 0, hashlib.sha256()

    def _next(self, size_bytes: int) -> list[memoryview]:
        """Remove and return the first ``size_bytes`` bytes in memory, without copying them."""
        parts: list[memoryview] = []
        self._num_pending -= size_bytes
        while size_bytes:
            part = self._pending.popleft()
            if len(part) > size_bytes:
                self._pending.appendleft(part[size_bytes:])
                part = part[:size_bytes]
            parts.append(part)
            size_bytes -= len(part)
        return parts

    def verify(self, disk: Disk) -> None:
        """Check the digest of the payload, and make the payload durable. Raises InvalidUpdate."""
        self._file.flush()
        actual = self._digest.hexdigest()
        if actual != self.header.payload.sha256:
            raise InvalidUpdate(
                f"update: digest mismatch (got {short(actual)}, expected {short(self.header.payload.sha256)})",
                code="FN-0117",
            )
        disk.sync_file(self._file.fileno())

    def close(self) -> None:
        """Close the file. Complete Chunks stay for the next ``Spool.open``.

        On a full disk the first close fails, because it cannot flush. That error is not reported a second time.
        """
        try:
            self._file.close()
        except OSError:
            self._file.close()

    def _verified_chunks(self) -> int:
        """Return how many leading Chunks of the file are intact. A torn tail after a crash does not count."""
        if not self.part.exists():
            return 0
        with self.part.open("rb") as file:
            for index, ref in enumerate(self.header.payload.chunks):
                data = file.read(ref.size_bytes)
                if hashlib.sha256(data).hexdigest() != ref.sha256:
                    return index
                self._digest.update(data)
        return len(self.header.payload.chunks)
