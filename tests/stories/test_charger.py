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
from fanin.protos.control import VersionPublished

SHAPES = {"a": (1000, 1500), "b": (3,)}
"""6 MB for each Update and Version: six Chunks."""
DOWN_AT = 2 * PIECE_BYTES
BATCH_AT = 3
UP_AT = 2 * CHUNK_BYTES + PIECE_BYTES
PAUSED = "paused (may_work no longer holds)"


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[tuple[Site, Site]]:
    """Two coordinators: one for an undisturbed device, and one for a device whose charger is unplugged."""
    both = Site(tmp_path / "undisturbed"), Site(tmp_path / "unplugged")
    for site in both:
        site.folder.mkdir()
        site.serve()
    yield both
    for site in both:
        site.close()


def run_at(site: Site) -> Bundle:
    """Start a Run, and return its Bundle."""
    bundle = f.bundle_in(site.folder, SHAPES)
    site.start_run(f.plan(), bundle, f.PUBLISHER)
    return bundle


def device_at(site: Site, *unplugged_at: int) -> Running:
    """Start the process of the first device."""
    script = str(SUPPORT / "charger.py")
    running = start((script, str(site.folder), *map(str, unplugged_at)), site.folder / "device-0.log")
    site.started.append(running)
    return running


def published(site: Site, bundle: Bundle) -> VersionPublished:
    """Let the other devices take part, and return the Version of the Round."""
    for other in f.peers(site, bundle, site.folder)[1:]:
        other.take_part()
    (version,) = [logged.event for logged in site.events() if isinstance(logged.event, VersionPublished)]
    return version


def wait_for_pause(device: Running, num_pauses: int) -> None:
    """Wait until the device has stopped ``num_pauses`` times, and a little longer, because it must not continue."""
    until = time.monotonic() + 20.0
    while device.text().count(PAUSED) < num_pauses:
        assert time.monotonic() < until and device.process.poll() is None, device.text()
        time.sleep(0.02)
    time.sleep(0.3)


def test_an_unplugged_device_stops_at_once_and_loses_nothing(sites: tuple[Site, Site]) -> None:
    calm, site = sites
    bundle = run_at(calm)
    assert device_at(calm, 0, 0, 0).wait(20.0) == 0
    expected = published(calm, bundle)
    bundle = run_at(site)
    device = device_at(site, DOWN_AT, BATCH_AT, UP_AT)
    on_battery, batches = site.folder / "on-battery", site.folder / "batches"
    wait_for_pause(device, 1)
    (part,) = (site.folder / "device-0" / "chunks").glob("*.part")
    num_kept = part.stat().st_size
    # The piece that arrived when the charger was unplugged is kept, and no later piece.
    assert num_kept == DOWN_AT
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
    version = published(site, bundle)
    assert (version.bytes_down_resumed, version.bytes_up_resumed) == (num_kept, 2 * CHUNK_BYTES)
    assert version.version_sha256 == expected.version_sha256
