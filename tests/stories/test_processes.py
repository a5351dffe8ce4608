"""Guarantees of a process to its user: folders of its own, private files, and a Watch that outlives a restart."""

import os
import stat
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from support import federations as f
from support.errors import raises
from support.processes import Site

from fanin.clients.device.storage.cache import hold_folder
from fanin.commands.join import main as join
from fanin.protos.errors import Conflict
from fanin.protos.messages import LoggedEvent, RoundOpened, RunRested
from fanin.server.access.authority import local_identity


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A folder for a coordinator's process, which is killed at the end."""
    site = Site(tmp_path)
    yield site
    site.close()


def test_a_watch_resumes_after_its_coordinator_was_killed(site: Site) -> None:
    coordinator = site.serve()
    site.start_run(f.plan(), f.bundle_in(site.folder, f.SMALL_SHAPES), f.PUBLISHER)
    entries: list[LoggedEvent] = []
    is_open = threading.Event()

    with site.operator() as operator:

        def watch() -> None:
            for entry in operator.watch("run"):
                entries.append(entry)
                if isinstance(entry.event, RoundOpened):
                    is_open.set()

        thread = threading.Thread(target=watch)
        thread.start()
        assert is_open.wait(30.0)
        coordinator.kill()
        site.serve()
        for index in range(f.NUM_DEVICES):
            site.device(index)
        thread.join(60.0)
        assert not thread.is_alive()
    assert isinstance(entries[-1].event, RunRested)
    # Each event comes once, in order.
    assert [entry.sequence for entry in entries] == list(range(1, len(entries) + 1))
    assert entries == site.events()


def test_the_files_of_a_coordinator_are_private_in_a_folder_that_is_open_to_all(site: Site) -> None:
    site.state.mkdir(mode=0o755)
    site.state.chmod(0o755)
    site.serve()
    assert stat.S_IMODE(site.state.stat().st_mode) == 0o755
    assert stat.S_IMODE((site.state / "fanin.db").stat().st_mode) == 0o600
    for path in site.state.rglob("*"):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_a_devices_folder_is_not_joined_from_twice(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((10, 1), np.float32), y=np.zeros(10, np.int64))
    (tmp_path / "publisher.pub").write_text(f.PUBLISHER.public)
    (tmp_path / "token").write_text("token")
    identity = local_identity(tmp_path / "tls", ("localhost",), datetime.now(UTC))
    (tmp_path / "ca.pem").write_bytes(identity.ca_certificate)
    options = {
        "--server": "127.0.0.1:1",
        "--ca": tmp_path / "ca.pem",
        "--token-file": tmp_path / "token",
        "--publisher": tmp_path / "publisher.pub",
        "--data": tmp_path / "data.npz",
        "--state": tmp_path / "device",
    }
    text = f"{tmp_path / 'device'}: in use by process {os.getpid()}; stop it, or give another --state"
    with hold_folder(tmp_path / "device"), raises(Conflict, text):
        join([str(word) for pair in options.items() for word in pair])
