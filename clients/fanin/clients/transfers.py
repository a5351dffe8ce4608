"""The progress of an operator's uploads and downloads, for a program that shows it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from fanin.protos.chunks import assemble
from fanin.protos.messages import Version
from fanin.v1 import control_pb2 as pb

Advance = Callable[[int], None]
"""Adds the bytes of a Chunk."""
Transfers = Callable[[str, int], AbstractContextManager[Advance]]
"""Maps a text and a number of bytes to a context with the function that adds to it."""


@contextmanager
def unshown(_text: str, _total: int) -> Iterator[Advance]:
    """Show no progress."""
    yield lambda _: None


def download(version: Version, read: Callable[[str], bytes], transfers: Transfers) -> bytes:
    """Return the verified bytes of a Version's parameters; ``read`` returns a Chunk by its digest."""
    what = f"version {version.number} of run {version.run_id}"
    with transfers(f"downloading {what}", version.parameters.size_bytes) as advance:

        def chunk(sha256: str) -> bytes:
            piece = read(sha256)
            advance(len(piece))
            return piece

        return assemble(what, version.parameters, chunk)


def chunk_messages(pieces: Mapping[str, bytes], advance: Advance) -> Iterator[bytes]:
    """Yield the messages of an upload of Chunks, which are named by their digests.

    gRPC requests the next message when it has room for one, so the progress follows the network.
    """
    for name, piece in pieces.items():
        yield pb.ChunkData(sha256=name, data=piece).SerializeToString()
        advance(len(piece))
