"""A disk that is really full while devices upload: the Round waits past its deadline, and commands name the disk."""

import errno
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support import federations as f
from support.full_disk import fill, small_disk
from support.processes import Running, Site, start

from fanin.edge.files import DISK_PROBLEMS
from fanin.protos.messages import RoundFailed, VersionPublished

DEADLINE_S = 6.0
DISK_BYTES = 48 << 20
NO_SPACE = DISK_PROBLEMS[errno.ENOSPC]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A folder for a coordinator's process, with its state on a small disk."""
    site = Site(tmp_path)
    with small_disk(site.state, DISK_BYTES):
        yield site
        site.close()


def command(site: Site, *words: str) -> Running:
    """Start a subcommand of an operator on this machine."""
    log = site.folder / f"{words[0]}.log"
    running = start(["-m", "fanin.commands.main", *words, "--state", str(site.state)], log)
    site.started.append(running)
    return running


def wait_for_text(running: Running, text: str) -> None:
    """Wait until a process has printed a text."""
    until = time.monotonic() + 30.0
    while text not in " ".join(running.text().split()):
        assert time.monotonic() < until, running.text()
        time.sleep(0.1)


# With half an Update left, an upload begins and then has no space. With nothing left, the database has none either.
@pytest.mark.nightly
@pytest.mark.parametrize("left_bytes", [600 << 10, 0])
def test_a_round_waits_for_space_and_ends_with_the_same_bits(site: Site, left_bytes: int) -> None:
    coordinator = site.serve()
    bundle = f.bundle_in(site.folder)
    plan = f.plan()
    site.start_run(replace(plan, cohort=replace(plan.cohort, deadline_s=DEADLINE_S)), bundle, f.PUBLISHER)
    peers = f.peers(site, bundle, site.folder)
    for peer in peers:
        peer.begin()
    began_s = time.monotonic()
    watch = command(site, "watch", "run")
    fill(site.state / "filler", left_bytes)
    threads = [threading.Thread(target=peer.take_part, daemon=True) for peer in peers]
    for thread in threads:
        thread.start()

    wait_for_text(coordinator, f"cannot be written: {NO_SPACE}")
    wait_for_text(watch, NO_SPACE)
    time.sleep(max(0.0, began_s + 2 * DEADLINE_S - time.monotonic()))
    describe = command(site, "describe", "run")
    assert describe.wait(60.0) == 0
    wait_for_text(describe, NO_SPACE)
    with site.operator() as operator:
        assert NO_SPACE in operator.run("run").reason

    (site.state / "filler").unlink()
    for thread in threads:
        thread.join(120.0)
    assert not any(thread.is_alive() for thread in threads)
    events = [entry.event for entry in site.events()]
    assert not any(isinstance(event, RoundFailed) for event in events)
    digests = [event.version_sha256 for event in events if isinstance(event, VersionPublished)]
    assert digests == f.expected_digests(site.folder / "undisturbed")
    assert watch.wait(60.0) == 0
