"""The production coordinator in a process that kills itself at a chosen effect.

    coordinator.py STATE LISTEN KILL_AT MAX_FILE_BYTES [NAME=PATH...]

KILL_AT is ``before`` or ``after``, the name of an effect, and its number among effects of that name, such as
``before:Close:2``. If it is empty, the process does not kill itself. MAX_FILE_BYTES limits the size of files, as a full
disk does; 0 means no limit. NAME=PATH registers a data set.
"""

import asyncio
import logging
import os
import resource
import signal
import sys
from collections import Counter
from pathlib import Path

from fanin.commands.console.usage import data_sets
from fanin.commands.serve.coordinator import run_coordinator
from fanin.server.protocols.events import Effect
from fanin.server.rounds.worker import LogObserver
from fanin.server.settings import Settings


class KillObserver(LogObserver):
    """An observer that kills its own process (SIGKILL) before or after the n-th effect of a kind."""

    def __init__(self, kill_at: str) -> None:
        self._when, self._effect, number = kill_at.split(":")
        self._number = int(number)
        self._seen: Counter[str] = Counter()

    def starting(self, run_id: str, effect: Effect) -> None:
        """Count the effect, and kill the process if KILL_AT is before it."""
        self._seen[type(effect).__name__] += 1
        self._die("before", effect)

    def finished(self, run_id: str, effect: Effect) -> None:
        """Kill the process if KILL_AT is after this effect."""
        self._die("after", effect)

    def _die(self, when: str, effect: Effect) -> None:
        name = type(effect).__name__
        if when == self._when and name == self._effect and self._seen[name] == self._number:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Serve until killed."""
    logging.basicConfig(level=logging.INFO)
    state, listen, kill_at, max_file_bytes, *data = sys.argv[1:]
    if int(max_file_bytes):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(max_file_bytes), resource.RLIM_INFINITY))
    observer = KillObserver(kill_at) if kill_at else LogObserver()
    asyncio.run(run_coordinator(Settings(state=Path(state), listen=listen, data=data_sets(data)), observer))


if __name__ == "__main__":
    main()
