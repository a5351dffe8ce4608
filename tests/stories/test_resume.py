"""Transfers resume where they stopped: down and up, after a SIGKILL of either side, and no Chunk is sent twice.

A coordinator that is killed is a process of its own. A device keeps all its state in its folder. So the production
client in this process, on the folder of a killed process, is that device after its return.
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from support import federations as f
from support.hosted import Hosted
from support.peers import Peer, pieces
from support.processes import Site

from fanin.clients.operator import Operator
from fanin.clients.transport import PIECE_BYTES, Connection, GrpcTransport
from fanin.clients.versions import next_version
from fanin.protos import messages as m
from fanin.protos.chunks import CHUNK_BYTES
from fanin.protos.errors import Unavailable
from fanin.protos.messages import Command, LoggedEvent, Pause, VersionPublished

SHAPES = {"a": (1000, 1500), "b": (3,)}
"""6 MB for each Update and Version: six Chunks."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A coordinator's folder, with its processes."""
    site = Site(tmp_path)
    yield site
    site.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    """A coordinator in this process."""
    host = Hosted(tmp_path).start()
    yield host
    host.stop()


class CountingTransport(GrpcTransport):
    """The production transport of a ``CountingPeer``."""

    def __init__(self, connection: Connection, device: "CountingPeer") -> None:
        super().__init__(connection, device.key)
        self._device = device

    def download(self, download: m.Download) -> Iterator[bytes]:
        """Count each piece as it arrives."""
        device = self._device
        if download.offset:
            device.offsets.append(download.offset)
        for data in super().download(download):
            device.num_received += len(data)
            yield data
            if device.num_received >= device.act_at:
                device.act_at = 1 << 60
                device.act()


class CountingPeer(Peer):
    """A device that counts its downloaded bytes, and acts once when they reach ``act_at``."""

    num_received = 0
    act_at = 1 << 60
    act: Callable[[], None]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.offsets: list[int] = []

    @contextmanager
    def transport(self) -> Iterator[GrpcTransport]:
        """See CountingTransport."""
        with self.connection() as connection:
            yield CountingTransport(connection, self)

    @property
    def num_needed(self) -> int:
        """Return the bytes of all downloads for the first Round.

        The parameters are zeros, so some Chunks are identical.
        """
        artifacts = self.bundle.manifest.artifacts
        refs = {ref.sha256: ref.size_bytes for name in ("graph", "initial") for ref in artifacts[name].chunks}
        return len(self.bundle.signed.data) + sum(refs.values())


def kill_and_serve(site: Site) -> None:
    """Kill the coordinator with SIGKILL, and start it again."""
    site.started[-1].kill()
    site.serve()


def begin_run(site: Site) -> list[Peer]:
    """Start a Run, and return its devices."""
    site.serve()
    bundle = f.bundle_in(site.folder, SHAPES)
    site.start_run(f.plan(), bundle, f.PUBLISHER)
    return f.peers(site, bundle, site.folder)


def only_version(entries: list[LoggedEvent]) -> VersionPublished:
    """Return the only Version of a Run."""
    (version,) = [entry.event for entry in entries if isinstance(entry.event, VersionPublished)]
    return version


def test_an_upload_resumes_after_the_coordinator_was_killed(site: Site, tmp_path: Path) -> None:
    first, *others = begin_run(site)
    first.begin()
    header, payload = first.update()
    first.send(header, pieces(payload, 0, 2 * CHUNK_BYTES + 1000))
    kill_and_serve(site)
    sizes: list[int] = []

    def read(offset: int, size_bytes: int) -> bytes:
        sizes.append(min(size_bytes, len(payload) - offset))
        return payload[offset : offset + size_bytes]

    with first.transport() as transport:
        assert transport.upload(header, read).update_state is m.UpdateState.ACCEPTED
    # The incomplete Chunk is sent again, but not the complete ones.
    assert sum(sizes) == len(payload) - 2 * CHUNK_BYTES
    for device in others:
        device.take_part()
    version = only_version(site.events())
    assert version.bytes_up_resumed == 2 * CHUNK_BYTES
    assert [version.version_sha256] == f.expected_digests(tmp_path / "undisturbed", SHAPES)


@contextmanager
def database_lock(site: Site) -> Iterator[None]:
    """Block the coordinator's next transaction."""
    with closing(sqlite3.connect(site.state / "fanin.db")) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield


def payloads(site: Site) -> list[Path]:
    """Return the payloads that have their final names."""
    return list((site.state / "updates").rglob("*.payload"))


@pytest.mark.nightly
def test_an_update_that_was_named_but_not_recorded_before_a_kill_is_not_sent_again(site: Site, tmp_path: Path) -> None:
    first, *others = begin_run(site)
    first.begin()
    header, payload = first.update()

    def send() -> None:
        with suppress(Unavailable):
            first.upload(header, payload)

    with database_lock(site):
        sender = threading.Thread(target=send)
        sender.start()
        deadline = time.monotonic() + 20.0
        while not payloads(site):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        site.started[-1].kill()
    sender.join()
    site.serve()
    assert len(payloads(site)) == 1
    offsets: list[int] = []

    def read(offset: int, size_bytes: int) -> bytes:
        offsets.append(offset)
        return payload[offset : offset + size_bytes]

    with first.transport() as transport:
        assert transport.upload(header, read).update_state is m.UpdateState.ACCEPTED
    assert offsets == []
    for device in others:
        device.take_part()
    version = only_version(site.events())
    assert version.bytes_up_resumed == len(payload)
    assert [version.version_sha256] == f.expected_digests(tmp_path / "undisturbed", SHAPES)
    assert len(payloads(site)) == f.NUM_DEVICES
    assert list((site.state / "spool").iterdir()) == []


def test_an_update_that_was_accepted_before_a_kill_is_not_sent_again(site: Site) -> None:
    first, *_ = begin_run(site)
    first.begin()
    header, payload = first.update()
    assert first.upload(header, payload).update_state is m.UpdateState.ACCEPTED
    kill_and_serve(site)
    (reply,) = first.send(header, [])
    assert reply.update_state is m.UpdateState.ACCEPTED


@pytest.mark.nightly
def test_a_download_resumes_after_the_coordinator_was_killed(site: Site) -> None:
    first, *others = begin_run(site)
    device = CountingPeer(site, first.bundle, 0, first.folder)
    device.act_at = CHUNK_BYTES + 3 * PIECE_BYTES

    def kill() -> None:
        kill_and_serve(site)
        # Data that gRPC has read from the connection already must not count.
        raise Unavailable("the line broke")

    device.act = kill
    device.take_part()
    (offset,) = device.offsets
    assert 0 < offset < CHUNK_BYTES
    assert device.num_received == device.num_needed
    for other in others:
        other.take_part()
    assert only_version(site.events()).bytes_down_resumed == offset


def test_a_download_resumes_after_the_device_was_killed(site: Site) -> None:
    first, *_ = begin_run(site)
    process = site.device(0, die_at=f"down:{CHUNK_BYTES + 3 * PIECE_BYTES}")
    assert process.wait(60.0) == -9, process.text()
    sizes = {path.name: path.stat().st_size for path in (first.folder / "chunks").iterdir()}
    (part,) = [size for name, size in sizes.items() if name.endswith(".part")]
    assert 0 < part < CHUNK_BYTES < sum(sizes.values())
    device = CountingPeer(site, first.bundle, 0, first.folder)
    device.take_part()
    assert device.offsets == [part]
    assert device.num_received == device.num_needed - sum(sizes.values())


def test_a_version_that_changed_meanwhile_is_fetched_from_its_beginning(host: Hosted, tmp_path: Path) -> None:
    bundle = f.bundle_in(tmp_path, SHAPES)
    host.start_run(f.plan(), bundle, f.PUBLISHER)
    device = CountingPeer(host, bundle, 0, tmp_path / "device-0")
    device.act_at = CHUNK_BYTES + 3 * PIECE_BYTES
    with device.transport() as transport:
        client = device.client(transport, 1)

        def cut() -> None:
            client.stop()
            raise Unavailable("the line broke")

        device.act = cut
        client.run()
    assert len(list((device.folder / "chunks").glob("*.part"))) == 1
    with host.operator() as operator:
        size_bytes = change_version(operator, device)
    device.num_received = 0
    for peer in (device, *f.peers(host, bundle, tmp_path)[1:]):
        peer.take_part()
    assert device.offsets == []
    assert device.num_received == size_bytes
    assert [event.parent for event in host.published_versions()] == [0, 1]


def change_version(operator: Operator, device: Peer) -> int:
    """Replace the Version for which a Round is open, and return the size of the new one in bytes."""
    operator.command(Command(command_id="pause", run_id="run", what=Pause()))
    parent = operator.version("run").version
    flat = np.arange(device.bundle.manifest.table.num_values, dtype=np.float32)
    version, data = next_version(parent, flat, device.bundle, f.PUBLISHER)
    operator.publish_version(version, data, 1)
    return len(data)


def test_an_upload_ends_at_once_when_its_round_has_closed(host: Hosted, tmp_path: Path) -> None:
    bundle = f.bundle_in(tmp_path, {"a": (1000, 2500)})
    host.start_run(f.plan(num_spare=1), bundle, f.PUBLISHER)
    late_device, *timely_devices = f.peers(host, bundle, tmp_path, f.NUM_DEVICES + 1)
    for device in (late_device, *timely_devices):
        device.begin()
    header, payload = late_device.update()
    sizes: list[int] = []

    def read(offset: int, size_bytes: int) -> bytes:
        if offset == 2 * CHUNK_BYTES:
            for device in timely_devices:
                assert device.upload(*device.update()).update_state is m.UpdateState.ACCEPTED
            host.published_versions()
        if offset >= 2 * CHUNK_BYTES:
            sizes.append(size_bytes)
            # A slow connection: over loopback, all pieces would be sent before the first reply.
            time.sleep(0.2)
        return payload[offset : offset + size_bytes]

    with late_device.transport() as transport:
        reply = transport.upload(header, read)
    assert (reply.round_state, reply.update_state) == (m.RoundState.CLOSED, m.UpdateState.DISCARDED)
    # The device announced 10 MB. It learns of the end with the reply to its next piece.
    assert sum(sizes) <= CHUNK_BYTES
