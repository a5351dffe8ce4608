"""The download of a Publication: its Chunks into the device's folder, its Bundle and Version verified.

The order is the security property (see ``models``). The epoch and number of a Version are recorded as the highest only
after the Version has verified.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Protocol

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import (
    OpenedModel,
    auxiliary_chunks,
    file_chunks,
    manifest_chunks,
    open_auxiliary,
    open_bundle,
    open_parameters,
    open_ranges,
    verify_version,
)
from fanin.clients.device.storage.protocols import DeviceFolder
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.ranges import RANGES
from fanin.protos import messages as m
from fanin.protos.chunks import MAX_MORE_CHUNKS, ChunkRef
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import Download, Publication

ReceivePieces = Callable[[int], Iterator[bytes]]
"""Streams the bytes of one Chunk from an offset."""
StoreChunk = Callable[[ChunkRef, ReceivePieces], None]
"""Stores one Chunk from its stream."""
DownloadCall = Callable[[Download], Iterator[bytes]]


class DownloadCalls(Protocol):
    """The call of a Downloader."""

    async def download(self, download_id: str, missing: tuple[ChunkRef, ...], store: StoreChunk) -> None:
        """Download Chunks in their order: call ``store(ref, receive)`` for each. Its exception ends the call."""
        ...


class DeviceCalls(DownloadCalls, Protocol):
    """The calls of a session to its coordinator. They raise FaninError."""

    async def enroll(self) -> None:
        """Register this device."""
        ...

    async def check_in(self, check_in: m.CheckIn) -> m.CheckInAnswer:
        """Ask for an Assignment."""
        ...

    async def upload(self, header: m.UpdateHeader, read: Callable[[int, int], bytes]) -> m.UploadReply:
        """Upload an Update. ``read(offset, size_bytes)`` returns a slice of it; its FaninError ends the upload."""
        ...

    async def report(self, report: m.Report) -> m.UploadReply:
        """Give up an Assignment, or report that this device works for it."""
        ...

    async def exchange(self, request: m.ExchangeRequest) -> m.ExchangeOutcome:
        """Send the message of a phase, and wait for the coordinator's message."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The parts of a Publication that a device needs.

    Attributes:
        files: Returns the artifacts of the verified Bundle that are downloaded.
        auxiliary: Names of the auxiliary tensors that are part of the model.
    """

    files: Callable[[Bundle], Collection[str]]
    auxiliary: Sequence[str] = ()


class Downloader:
    """Downloads models into a device's folder, with graphs of one format.

    ``num_bytes`` and ``num_bytes_resumed`` count the newest Assignment or Publication. A repeated fetch of it adds to
    the cost of its earlier tries.
    """

    def __init__(self, calls: DownloadCalls, store: DeviceFolder, trusted: Collection[str], graph_format: str) -> None:
        self._calls = calls
        self._store = store
        self._trusted = trusted
        self._graph_format = graph_format
        self._download_id = ""
        self.num_bytes = 0
        self.num_bytes_resumed = 0

    async def fetch(
        self,
        publication: Publication,
        needed: list[ChunkRef],
        should_continue: ShouldContinue,
        wanted: Wanted,
    ) -> OpenedModel:
        """Download and verify a Publication's model.

        Args:
            publication: The Bundle and the Version.
            needed: Receives the model's Chunks before they are downloaded, so that the caller can keep them even
                after a failure. They include the Chunks of the format's other graphs, which a later Round may need.
            should_continue: Called before each piece; received pieces are kept if it raises.
            wanted: The parts that are downloaded.

        Raises:
            Interrupted: ``should_continue`` raised it.
            InvalidInput: The Bundle or the Version does not verify, or ``wanted.files`` raised it.
        """
        if self._download_id != publication.download_id:
            self._download_id, self.num_bytes, self.num_bytes_resumed = publication.download_id, 0, 0
        chunks, records = self._store.chunks, self._store.records

        async def get(what: str, refs: Iterable[ChunkRef]) -> None:
            missing = tuple(ref for ref in dict.fromkeys(refs) if not chunks.has(ref))
            await self._calls.download(
                publication.download_id, missing, partial(self._store_chunk, what, should_continue)
            )

        needed += manifest_chunks(publication)
        await get("manifest", needed)
        try:
            bundle = open_bundle(publication, self._trusted, chunks.read)
            verify_version(publication, bundle, records.highest_version(publication.run_id))
            ranges = [RANGES] if RANGES in publication.version.auxiliary else []
            tensors = auxiliary_chunks(publication, bundle, [*wanted.auxiliary, *ranges])
            all_graphs = file_chunks(bundle, bundle.manifest.files(self._graph_format))
            needed += (*all_graphs, *publication.version.parameters.chunks, *tensors)
            await get("graphs", file_chunks(bundle, wanted.files(bundle)))
            await get("parameters", publication.version.parameters.chunks)
            await get("auxiliary tensors", tensors)
            parameters = open_parameters(publication, bundle, chunks.read)
            opened = {name: open_auxiliary(publication, bundle, name, chunks.read) for name in wanted.auxiliary}
            own_ranges = open_ranges(publication, bundle, chunks.read)
        except InvalidInput:
            # The bytes may be damaged on this disk: remove damaged Chunks, and the next try downloads them again.
            chunks.remove_damaged(needed)
            raise
        # Recorded last: a Version that did not verify must not block later ones.
        records.raise_version(publication.run_id, publication.version.order)
        return OpenedModel(bundle=bundle, parameters=parameters, auxiliary=opened, ranges=own_ranges)

    def _store_chunk(self, what: str, should_continue: ShouldContinue, ref: ChunkRef, receive: ReceivePieces) -> None:
        try:
            num_received = self._store.chunks.fetch(ref, partial(self._pieces, should_continue, ref, receive))
        except InvalidInput as exc:
            raise InvalidInput(
                f"{what}: {exc}; the coordinator serves other bytes than the publisher signed", code="FN-0825"
            ) from exc
        self.num_bytes_resumed += ref.size_bytes - num_received

    def _pieces(
        self, should_continue: ShouldContinue, ref: ChunkRef, receive: ReceivePieces, offset: int
    ) -> Iterator[bytes]:
        # Not asked after the last piece: the Chunk is complete then.
        should_continue()
        size_bytes = offset
        for data in receive(offset):
            # Count before the Chunk is complete: bytes of a broken connection cost traffic too.
            self.num_bytes += len(data)
            size_bytes += len(data)
            yield data
            if size_bytes < ref.size_bytes:
                should_continue()


class Fetching:
    """The missing Chunks of an Assignment, requested in their order. Leaving the context ends the call.

    Many Chunks are requested over one call: a call costs a signature and its check, and a model has thousands. A partly
    downloaded Chunk needs its own call, at its offset. The coordinator may end a call early; the next Chunk then starts
    another one.
    """

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
