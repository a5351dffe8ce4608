"""Shared fixtures of the tests of several ranks."""

from collections.abc import Iterator

import pytest
from parallel import programs as p


@pytest.fixture
def forked_agents(programs: p.Programs) -> Iterator[None]:
    """Run launched jobs in forks of the server."""
    with p.forked_agents(programs):
        yield
