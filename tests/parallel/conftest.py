"""What the tests of several ranks share: the server from which their programs are forked."""

from collections.abc import Iterator

import pytest
from parallel.programs import Programs


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Runs the programs of this folder; one process has imported torch for all of them."""
    with Programs() as server:
        yield server
