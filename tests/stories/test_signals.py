"""Signals to a coordinator in a process of its own."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import Site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A site whose processes are killed at the end."""
    site = Site(tmp_path)
    yield site
    site.close()


def test_sighup_does_not_end_a_coordinator_and_sigterm_does(site: Site) -> None:
    running = site.serve()
    running.process.send_signal(signal.SIGHUP)
    until = time.monotonic() + 10.0
    while "SIGHUP: ignored" not in running.text():
        assert running.process.poll() is None and time.monotonic() < until, running.text()
        time.sleep(0.02)
    with site.operator() as operator:
        assert operator.runs() == ()
    running.process.send_signal(signal.SIGTERM)
    assert running.wait(20.0) == 0
