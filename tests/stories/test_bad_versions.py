"""Bundles and Versions that were tampered with: the device gives up with a clear reason and keeps no bad bytes.

The coordinator's record does not change, and the Round ends with the bits of an undisturbed Round.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support import federations as f
from support.hosted import Hosted
from support.peers import Peer
from support.snapshot import snapshot

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change
from fanin.edge.bundles.keys import SigningKey
from fanin.protos import messages as m
from fanin.protos.chunks import MAX_CHUNK_BYTES, Artifact, ChunkRef
from fanin.simulation import SyntheticTrainer

NO_GRID = "training: grid: got 0 blocks, expected 2 [FN-0842]"
STRANGER = SigningKey(bytes(range(1, 33)))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """A coordinator with an open Round for three devices, and room for one more."""
    host = Hosted(tmp_path_factory.mktemp("host")).start()
    host.start_run(f.plan(num_spare=1), f.bundle_in(host.folder), f.PUBLISHER)
    yield host
    host.stop()


@pytest.fixture
def device(host: Hosted, devices: list[Peer], tmp_path: Path) -> Peer:
    """A new device with an Assignment. A device that gave up in the Round before would have to pause."""
    device = Peer(host, devices[0].bundle, len(devices), tmp_path / "device")
    device.begin()
    return device


def chunk_of(device: Peer, part: str) -> str:
    """Return the digest of the first Chunk of the manifest, of an artifact, or of the Version."""
    match part:
        case "manifest":
            return device.work.bundle.manifest.chunks[0].sha256
        case "parameters":
            return device.work.version.parameters.chunks[0].sha256
        case _:
            return device.bundle.manifest.artifacts["graph"].chunks[0].sha256


def check_cache(device: Peer) -> None:
    """Check that each file in the device's cache matches its name, and that no download is in progress."""
    for path in (device.folder / "chunks").iterdir():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name


@pytest.mark.parametrize(
    "damage", [lambda data: b"!" + data[1:], lambda data: data[: len(data) // 2]], ids=["changed", "cut"]
)
@pytest.mark.parametrize("part", ["manifest", "graphs", "parameters"])
def test_a_damaged_blob_is_not_served_and_a_device_resumes_after_its_repair(
    host: Hosted, device: Peer, part: str, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    name = chunk_of(device, part)
    blob = host.state / "blobs" / name[:2] / name
    content = blob.read_bytes()
    blob.write_bytes(damage(content))
    before = snapshot(host.state)
    reasons: list[str] = []
    thread = threading.Thread(target=lambda: reasons.append(device.give_up(without_grid)))
    thread.start()
    try:
        deadline = time.monotonic() + 30.0
        while "fetch: the coordinator's own state does not verify" not in caplog.text:
            assert time.monotonic() < deadline, caplog.text
            time.sleep(0.02)
        assert snapshot(host.state) == before
        assert f"blobs: chunk {name[:8]}..: damaged on disk (got " in caplog.text
    finally:
        # An operator repairs it by publishing the same content again.
        with host.operator() as operator:
            operator.publish_bundle(device.bundle)
        thread.join(60.0)
    assert blob.read_bytes() == content
    assert reasons == [NO_GRID]
    check_cache(device)


def with_version(**changes: object) -> Callable[[m.Assignment], m.Assignment]:
    """Return a function that changes the Version of an Assignment."""
    return lambda work: replace(work, version=replace(work.version, **changes))


def without_grid(work: m.Assignment) -> m.Assignment:
    """Return an Assignment without a grid.

    The device verifies all downloads, and then gives up because it cannot encode.
    """
    return replace(work, grid=())


def large_manifest(work: m.Assignment) -> m.Assignment:
    """Return an Assignment whose manifest would fill a device's memory."""
    refs = tuple(ChunkRef(sha256=f"{index:064x}", size_bytes=MAX_CHUNK_BYTES) for index in range(9))
    manifest = Artifact(sha256="0" * 64, size_bytes=9 * MAX_CHUNK_BYTES, chunks=refs)
    return replace(work, bundle=replace(work.bundle, manifest=manifest))


def other_digest(work: m.Assignment) -> m.Assignment:
    """Return an Assignment whose manifest has valid Chunks, but another digest."""
    manifest = replace(work.bundle.manifest, sha256="0" * 64)
    return replace(work, bundle=replace(work.bundle, manifest=manifest))


ALTERATIONS: dict[str, tuple[Callable[[m.Assignment], m.Assignment], str]] = {
    "signature": (with_version(signature=bytes(64)), "version 0 of run run: the signature does not match; it was ch"),
    "number": (with_version(number=4), "version 4 of run run: the signature does not match; it was changed after it"),
    "signer": (
        with_version(public_key=STRANGER.public),
        f"version 0 of run run: signed by {STRANGER.public[:8]}.., expected the publisher {f.PUBLISHER.public[:8]}..",
    ),
    "bundle of the version": (with_version(bundle_sha256="0" * 64), "version 0 of run run: is of bundle 00000000.."),
    "run": (lambda work: replace(work, run_id="other"), "is of bundle"),
    "publisher": (
        lambda work: replace(work, bundle=replace(work.bundle, public_key=STRANGER.public)),
        f"bundle: signed by key {STRANGER.public[:8]}.., expected one of ['{f.PUBLISHER.public[:8]}..']; pass that pub",
    ),
    "signature of the bundle": (
        lambda work: replace(work, bundle=replace(work.bundle, signature=bytes(64))),
        "the signature does not match the manifest; it was changed after it was signed; download it again",
    ),
    "digest of the manifest": (other_digest, "bundle: manifest: digest mismatch (got "),
    "size of the manifest": (large_manifest, "bundle: got a manifest of 28311552 bytes, expected at most 3145728"),
    "codec": (
        lambda work: replace(work, codec=m.CodecSpec(name="int3", max_shift=0)),
        "codec.name: got 'int3', expected",
    ),
}


@pytest.mark.parametrize("case", ALTERATIONS)
def test_an_assignment_that_was_changed_on_its_way(host: Hosted, device: Peer, case: str) -> None:
    alter, text = ALTERATIONS[case]
    before = snapshot(host.state)
    assert text in device.give_up(alter)
    assert snapshot(host.state) == before
    check_cache(device)


def test_a_version_older_than_one_that_the_device_has_seen(host: Hosted, devices: list[Peer]) -> None:
    device = devices[1]
    device.cache.records.raise_version("run", (1, 5))
    before = snapshot(host.state)
    assert device.give_up() == (
        "version 0 of run run: older than version 5, which this device has verified; rejected [FN-0374]"
    )
    assert snapshot(host.state) == before
    assert device.cache.records.highest_version("run") == (1, 5)
    (device.folder / "seen.json").unlink()


@dataclass(frozen=True)
class LoadingTrainer:
    """A trainer that loads its graph as a runtime does, and then draws its Update."""

    inner: SyntheticTrainer
    runtime: str = "synthetic 1"
    graph_format: str = "onnx"

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        """Read the graph, verified, before anything else."""
        assert model.bundle.graph("train", "onnx") == b"not a graph"
        return self.inner.train(model, assignment, should_continue)


class LoadingPeer(Peer):
    """A device that loads its graphs."""

    def trainer(self) -> LoadingTrainer:
        """See LoadingTrainer."""
        return LoadingTrainer(super().trainer())


@pytest.mark.parametrize("part", ["manifest", "graphs", "parameters"])
def test_a_chunk_that_was_damaged_on_the_devices_own_disk_is_downloaded_again(
    host: Hosted, device: Peer, part: str
) -> None:
    work = device.work
    device = LoadingPeer(host, device.bundle, device.index, device.folder)
    device.work = work
    assert device.give_up(without_grid) == NO_GRID
    chunk = device.folder / "chunks" / chunk_of(device, part)
    chunk.write_bytes(b"!" + chunk.read_bytes()[1:])
    before = snapshot(host.state)
    assert "digest mismatch (got " in device.give_up(without_grid)
    assert not chunk.exists()
    assert device.give_up(without_grid) == NO_GRID
    check_cache(device)
    assert snapshot(host.state) == before


def test_after_all_that_the_round_ends_bit_identical(host: Hosted, devices: list[Peer], tmp_path: Path) -> None:
    for device in devices:
        device.take_part()
    assert [event.version_sha256 for event in host.published_versions()] == f.expected_digests(tmp_path)
