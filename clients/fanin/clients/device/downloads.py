"""The download of a Publication: its Chunks into the device's folder, its Bundle and Version verified.

The order is the security property (see ``models``). The epoch and number of a Version are recorded as the highest only
after the Version has verified.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
    verify_version,
)
from fanin.clients.device.storage.protocols import DeviceFolder
from fanin.edge.bundles.bundle import Bundle
from fanin.protos.chunks import ChunkRef
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import Publication

ReceivePieces = Callable[[int], Iterator[bytes]]
"""Streams the bytes of one Chunk from an offset."""
StoreChunk = Callable[[ChunkRef, ReceivePieces], None]
"""Stores one Chunk from its stream."""


class DownloadCalls(Protocol):
    """The call of a Downloader."""

    async def download(self, download_id: str, missing: tuple[ChunkRef, ...], store: StoreChunk) -> None:
        """Download Chunks in their order: call ``store(ref, receive)`` for each. Its exception ends the call."""
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
            tensors = auxiliary_chunks(publication, bundle, wanted.auxiliary)
            all_graphs = file_chunks(bundle, bundle.manifest.files(self._graph_format))
            needed += (*all_graphs, *publication.version.parameters.chunks, *tensors)
            await get("graphs", file_chunks(bundle, wanted.files(bundle)))
            await get("parameters", publication.version.parameters.chunks)
            await get("auxiliary tensors", tensors)
            parameters = open_parameters(publication, bundle, chunks.read)
            opened = {name: open_auxiliary(publication, bundle, name, chunks.read) for name in wanted.auxiliary}
        except InvalidInput:
            # The bytes may be damaged on this disk: remove damaged Chunks, and the next try downloads them again.
            chunks.remove_damaged(needed)
            raise
        # Recorded last: a Version that did not verify must not block later ones.
        records.raise_version(publication.run_id, publication.version.order)
        return OpenedModel(bundle=bundle, parameters=parameters, auxiliary=opened)

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
