"""The download of many Chunks over one call: a call costs a signature and its check, and a model has thousands.

A partly downloaded Chunk needs its own call, at its offset. The coordinator may end a call early; the next Chunk then
starts another one.
"""

from collections.abc import Callable, Generator, Iterator
from types import TracebackType

from fanin.protos.chunks import MAX_MORE_CHUNKS, ChunkRef
from fanin.protos.messages import Download

DownloadCall = Callable[[Download], Iterator[bytes]]


class Fetching:
    """The missing Chunks of an Assignment, requested in their order. Leaving the context ends the call."""

    def __init__(self, download: DownloadCall, assignment_id: str, missing: tuple[ChunkRef, ...]) -> None:
        self._download = download
        self._assignment_id = assignment_id
        self._missing = missing
        self._pieces: Iterator[bytes] = iter(())

    def __enter__(self) -> "Fetching":
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _exc: BaseException | None, _at: TracebackType | None
    ) -> None:
        self._close()

    def chunk(self, ref: ChunkRef, offset: int) -> Iterator[bytes]:
        """Yield the bytes of the next missing Chunk from an offset.

        There are fewer bytes if the connection breaks, and more if the coordinator sends more than the Chunk has.
        """
        at, num_remaining = self._missing.index(ref), ref.size_bytes - offset
        self._missing = self._missing[at + 1 :]
        first = None if offset else self._next_chunk()
        if first is None:
            self._close()
            more = tuple(later.sha256 for later in self._missing[:MAX_MORE_CHUNKS])
            request = Download(assignment_id=self._assignment_id, sha256=ref.sha256, offset=offset, more_sha256=more)
            self._pieces = self._download(request)
            first = next(self._pieces, b"")
        data = first
        while data:
            num_remaining -= len(data)
            yield data
            data = b"" if num_remaining <= 0 else next(self._pieces, b"")

    def _next_chunk(self) -> bytes | None:
        """Return the first bytes of the next Chunk in the same call; an empty piece separates two Chunks."""
        return next(self._pieces, None) if next(self._pieces, None) == b"" else None

    def _close(self) -> None:
        # Closing a generator cancels its call; dropping the reference may not.
        if isinstance(self._pieces, Generator):
            self._pieces.close()
