"""Shared fixtures of the tests of several ranks: the server from which their programs are forked."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from parallel.programs import Programs


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Yield a server that runs the programs of this folder. Its process imports torch once for all of them."""
    with Programs() as server:
        yield server


@pytest.fixture
def forked_agents(programs: Programs) -> Iterator[None]:
    """Run launched jobs in forks of the server, without the locks of a folder and without its signals."""

    # Imported here: it imports torch, which light tests of this folder do not need.
    from fanin.datacenter.jobs import torchrun

    def run(command: Sequence[str], logs: Path, environment: Mapping[str, str], locks: Sequence[int]) -> int:
        words = command[command.index("fanin.datacenter.jobs.ranks") + 1 :]
        outcome = programs.run("agents", Path.cwd(), json.dumps(environment), *words, warning_action="default")
        status, _, output = outcome.partition("\n")
        (logs / torchrun.TORCHRUN_LOG).write_text(output)
        return int(status)

    before = torchrun.AGENT_RUNNER.set(run)
    yield
    torchrun.AGENT_RUNNER.reset(before)
