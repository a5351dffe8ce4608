"""A device whose charger is unplugged in the middle of each step stops at once, and loses nothing."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import federations as f
from support.charger import NUM_BATCHES
from support.processes import SUPPORT, Running, Site, start

from fanin.clients.transport import PIECE_BYTES
from fanin.edge.bundles.bundle import Bundle
from fanin.protos.chunks import CHUNK_BYTES
from fanin.protos.messages import VersionPublished

SHAPES = {"a": (1000, 1500), "b": (3,)}
"""6 MB for each Update and Version: six Chunks."""
DOWN_AT = 2 * PIECE_BYTES
BATCH_AT = 3
UP_AT = 2 * CHUNK_BYTES + PIECE_BYTES
PAUSED = "paused (may_work no longer holds)"


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[tuple[Site, Site]]:
    """Two coordinators: one for an undisturbed device, and one for a device whose charger is unplugged."""
    pair = Site(tmp_path / "undisturbed"), Site(tmp_path / "unplugged")
    for site in pair:
        site.folder.mkdir()
        site.serve()
    yield pair
    for site in pair:
        site.close()


def start_run(site: Site) -> Bundle:
    """Start a Run, and return its Bundle."""
    bundle = f.bundle_in(site.folder, SHAPES)
    site.start_run(f.plan(), bundle, f.PUBLISHER)
    return bundle


def start_device(site: Site, *unplug_points: int) -> Running:
    """Start the process of the first device."""
    script = str(SUPPORT / "charger.py")
    process = start((script, str(site.folder), *map(str, unplug_points)), site.folder / "device-0.log")
    site.started.append(process)
    return process


def finish_round(site: Site, bundle: Bundle) -> VersionPublished:
    """Let the other devices take part, and return the Version of the Round."""
    for peer in f.peers(site, bundle, site.folder)[1:]:
        peer.take_part()
    (version,) = [entry.event for entry in site.events() if isinstance(entry.event, VersionPublished)]
    return version


def wait_for_pause(device: Running, num_pauses: int) -> None:
    """Wait until the device has stopped ``num_pauses`` times, and a little longer, because it must not continue."""
    deadline = time.monotonic() + 20.0
    while device.text().count(PAUSED) < num_pauses:
        assert time.monotonic() < deadline and device.process.poll() is None, device.text()
        time.sleep(0.02)
    time.sleep(0.3)


def test_an_unplugged_device_stops_at_once_and_loses_nothing(sites: tuple[Site, Site]) -> None:
    undisturbed_site, site = sites
    bundle = start_run(undisturbed_site)
    assert start_device(undisturbed_site, 0, 0, 0).wait(20.0) == 0
    expected = finish_round(undisturbed_site, bundle)
    bundle = start_run(site)
    device = start_device(site, DOWN_AT, BATCH_AT, UP_AT)
    on_battery, batches = site.folder / "on-battery", site.folder / "batches"
    wait_for_pause(device, 1)
    (part,) = (site.folder / "device-0" / "chunks").glob("*.part")
    num_bytes = part.stat().st_size
    # The piece that arrived when the charger was unplugged is kept, and no later piece.
    assert num_bytes == DOWN_AT
    assert not batches.exists()
    on_battery.unlink()
    wait_for_pause(device, 2)
    assert len(batches.read_text().split()) == BATCH_AT
    on_battery.unlink()
    wait_for_pause(device, 3)
    assert len(batches.read_text().split()) == BATCH_AT + NUM_BATCHES
    on_battery.unlink()
    assert device.wait(20.0) == 0, device.text()
    # The Update was stored, so it is not trained again.
    assert len(batches.read_text().split()) == BATCH_AT + NUM_BATCHES
    version = finish_round(site, bundle)
    assert (version.bytes_down_resumed, version.bytes_up_resumed) == (num_bytes, 2 * CHUNK_BYTES)
    assert version.version_sha256 == expected.version_sha256
