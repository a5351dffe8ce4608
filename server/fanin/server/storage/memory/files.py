"""Blobs and the spool in memory."""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from fanin.edge.tensors import sha256_hex
from fanin.protos.chunks import Artifact, assemble, check_digest, check_sha256, short
from fanin.protos.errors import Corrupted, InvalidInput, InvalidUpdate, NotFound, Unavailable
from fanin.protos.messages import Piece, UpdateHeader
from fanin.server.storage.blobs import cut, named
from fanin.server.storage.protocols.files import Upload
from fanin.server.storage.records import recorded_header

_Name = tuple[str, int, str, str]
"""The name of a payload: Run, Round, device, and digest."""


class MemoryBlobs:
    """``Blobs`` in memory."""

    def __init__(self) -> None:
        self._chunks: dict[str, bytes] = {}

    def read(self, digest: str, offset: int = 0, size_bytes: int = -1) -> bytes:
        """See ``BlobReader.read``."""
        check_sha256("chunk", digest)
        if digest not in self._chunks:
            raise NotFound(f"chunk {short(digest)}: not stored here", code="FN-0520")
        data = self._chunks[digest]
        if not 0 <= offset <= len(data):
            raise InvalidInput(f"chunk {short(digest)}: got offset {offset}, expected 0 to {len(data)}", code="FN-0120")
        return data[offset:] if size_bytes < 0 else data[offset : offset + size_bytes]

    def read_artifact(self, what: str, artifact: Artifact) -> bytes:
        """See ``BlobReader.read_artifact``."""
        return assemble(what, artifact, self.read)

    def pieces(self, what: str, artifact: Artifact) -> Iterator[bytes]:
        """See ``BlobReader.pieces``."""
        for ref in artifact.chunks:
            yield self.read(ref.sha256)

    def put(self, digest: str, data: bytes) -> None:
        """See ``Blobs.put``."""
        check_sha256("chunk", digest)
        if sha256_hex(data) != digest:
            raise InvalidInput(
                f"chunk: digest mismatch (got {short(sha256_hex(data))}, expected {short(digest)})", code="FN-0117"
            )
        self._chunks[digest] = bytes(data)

    def put_pieces(self, pieces: Iterable[bytes]) -> Artifact:
        """See ``Blobs.put_pieces``."""
        total, refs = hashlib.sha256(), []
        for ref, data in named(cut(pieces), total):
            self._chunks[ref.sha256] = data
            refs.append(ref)
        size_bytes = sum(ref.size_bytes for ref in refs)
        return Artifact(sha256=total.hexdigest(), size_bytes=size_bytes, chunks=tuple(refs))

    def missing(self, digests: Iterable[str]) -> tuple[str, ...]:
        """See ``Blobs.missing``."""
        digests = tuple(dict.fromkeys(digests))
        for digest in digests:
            check_sha256("chunk", digest)
        return tuple(digest for digest in digests if digest not in self._chunks)

    def renew(self, digests: Iterable[str]) -> None:
        """See ``Blobs.renew``."""

    def older_than(self, before_s: float) -> set[str]:
        """See ``OldBlobs.older_than``. Chunks in memory have no age."""
        return set()

    def stored(self, digests: Iterable[str]) -> set[str]:
        """See ``OldBlobs.stored``. Chunks in memory are never removed, and nobody looks for them."""
        return set()

    def remove_older(self, digests: Iterable[str], before_s: float) -> int:
        """See ``OldBlobs.remove_older``."""
        return 0

    def sweep(self) -> None:
        """See ``Blobs.sweep``. A Chunk in memory is complete or absent."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Part:
    """The Chunks of an upload that are stored and verified."""

    header: UpdateHeader
    chunks: list[bytes] = field(default_factory=list)


class MemoryUpload:
    """``Upload`` in memory."""

    def __init__(self, part: _Part) -> None:
        self.header = part.header
        self.header_proto = recorded_header(part.header)
        self.resumed_bytes = sum(map(len, part.chunks))
        self.received_bytes = self.resumed_bytes
        self.part = part
        self._pending = bytearray()

    def is_complete(self) -> bool:
        """See ``Upload.is_complete``."""
        return len(self.part.chunks) == len(self.header.payload.chunks)

    def add(self, piece: Piece) -> bool:
        """See ``Upload.add``."""
        end, size_bytes = piece.offset + len(piece.data), self.header.payload.size_bytes
        if piece.offset != self.received_bytes:
            raise InvalidUpdate(
                f"update: got a piece at offset {piece.offset}, expected {self.received_bytes}", code="FN-0130"
            )
        if not piece.data or end > size_bytes:
            raise InvalidUpdate(
                f"update: got bytes {piece.offset} to {end}, expected 1 or more, up to {size_bytes}", code="FN-0130"
            )
        self._pending += piece.data
        self.received_bytes = end
        return len(self._pending) >= self.header.payload.chunks[len(self.part.chunks)].size_bytes

    def store(self) -> None:
        """See ``Upload.store``."""
        while not self.is_complete():
            number = len(self.part.chunks)
            ref = self.header.payload.chunks[number]
            if len(self._pending) < ref.size_bytes:
                return
            data = bytes(self._pending[: ref.size_bytes])
            del self._pending[: ref.size_bytes]
            try:
                check_digest(f"update: chunk {number}", ref, len(data), sha256_hex(data))
            except InvalidInput as exc:
                raise InvalidUpdate(str(exc), code=exc.code) from exc
            self.part.chunks.append(data)

    def close(self) -> None:
        """See ``Upload.close``."""
        self._pending.clear()


class MemorySpool:
    """``Spool`` in memory."""

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}
        self._payloads: dict[_Name, tuple[bytes, ...]] = {}

    def open(self, header: UpdateHeader, device: str) -> MemoryUpload:
        """See ``SpoolWriter.open``."""
        part = self._parts.get(header.assignment_id)
        if part is None or part.header != header:
            # A payload that was never recorded becomes an upload again, so that the device sends no byte twice.
            chunks = list(self._payloads.pop(_name(header, device), ()))
            part = _Part(header=header, chunks=chunks)
            self._parts[header.assignment_id] = part
        return MemoryUpload(part)

    def commit(self, upload: Upload, device: str) -> None:
        """See ``SpoolWriter.commit``."""
        assert isinstance(upload, MemoryUpload), "a spool commits uploads that it opened"
        header, chunks = upload.header, tuple(upload.part.chunks)
        refs = header.payload.chunks
        # A single Chunk is the content, and ``store`` has verified it.
        digest = refs[0].sha256 if len(refs) == 1 else hashlib.sha256(b"".join(chunks)).hexdigest()
        if digest != header.payload.sha256:
            raise InvalidUpdate(
                f"update: digest mismatch (got {short(digest)}, expected {short(header.payload.sha256)})",
                code="FN-0117",
            )
        if self._payloads.get(_name(header, device)) == chunks:
            return
        if self._parts.get(header.assignment_id) is not upload.part:
            raise Unavailable(
                f"spool {header.assignment_id}: a later upload replaced this one; continue", code="FN-0517"
            )
        self._payloads[_name(header, device)] = chunks
        self.discard(header.assignment_id)

    def discard(self, assignment_id: str) -> None:
        """See ``SpoolWriter.discard``."""
        self._parts.pop(assignment_id, None)

    def withdraw(self, header: UpdateHeader, device: str) -> None:
        """See ``SpoolWriter.withdraw``."""
        self._payloads.pop(_name(header, device), None)

    def remove_committed(self, updates: Iterable[tuple[UpdateHeader, str]]) -> None:
        """See ``SpoolCleaner.remove_committed``."""
        for header, device in updates:
            self.withdraw(header, device)

    def clear_round(self, run_id: str, round_number: int, keep: Mapping[str, UpdateHeader]) -> None:
        """See ``SpoolCleaner.clear_round``."""
        names = {_name(header, device) for device, header in keep.items()}
        for name in [one for one in self._payloads if one[:2] == (run_id, round_number) and one not in names]:
            del self._payloads[name]
        self._drop_parts({name for name, part in self._parts.items() if _round_of(part) == (run_id, round_number)})

    def newest_round(self, run_id: str) -> int:
        """See ``SpoolCleaner.newest_round``."""
        return max((number for run, number, _, _ in self._payloads if run == run_id), default=0)

    def sweep(self, open_rounds: Collection[tuple[str, int]]) -> None:
        """See ``SpoolCleaner.sweep``."""
        self._drop_parts({name for name, part in self._parts.items() if _round_of(part) not in open_rounds})

    def read(self, header: UpdateHeader, device: str) -> Iterator[memoryview]:
        """See ``Payloads.read``."""
        for chunk in self._chunks(header, device):
            yield memoryview(chunk)

    def read_part(self, header: UpdateHeader, device: str, offset: int, size_bytes: int) -> bytes:
        """See ``Payloads.read_part``."""
        data = b"".join(self._chunks(header, device))[offset : offset + size_bytes]
        if len(data) != size_bytes:
            raise Corrupted(
                f"update of {device}: got {len(data)} bytes at offset {offset}, expected {size_bytes}", code="FN-0515"
            )
        return data

    def _chunks(self, header: UpdateHeader, device: str) -> tuple[bytes, ...]:
        try:
            return self._payloads[_name(header, device)]
        except KeyError as exc:
            raise Corrupted(f"update of {device}: a committed update is missing", code="FN-0515") from exc

    def _drop_parts(self, names: Collection[str]) -> None:
        for name in names:
            del self._parts[name]


def _name(header: UpdateHeader, device: str) -> _Name:
    return header.run_id, header.round, device, header.payload.sha256


def _round_of(part: _Part) -> tuple[str, int]:
    return part.header.run_id, part.header.round
