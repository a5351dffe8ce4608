"""The download of a Publication: its Chunks into the cache, its Bundle and Version verified.

The order is the security property (see ``models``). A Version number is recorded as the highest only after the
Version has verified.
"""

from collections.abc import Collection, Iterable, Iterator
from functools import partial

from fanin.clients.device.fetching import Fetching
from fanin.clients.device.models import (
    OpenedModel,
    graph_chunks,
    manifest_chunks,
    open_bundle,
    open_parameters,
    verify_version,
)
from fanin.clients.device.storage.cache import Cache
from fanin.clients.device.updates import Trainer
from fanin.clients.transport import Transport
from fanin.protos.chunks import ChunkRef
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import Publication


class Downloader:
    """Downloads models over a transport into a cache, with the graphs in the format of a trainer.

    ``num_bytes`` and ``num_bytes_resumed`` count the newest Assignment or Publication. A repeated fetch of it adds to
    the cost of its earlier tries.
    """

    def __init__(self, transport: Transport, cache: Cache, trusted: Collection[str], trainer: Trainer) -> None:
        self._transport = transport
        self._cache = cache
        self._trusted = trusted
        self._trainer = trainer
        self._download_id = ""
        self.num_bytes = 0
        self.num_bytes_resumed = 0

    def fetch(self, publication: Publication, needed: list[ChunkRef]) -> OpenedModel:
        """Download and verify a Publication's model.

        Args:
            publication: The Bundle and the Version.
            needed: Receives the model's Chunks before they are downloaded, so that the caller can keep them even
                after a failure.

        Raises:
            InvalidInput: The Bundle or the Version does not verify.
        """
        if self._download_id != publication.download_id:
            self._download_id, self.num_bytes, self.num_bytes_resumed = publication.download_id, 0, 0
        chunks, records = self._cache.chunks, self._cache.records
        needed += manifest_chunks(publication)
        self._fetch_chunks(publication, "manifest", needed)
        try:
            bundle = open_bundle(publication, self._trusted, chunks.read)
            verify_version(publication, bundle, records.highest_version(publication.run_id))
            graphs = graph_chunks(bundle, self._trainer.graph_format)
            needed += (*graphs, *publication.version.parameters.chunks)
            self._fetch_chunks(publication, "graphs", graphs)
            self._fetch_chunks(publication, "parameters", publication.version.parameters.chunks)
            parameters = open_parameters(publication, bundle, chunks.read)
        except InvalidInput:
            # The bytes may be damaged on this disk: remove damaged Chunks, and the next try downloads them again.
            chunks.remove_damaged((*publication.bundle.manifest.chunks, *publication.version.parameters.chunks))
            raise
        # Recorded last: a Version that did not verify must not block later ones.
        records.raise_version(publication.run_id, publication.version.number)
        return OpenedModel(bundle=bundle, parameters=parameters)

    def _fetch_chunks(self, publication: Publication, what: str, refs: Iterable[ChunkRef]) -> None:
        chunks = self._cache.chunks
        missing = tuple(ref for ref in dict.fromkeys(refs) if not chunks.has(ref))
        with Fetching(self._transport.download, publication.download_id, missing) as fetching:
            for ref in missing:
                try:
                    num_received = chunks.fetch(ref, partial(self._counted, fetching, ref))
                except InvalidInput as exc:
                    raise InvalidInput(f"{what}: {exc}; what the coordinator serves was changed") from exc
                self.num_bytes_resumed += ref.size_bytes - num_received

    def _counted(self, fetching: Fetching, ref: ChunkRef, offset: int) -> Iterator[bytes]:
        for data in fetching.chunk(ref, offset):
            # Count before the Chunk is complete: bytes of a broken connection cost traffic too.
            self.num_bytes += len(data)
            yield data
