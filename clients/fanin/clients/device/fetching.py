"""Chunks in a row over one call: a call costs a signature and its check, and a model has thousands of Chunks.

A Chunk of which a part is here already begins a call of its own, at its offset; so does one before which the
coordinator ended the last call, as it may.
"""

from collections.abc import Callable, Generator, Iterator
from types import TracebackType

from fanin.protos.chunks import MAX_MORE_CHUNKS, ChunkRef
from fanin.protos.messages import Download

Ask = Callable[[Download], Iterator[bytes]]


class Fetching:
    """The Chunks of an Assignment that are missing, to be asked for in their order; leaving it ends the call."""

    def __init__(self, ask: Ask, assignment_id: str, missing: tuple[ChunkRef, ...]) -> None:
        self._ask = ask
        self._assignment_id = assignment_id
        self._missing = missing
        self._pieces: Iterator[bytes] = iter(())

    def __enter__(self) -> "Fetching":
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _exc: BaseException | None, _at: TracebackType | None
    ) -> None:
        self._hang_up()

    def chunk(self, ref: ChunkRef, offset: int) -> Iterator[bytes]:
        """The bytes of the first missing Chunk from an offset on; fewer if the line ends, more from a liar."""
        at, num_left = self._missing.index(ref), ref.size_bytes - offset
        self._missing = self._missing[at + 1 :]
        first = None if offset else self._following()
        if first is None:
            self._hang_up()
            more = tuple(later.sha256 for later in self._missing[:MAX_MORE_CHUNKS])
            wanted = Download(assignment_id=self._assignment_id, sha256=ref.sha256, offset=offset, more_sha256=more)
            self._pieces = self._ask(wanted)
            first = next(self._pieces, b"")
        data = first
        while data:
            num_left -= len(data)
            yield data
            data = b"" if num_left <= 0 else next(self._pieces, b"")

    def _following(self) -> bytes | None:
        """The first bytes of the Chunk after this one in the same call, behind the empty piece that stands between."""
        return next(self._pieces, None) if next(self._pieces, None) == b"" else None

    def _hang_up(self) -> None:
        # A generator's call is cancelled when it is closed, not when it is forgotten.
        if isinstance(self._pieces, Generator):
            self._pieces.close()
