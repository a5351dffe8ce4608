"""The pruner: it removes what the retention of each Run does not keep, at the start and then every hour.

The order of one pass keeps every reader from a wrong promise:

1. Record what is removed (``RetentionStore.remove``). From then on ``verify``, rollbacks and fetches know it.
2. Remove the payloads of the Rounds that are recorded as removed.
3. Remove the Chunks of the Versions that are recorded as removed, unless another record names them or somebody stored
   or requested them meanwhile (``Blobs.renew``).
4. Record that the bytes are gone.
5. Replace the rows of the Updates of these Rounds by a digest and counts, once no later Round can count an Update that
   was made for them (``RetentionStore.forget``), and return the free space of the database to the disk.

Each step may be repeated. A process that is killed in between leaves bytes that the next pass removes.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from fanin.protos.chunks import ChunkRef
from fanin.protos.errors import FaninError, NotFound
from fanin.protos.messages import Prune, Pruned
from fanin.protos.plans import RetentionPlan
from fanin.protos.plans.retention import check_needed
from fanin.server.storage.collector import recorded_artifacts
from fanin.server.storage.protocols.retention import PendingRound, PendingVersion
from fanin.server.storage.retention import GRACE_S, removable, young
from fanin.server.storage.stores import Files, Stores

LOG: Final = logging.getLogger("fanin.server.care.pruner")
PERIOD_S: Final = 3600.0


class Pruner:
    """Removes what the retention of each Run does not keep.

    Args:
        stores: The record.
        files: Blobs and spool.
        default: The retention of Runs whose Plan has none.
    """

    def __init__(self, stores: Stores, files: Files, default: RetentionPlan | None = None) -> None:
        self._stores, self._files = stores, files
        self._default = default or RetentionPlan()
        self._task: asyncio.Task[None] | None = None
        # An operator's call and the hourly pass remove one after the other.
        self._removing = asyncio.Lock()

    def start(self) -> None:
        """Start to prune."""
        self._task = asyncio.create_task(self._repeat(), name="pruner")

    async def stop(self) -> None:
        """Prune no longer."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def prune(self, request: Prune) -> Pruned:
        """Remove what the retention of one Run does not keep, or return what would go.

        Raises:
            NotFound: There is no such Run.
            InvalidPlan: The limits contradict each other.
        """
        run_id, stores = request.run_id, self._stores
        run = await stores.runs.run(run_id)
        if run is None:
            raise NotFound(f"run {run_id}: not at this coordinator; fanin runs lists its runs", code="FN-0610")
        plan = run.start.plan
        limits = request.retention or plan.retention or self._default
        check_needed(limits, plan.aggregation.max_staleness)
        async with self._removing:
            facts, now_s = await stores.retention.facts(run_id), stores.wall()
            what, spared = removable(facts, limits, now_s), young(facts, limits, now_s)
            versions, rounds, num_events = await stores.retention.contents(run_id, what)
            updates = [header for each in rounds for header, _ in each.updates]
            pruned = Pruned(
                num_versions=len(versions),
                version_bytes=sum(ref.size_bytes for ref in await self._unshared(versions)),
                num_rounds=len(rounds),
                num_updates=len(updates),
                update_bytes=sum(header.payload.size_bytes for header in updates),
                num_events=num_events,
                applied=request.apply,
                retention=limits,
                num_stored_versions=len(facts.versions),
                num_stored_rounds=len(facts.rounds),
                num_young_versions=spared.versions,
                num_young_rounds=spared.rounds,
                old_enough_at=spared.until_s,
            )
            if request.apply:
                await stores.retention.remove(run_id, limits, stores.wall())
                await self._remove_bytes()
        return pruned

    async def prune_all(self) -> None:
        """Remove what the retention of every Run does not keep. A Run whose record is damaged is left alone."""
        async with self._removing:
            for run_id in await self._stores.runs.run_ids():
                try:
                    run = await self._stores.runs.run(run_id)
                    limits = self._default if run is None else run.start.plan.retention or self._default
                    what = await self._stores.retention.remove(run_id, limits, self._stores.wall()) if limits else None
                except FaninError as exc:
                    LOG.warning("run %s: nothing was pruned: %s", run_id, exc)
                    continue
                if what is not None and (what.versions or what.rounds):
                    LOG.info(
                        "run %s: retention removes the parameters of %d versions and the updates of %d rounds",
                        *(run_id, len(what.versions), len(what.rounds)),
                    )
            await self._remove_bytes()

    async def _remove_bytes(self) -> None:
        """Remove what is recorded as removed, also by a process that was killed."""
        retention, files = self._stores.retention, self._files
        before: tuple[PendingRound, ...] = ()
        # A Round stays pending while a reader of the database keeps the seed of its noise in the log.
        while (rounds := await retention.pending_rounds()) and rounds != before:
            for pending in rounds:
                await files.run(files.spool.remove_committed, pending.updates)
                await retention.finish(pending, self._stores.wall())
            before = rounds
        await self._forget()
        versions = await retention.pending_versions()
        if not versions:
            return
        before_s = await self._before_s()
        unshared = {ref.sha256 for ref in await self._unrecorded(versions)}
        await files.run(files.blobs.remove_older, unshared, before_s)
        left = await files.run(files.blobs.stored, unshared)
        for version in versions:
            if left.isdisjoint(ref.sha256 for artifact in version.artifacts for ref in artifact.chunks):
                await retention.finish(version, self._stores.wall())

    async def _forget(self) -> None:
        """Forget the sets of the Rounds whose Updates are gone. A Run whose record is damaged is left alone."""
        retention, has_forgotten = self._stores.retention, False
        for run_id in await self._stores.runs.run_ids():
            try:
                while await retention.forget(run_id):
                    has_forgotten = True
            except FaninError as exc:
                LOG.warning("run %s: the rows of removed updates stay: %s", run_id, exc)
        while has_forgotten and await retention.give_back():
            pass

    async def _before_s(self) -> float:
        """Return the time after which nobody may have stored or requested a Chunk that is removed.

        The fold of a Round that is not published yet may have stored a Chunk that an old Version had, too.
        """
        times = [self._stores.wall() - GRACE_S]
        for run_id in await self._stores.runs.run_ids():
            unfinished = await self._stores.rounds.unfinished(run_id)
            times += [] if unfinished is None else [unfinished.opened_at_s]
        return min(times)

    async def _unshared(self, versions: Iterable[PendingVersion]) -> list[ChunkRef]:
        """Return the Chunks of Versions, not recorded as removed yet, that nothing else in the record names."""
        chunks = _chunks(versions)
        named = Counter(ref.sha256 for ref in chunks)
        async for artifact in recorded_artifacts(self._stores, self._files):
            named.subtract(ref.sha256 for ref in artifact.chunks if ref.sha256 in named)
        return [ref for ref in dict.fromkeys(chunks) if named[ref.sha256] == 0]

    async def _unrecorded(self, versions: Iterable[PendingVersion]) -> list[ChunkRef]:
        """Return the Chunks of Versions, recorded as removed, that the record does not name."""
        chunks = {ref.sha256: ref for ref in _chunks(versions)}
        async for artifact in recorded_artifacts(self._stores, self._files):
            for ref in artifact.chunks:
                chunks.pop(ref.sha256, None)
        return list(chunks.values())

    async def _repeat(self) -> None:
        while True:
            try:
                await self.prune_all()
            except (FaninError, OSError) as exc:
                LOG.warning("what retention removes stays for now, because it cannot be read or removed: %s", exc)
            await asyncio.sleep(PERIOD_S)


def _chunks(versions: Iterable[PendingVersion]) -> list[ChunkRef]:
    return [ref for version in versions for artifact in version.artifacts for ref in artifact.chunks]
