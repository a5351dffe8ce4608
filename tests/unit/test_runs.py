"""External Bundles and Versions that do not verify: the coordinator refuses them before it changes any state."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.errors import raises
from support.values import PUBLISHER, plan

from fanin.clients.operator import ref_of
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.versions import sign_delegation, sign_version
from fanin.edge.tensors import TensorTable, encode_parameters
from fanin.protos.chunks import Artifact, artifact_of, cut
from fanin.protos.errors import Corrupted, InvalidBundle, InvalidVersion, NotFound
from fanin.protos.messages import StartRun, Version
from fanin.server.folder import open_state
from fanin.server.rounds.worker import LogObserver
from fanin.server.runs.catalog import Runs
from fanin.server.storage.disk import Durability
from fanin.server.storage.lanes import inline
from fanin.server.storage.stores import CoordinatorState
from fanin.simulation import synthetic_bundle

SHAPES = {"a": (2, 3), "b": (4,)}
TABLE = TensorTable.of(SHAPES)


async def put(runs: Runs, data: bytes) -> None:
    for ref, piece in cut(data):
        await runs.put_chunk(ref.sha256, piece)


async def start_run(runs: Runs, bundle: Bundle) -> Version:
    """Start the Run "run". Return its Version 0."""
    for data in (bundle.signed.data, *(bundle.artifact(name) for name in bundle.manifest.artifacts)):
        await put(runs, data)
    await runs.publish_bundle(ref_of(bundle.signed))
    ids = {"run_id": "run", "bundle_sha256": bundle.sha256}
    version = sign_version(PUBLISHER, parent=None, parameters=bundle.manifest.artifacts["initial"], **ids)
    delegation = sign_delegation(PUBLISHER, run_public_key=await runs.prepare_run("run"), **ids)
    await runs.start_run(StartRun(run_id="run", plan=plan(), version=version, delegation=delegation))
    return version


async def publish(folder: Path, data: bytes, sha256: str = "", missing: bool = False) -> None:
    """Publish these bytes as Version 1 of a Run, under their digest or under ``sha256``."""
    state = open_state(folder / "state", Durability.PROCESS, (inline, inline), time.time)
    runs, bundle = (
        Runs(state.stores, state.files, LogObserver()),
        synthetic_bundle(folder / "bundle", PUBLISHER, SHAPES),
    )
    first = await start_run(runs, bundle)
    try:
        if not missing:
            await put(runs, data)
        artifact = artifact_of(data)
        declared_artifact = replace(artifact, sha256=sha256 or artifact.sha256)
        version = sign_version(
            PUBLISHER, parent=first, run_id="run", bundle_sha256=bundle.sha256, parameters=declared_artifact
        )
        await runs.publish_version(version, 0)
    finally:
        assert (await runs.version("run", None)).version == first
        await runs.stop()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_parameters_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    flat = np.zeros(TABLE.num_values, np.float32)
    flat[3] = value
    with raises(InvalidVersion, "parameters: got NaN or infinity, expected finite values; the training diverged"):
        asyncio.run(publish(tmp_path, encode_parameters(TABLE, flat)))


def test_chunks_that_differ_from_the_artifact_are_an_invalid_version(tmp_path: Path) -> None:
    data = encode_parameters(TABLE, np.ones(TABLE.num_values, np.float32))
    with pytest.raises(InvalidVersion, match="FN-0117"):
        asyncio.run(publish(tmp_path, data, sha256="0" * 64))


def test_chunks_that_were_never_uploaded_are_reported(tmp_path: Path) -> None:
    data = encode_parameters(TABLE, np.ones(TABLE.num_values, np.float32))
    with pytest.raises(NotFound, match="FN-0520"):
        asyncio.run(publish(tmp_path, data, missing=True))


def open_runs(folder: Path) -> tuple[Runs, CoordinatorState]:
    state = open_state(folder / "state", Durability.PROCESS, (inline, inline), time.time)
    return Runs(state.stores, state.files, LogObserver()), state


async def send(runs: Runs, bundle: Bundle) -> str:
    """Publish a Bundle as an operator does: send only the Chunks that the coordinator lacks."""
    data = (bundle.signed.data, *(bundle.artifact(name) for name in bundle.manifest.artifacts))
    pieces = {ref.sha256: piece for each in data for ref, piece in cut(each)}
    for sha256 in await runs.missing_chunks(pieces):
        await runs.put_chunk(sha256, pieces[sha256])
    return await runs.publish_bundle(ref_of(bundle.signed))


def test_a_manifest_that_differs_from_its_chunks_is_an_invalid_bundle(tmp_path: Path) -> None:
    async def main() -> None:
        runs, state = open_runs(tmp_path)
        bundle = synthetic_bundle(tmp_path / "bundle", PUBLISHER, SHAPES)
        await send(runs, bundle)
        good = ref_of(bundle.signed)
        (chunk,) = good.manifest.chunks
        size = good.manifest.size_bytes
        other = Artifact(sha256="0" * 64, size_bytes=size, chunks=good.manifest.chunks)
        short = Artifact(sha256=chunk.sha256, size_bytes=size - 1, chunks=(replace(chunk, size_bytes=size - 1),))
        for manifest, text in (
            (other, f"bundle: manifest: digest mismatch (got {chunk.sha256[:8]}.., expected 00000000..)"),
            (short, f"bundle: manifest: chunk 0: got {size} bytes, expected {size - 1}"),
        ):
            with raises(InvalidBundle, text):
                await runs.publish_bundle(replace(good, manifest=manifest))
        assert state.runs.bundle("0" * 64) is None

    asyncio.run(main())


@pytest.mark.parametrize("artifact", ["manifest", "initial"])
@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"!" + data[1:], lambda _: b""])
def test_publishing_the_same_bundle_again_repairs_a_damaged_chunk(
    tmp_path: Path, artifact: str, damage: Callable[[bytes], bytes]
) -> None:
    async def main() -> None:
        runs, state = open_runs(tmp_path)
        bundle = synthetic_bundle(tmp_path / "bundle", PUBLISHER, SHAPES)
        await send(runs, bundle)
        part = {"manifest": ref_of(bundle.signed).manifest, **bundle.manifest.artifacts}[artifact]
        (ref,) = part.chunks
        path = tmp_path / "state" / "blobs" / ref.sha256[:2] / ref.sha256
        good = path.read_bytes()
        path.write_bytes(damage(good))
        with pytest.raises(Corrupted, match=rf"^blobs: chunk {ref.sha256[:8]}\.\.: damaged on disk"):
            await runs.get_chunk(ref.sha256, 0)
        with pytest.raises(Corrupted, match="FN-0521"):
            await runs.publish_bundle(ref_of(bundle.signed))
        assert await send(runs, bundle) == bundle.sha256
        assert await runs.get_chunk(ref.sha256, 0) == path.read_bytes() == good
        # The coordinator does not request a Chunk that is intact.
        assert await runs.missing_chunks([ref.sha256]) == ()
        assert state.runs.bundle(bundle.sha256) == ref_of(bundle.signed)

    asyncio.run(main())
