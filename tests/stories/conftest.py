"""Fixtures that several stories share: a coordinator in this process, and an open Round."""

from collections.abc import Iterator

import pytest
from support import federations as f
from support.hosted import Hosted
from support.peers import Peer


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """A coordinator with an open Round for three devices."""
    host = Hosted(tmp_path_factory.mktemp("host")).start()
    host.start_run(f.plan(), f.bundle_in(host.folder), f.PUBLISHER)
    yield host
    host.stop()


@pytest.fixture(scope="module")
def devices(host: Hosted) -> list[Peer]:
    """The three devices, each with its Assignment."""
    peers = f.peers(host, f.bundle_in(host.folder), host.folder)
    for device in peers:
        device.begin()
    return peers
