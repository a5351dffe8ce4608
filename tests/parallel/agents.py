"""Runs torchrun's agent as ``fanin.datacenter.jobs.ranks`` does, in a process that has imported the engine already.

    programs.run("agents", folder, environment_as_json, *arguments_of_torchrun)

Tests of meshes use it, because an import takes longer than their few steps. Tests of the launcher itself do not.
"""

import json
import os
import sys
from collections.abc import Sequence

from fanin.datacenter.jobs import agent
from fanin.datacenter.jobs.ranks import ENGINE, run_program, start_server
from fanin.datacenter.ranks.elastic import PARENT


def main(arguments: Sequence[str]) -> int:
    """Run the ranks in a folder and an environment until they end."""
    folder, environment, *words = arguments
    os.chdir(folder)
    # The server is the parent, not the launcher.
    os.environ |= json.loads(environment) | {PARENT: str(os.getppid())}
    # A new interpreter would have read it. A test may install a distribution in a folder.
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = ["ranks", *words]
    agent.main(["--start-method", start_server((ENGINE,)), *words], run_program)
    return 0
