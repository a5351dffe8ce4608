"""The collector: unused Chunks and run keys go after a while, and nothing that the record names or will name."""

import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.virtual import PUBLISHER, Place, bundle_in, open_place, plan, start

from fanin.clients.operator import ref_of
from fanin.clients.versions import next_version
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.tensors import sha256_hex
from fanin.protos.chunks import cut
from fanin.protos.errors import Conflict, Corrupted, NotFound
from fanin.protos.messages import Command, Stop
from fanin.server.aggregation.verify import verify_run
from fanin.server.storage.blobs import FolderBlobs
from fanin.server.storage.collector import GRACE_S, Collector
from fanin.simulation import run_virtual

UNUSED = b"never published"
DAY_S = 86400.0


def play(folder: Path, story: Callable[[Place, Bundle, Collector], Awaitable[None]]) -> None:
    """Play a story with a Run that was started, over the clock of the machine."""

    async def main() -> None:
        place = open_place(folder)
        stores = replace(place.state.stores, wall=time.time)
        await start(place.runs, bundle_in(folder), plan())
        await story(place, bundle_in(folder), Collector(stores, place.state.files))
        assert [verdict.problem for verdict in verify_run(place.state, "run") if verdict.problem] == []
        await place.runs.stop()

    run_virtual(main())


def age(folder: Path, age_s: float = GRACE_S + DAY_S) -> None:
    """Let all blobs become as old as this."""
    for path in (folder / "state" / "blobs").glob("*/*"):
        os.utime(path, (time.time() - age_s,) * 2)


def stored(folder: Path) -> set[str]:
    """Return the digests of all blobs."""
    return {path.name for path in (folder / "state" / "blobs").glob("*/*")}


def test_chunks_that_were_never_published_are_removed_after_a_week_and_no_others(tmp_path: Path) -> None:
    async def story(place: Place, bundle: Bundle, collector: Collector) -> None:
        # A Version from outside has Chunks of its own, and its Run stays.
        await place.runs.command(Command(command_id="stop", run_id="run", what=Stop()))
        newest = await place.state.stores.runs.newest_version("run")
        version, data = next_version(newest, np.ones(22, np.float32), bundle, PUBLISHER)
        for ref, piece in cut(data):
            await place.runs.put_chunk(ref.sha256, piece)
        await place.runs.publish_version(version, 0)
        recorded = stored(tmp_path)
        await place.runs.put_chunk(sha256_hex(UNUSED), UNUSED)
        age(tmp_path, GRACE_S - DAY_S)
        await collector.collect()
        assert stored(tmp_path) == recorded | {sha256_hex(UNUSED)}
        age(tmp_path)
        await collector.collect()
        assert stored(tmp_path) == recorded
        with pytest.raises(NotFound):
            await place.runs.get_chunk(sha256_hex(UNUSED), 0)

    play(tmp_path, story)


@pytest.mark.parametrize("how", ["put", "missing", "publish"])
def test_a_publication_in_progress_keeps_its_old_chunks(tmp_path: Path, how: str) -> None:
    """Chunks were uploaded long ago. A publication finds them just before the collector removes what it listed."""
    other = tmp_path / "other"
    other.mkdir()

    async def story(place: Place, _: Bundle, collector: Collector) -> None:
        bundle = bundle_in(other, scaffold=True)
        pieces = [bundle.signed.data, *(bundle.artifact(name) for name in bundle.manifest.artifacts)]
        chunks = {ref.sha256: piece for data in pieces for ref, piece in cut(data)}
        for digest, piece in chunks.items():
            await place.runs.put_chunk(digest, piece)
        age(tmp_path)
        blobs = place.state.files.blobs
        assert isinstance(blobs, FolderBlobs)
        listed = blobs.older_than(time.time() - GRACE_S)
        assert chunks.keys() <= listed
        if how == "put":
            for digest, piece in chunks.items():
                await place.runs.put_chunk(digest, piece)
        elif how == "missing":
            assert await place.runs.missing_chunks(chunks) == ()
        else:
            await place.runs.publish_bundle(ref_of(bundle.signed))
        recorded = {ref.sha256 for each in await place.state.stores.runs.bundles() for ref in each.manifest.chunks}
        blobs.remove_older(listed - recorded, time.time() - GRACE_S)
        assert await place.runs.publish_bundle(ref_of(bundle.signed)) == bundle.sha256
        age(tmp_path)
        await collector.collect()
        assert chunks.keys() <= stored(tmp_path)

    play(tmp_path, story)


@pytest.mark.parametrize(
    "statement", ["UPDATE versions SET version_proto = x'ff'", "UPDATE bundles SET bundle_proto = x'ff'"]
)
def test_nothing_is_removed_while_a_part_of_the_record_cannot_be_read(tmp_path: Path, statement: str) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan())
        await place.runs.put_chunk(sha256_hex(UNUSED), UNUSED)
        before = stored(tmp_path)
        age(tmp_path)
        with place.state.runs._engine.begin() as connection:
            connection.exec_driver_sql(statement)
        with pytest.raises(Corrupted):
            await Collector(replace(place.state.stores, wall=time.time), place.state.files).collect()
        assert stored(tmp_path) == before
        await place.runs.stop()

    run_virtual(main())


def test_run_keys_without_a_run_are_removed_after_a_week(tmp_path: Path) -> None:
    async def story(place: Place, _: Bundle, collector: Collector) -> None:
        runs = place.state.stores.runs
        own = await place.runs.prepare_run("run")
        for run_id, epoch in (("never", 1), ("run", 2)):
            await runs.run_key(run_id, epoch, b"old", time.time() - GRACE_S - DAY_S)
        assert await runs.run_key("new", 1, b"new", time.time()) == b"new"
        await collector.collect()
        assert await runs.run_key("new", 1, b"other", 0.0) == b"new"
        assert await runs.run_key("never", 1, b"again", 0.0) == b"again"
        assert await runs.run_key("run", 2, b"again", 0.0) == b"again"
        assert await place.runs.prepare_run("run") == own
        with pytest.raises(Conflict):
            await runs.run_key("run", 3, b"later", 0.0)

    play(tmp_path, story)
