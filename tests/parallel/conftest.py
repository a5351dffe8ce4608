"""What the tests of several ranks share: the server from which their programs are forked."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from parallel.programs import Programs


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Runs the programs of this folder; one process has imported torch for all of them."""
    with Programs() as server:
        yield server


@pytest.fixture
def forked_agents(programs: Programs) -> Iterator[None]:
    """Launched jobs run in forks of that process, without the locks of a folder and without its signals."""

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
