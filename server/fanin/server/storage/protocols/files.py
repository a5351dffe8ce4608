"""Blobs and spool: bulk bytes.

These Protocols are synchronous, because the fold reads and writes gigabytes in one function. The coordinator calls them
on the disk lane (``stores.Files``), never on the event loop, and from several threads at once.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Protocol

from fanin.protos.chunks import Artifact
from fanin.protos.messages import Piece, UpdateHeader


class BlobReader(Protocol):
    """Chunks of Bundles and Versions, each under its SHA-256. A reader never receives damaged bytes."""

    def read(self, digest: str, offset: int = 0, size_bytes: int = -1) -> bytes:
        """Return a verified Chunk, or a piece of it.

        Args:
            digest: The SHA-256 of the Chunk, in hexadecimal.
            offset: The first byte to return.
            size_bytes: The most bytes to return, or -1 for all.

        Returns:
            The bytes from the offset on.

        Raises:
            NotFound: The Chunk is not stored here.
            Corrupted: The Chunk is damaged.
            InvalidInput: The offset is beyond the end of the Chunk.
        """
        ...

    def read_artifact(self, what: str, artifact: Artifact) -> bytes:
        """Return all bytes of an Artifact, verified.

        Args:
            what: The Artifact, for errors.
            artifact: Its Chunks.

        Raises:
            NotFound: A Chunk is not stored here.
            Corrupted: A Chunk is damaged.
        """
        ...

    def pieces(self, what: str, artifact: Artifact) -> Iterator[bytes]:
        """Yield the verified Chunks of an Artifact in order. Arguments and errors are those of ``read_artifact``."""
        ...


class BlobWriter(Protocol):
    """The store of Chunks. A Chunk that a method has stored is durable when the method returns."""

    def put(self, digest: str, data: bytes) -> None:
        """Store a Chunk, or repair it.

        Args:
            digest: The SHA-256 of the Chunk, in hexadecimal.
            data: Its bytes.

        Raises:
            InvalidInput: The digest is wrong.
            StorageFull: No space is left.
        """
        ...

    def put_pieces(self, pieces: Iterable[bytes]) -> Artifact:
        """Store bytes that arrive in consecutive pieces of any sizes, as Chunks of ``CHUNK_BYTES``.

        Args:
            pieces: The bytes. Only a few Chunks of them may be in memory at a time.

        Returns:
            The Artifact: the digest of all bytes, and the Chunks in order.

        Raises:
            StorageFull: No space is left.
        """
        ...

    def missing(self, digests: Iterable[str]) -> tuple[str, ...]:
        """Return those of the digests whose Chunks are not stored here or are damaged, each once, in order.

        Raises:
            InvalidInput: A digest is not a SHA-256 in hexadecimal.
        """
        ...

    def renew(self, digests: Iterable[str]) -> None:
        """Keep stored Chunks from ``remove_older`` for a while: called before they are verified for a publication.

        ``put``, ``put_pieces`` and ``missing`` do the same for the Chunks that are stored already. A Chunk that is not
        stored is ignored.
        """
        ...

    def sweep(self) -> None:
        """Remove the files of a process that died while it stored a Chunk. Called before the coordinator serves."""
        ...


class OldBlobs(Protocol):
    """The removal of Chunks that nothing uses (``collector``)."""

    def older_than(self, before_s: float) -> set[str]:
        """Return the digests of the Chunks that were neither stored nor renewed since a wall time."""
        ...

    def stored(self, digests: Iterable[str]) -> set[str]:
        """Return those of these Chunks that are stored, intact or not."""
        ...

    def remove_older(self, digests: Iterable[str], before_s: float) -> int:
        """Remove those of these Chunks that were neither stored nor renewed since a wall time. Returns their number."""
        ...


class Blobs(BlobReader, BlobWriter, OldBlobs, Protocol):
    """The store of Chunks: reads, writes, and the removal of what nothing uses."""


class Upload(Protocol):
    """One upload under way. One task at a time uses it."""

    @property
    def header(self) -> UpdateHeader:
        """The announced header."""
        ...

    @property
    def header_proto(self) -> bytes:
        """The form of the header in the record (``recorded_header``)."""
        ...

    @property
    def received_bytes(self) -> int:
        """The offset of the next piece."""
        ...

    @property
    def resumed_bytes(self) -> int:
        """The offset of the first piece: bytes that an earlier upload had stored."""
        ...

    def is_complete(self) -> bool:
        """Return whether all Chunks are stored and verified."""
        ...

    def add(self, piece: Piece) -> bool:
        """Add the next bytes in memory, without blocking.

        Args:
            piece: The bytes and their offset.

        Returns:
            Whether a Chunk is complete now. Then call ``store``.

        Raises:
            InvalidUpdate: The piece does not start at ``received_bytes``, is empty, or exceeds the payload.
        """
        ...

    def store(self) -> None:
        """Verify and store each complete Chunk. The bytes of an incomplete one need not stay in memory.

        Raises:
            InvalidUpdate: A Chunk does not have the announced digest.
            StorageFull: No space is left. The Chunks before stay.
        """
        ...

    def close(self) -> None:
        """End the upload. Complete Chunks stay for the next ``Spool.open``."""
        ...


class Payloads(Protocol):
    """The payloads of committed Updates."""

    def read(self, header: UpdateHeader, device: str) -> Iterator[memoryview]:
        """Yield a committed payload in consecutive slices.

        Args:
            header: The header of the Update.
            device: The device that made it.

        Raises:
            Corrupted: The payload is missing or damaged. A wrong digest is raised after the last slice.
        """
        ...

    def read_part(self, header: UpdateHeader, device: str, offset: int, size_bytes: int) -> bytes:
        """Return bytes of a committed payload that ``read`` or its upload has verified in this process.

        Args:
            header: The header of the Update.
            device: The device that made it.
            offset: The first byte.
            size_bytes: The number of bytes.

        Raises:
            Corrupted: The payload is missing or too short.
        """
        ...


class SpoolWriter(Protocol):
    """Uploads from their first byte to a durable payload."""

    def open(self, header: UpdateHeader, device: str) -> Upload:
        """Start or resume the upload of a device whose Update is not recorded yet.

        An upload resumes with the same header only; another header starts from zero. A durable payload without a record
        becomes an upload again.

        Args:
            header: The header that the device announces.
            device: The device.

        Raises:
            StorageFull: No space is left.
        """
        ...

    def commit(self, upload: Upload, device: str) -> None:
        """Make a complete upload a durable payload. It may be repeated.

        Args:
            upload: An upload that this spool opened.
            device: The device that made the Update.

        Raises:
            InvalidUpdate: The payload does not have the announced digest.
            StorageFull: No space is left.
            Unavailable: A later upload with another header has replaced this one.
        """
        ...

    def discard(self, assignment_id: str) -> None:
        """Remove an upload, if there is one."""
        ...

    def withdraw(self, header: UpdateHeader, device: str) -> None:
        """Remove a payload that is not recorded: its Round had closed, or has another Update of the device."""
        ...


class SpoolCleaner(Protocol):
    """The removal of bytes that no Version will be computed from."""

    def remove_committed(self, updates: Iterable[tuple[UpdateHeader, str]]) -> None:
        """Remove payloads of committed Updates: (header, device). One that is not stored is ignored."""
        ...

    def clear_round(self, run_id: str, round_number: int, keep: Mapping[str, UpdateHeader]) -> None:
        """Remove the uploads and the unrecorded payloads of a Round whose Updates no longer count.

        Args:
            run_id: The Run.
            round_number: The Round that they were made for.
            keep: The recorded Updates, by device. Their payloads stay.
        """
        ...

    def newest_round(self, run_id: str) -> int:
        """Return the number of the newest Round of a Run that has a payload, or 0 without one."""
        ...

    def sweep(self, open_rounds: Collection[tuple[str, int]]) -> None:
        """Remove the uploads for all Rounds but these.

        Args:
            open_rounds: Pairs of a Run and the number of a Round.
        """
        ...


class Spool(Payloads, SpoolWriter, SpoolCleaner, Protocol):
    """Uploads under way, and the payloads of committed Updates."""
