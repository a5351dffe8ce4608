"""The collector: it removes Chunks that no record names, and run keys that no Run uses.

An operator can upload Chunks, or prepare a run key, and never publish. A Round that fails after its fold leaves the
Chunks of its Version. Nothing else removes them. The order keeps a publication in progress from losing a Chunk:

1. List the Chunks that nobody stored, requested or verified within ``GRACE_S``.
2. Read the record, and take all Chunks that it names from the list. If a part cannot be read, remove nothing.
3. Remove each Chunk that is left, unless it was stored, requested or verified in the meantime (``Blobs.renew``).

A process that is killed in between leaves files that the next pass removes.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final

from fanin.edge.bundles.manifest_json import parse_manifest
from fanin.protos.chunks import Artifact
from fanin.protos.errors import FaninError
from fanin.server.storage.stores import Files, Stores

LOG: Final = logging.getLogger("fanin.server.storage.collector")
GRACE_S: Final = 7 * 86400.0
"""Age of what is removed. A Round on a full disk waits up to a day between its fold and its publication."""
PERIOD_S: Final = 86400.0


class Collector:
    """Collects once at the start, and then once a day."""

    def __init__(self, stores: Stores, files: Files) -> None:
        self._stores, self._files = stores, files
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to collect."""
        self._task = asyncio.create_task(self._repeat(), name="collector")

    async def stop(self) -> None:
        """Collect no longer."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def collect(self) -> None:
        """Remove what is unused now. Raises FaninError or OSError if the record or a file cannot be read."""
        before_s = self._stores.wall() - GRACE_S
        num_keys = await self._stores.runs.remove_unused_keys(before_s)
        # (1)
        unused = await self._files.run(self._files.blobs.older_than, before_s)
        # (2)
        async for artifact in recorded_artifacts(self._stores, self._files):
            unused.difference_update([ref.sha256 for ref in artifact.chunks])
        # (3)
        num_chunks = await self._files.run(self._files.blobs.remove_older, unused, before_s)
        if num_chunks or num_keys:
            LOG.info("collected %d chunks and %d run keys that nothing uses", num_chunks, num_keys)

    async def _repeat(self) -> None:
        while True:
            try:
                await self.collect()
            except (FaninError, OSError) as exc:
                LOG.warning("nothing was collected, because the record or a file cannot be read: %s", exc)
            await asyncio.sleep(PERIOD_S)


async def recorded_artifacts(stores: Stores, files: Files) -> AsyncIterator[Artifact]:
    """Yield every Artifact that the record names. Raises Corrupted if a record or a manifest is damaged."""
    runs = stores.runs
    for bundle in await runs.bundles():
        yield bundle.manifest
        data = await files.run(files.blobs.read_artifact, "manifest", bundle.manifest)
        for artifact in parse_manifest(data).artifacts.values():
            yield artifact
    sequence: int | None = 0
    while sequence is not None:
        page, sequence = await runs.artifact_page(sequence)
        for artifact in page:
            yield artifact
