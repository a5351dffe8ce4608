"""The peak memory of a process and its children together, sampled by another process.

    python tree_memory.py PID

An export converts the graphs of several formats in a fork. So neither process has the peak alone, and the sum of their
resident sets counts shared pages twice. The proportional set size (PSS) counts a page of n processes as a share of 1/n
in each. A thread would take the samples, too, but an export forks only in a process with one thread.
"""

import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

INTERVAL_S: Final = 0.05
PROC: Final = Path("/proc")


@contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """Measure this process and its children. Yield a function that ends the measurement and returns bytes."""
    command = [sys.executable, "-I", __file__, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sampler:
        assert sampler.stdin is not None and sampler.stdout is not None, "both are pipes"
        # It takes a first sample before this process continues.
        sampler.stdout.readline()
        try:
            yield lambda: int(sampler.communicate()[0])
        finally:
            sampler.kill()


def main() -> None:
    """Sample until the input ends, and print the peak in bytes."""
    root = int(sys.argv[1])
    peak = sum(map(share, tree(root)))
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    while not select.select([sys.stdin], [], [], INTERVAL_S)[0]:
        peak = max(peak, sum(map(share, tree(root))))
    sys.stdout.write(f"{peak}\n")


def tree(root: int) -> list[int]:
    """Return the ids of a process and all its descendants, without this process."""
    processes, waiting = [], [root]
    while waiting:
        process = waiting.pop()
        if process != os.getpid():
            processes.append(process)
            waiting += children(process)
    return processes


def children(process: int) -> list[int]:
    """Return the ids of the children of a process; none if it has ended. The kernel lists them by thread."""
    found: list[int] = []
    with suppress(OSError):
        for thread in (PROC / str(process) / "task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def share(process: int) -> int:
    """Return the proportional set size in bytes; 0 for a process that has ended."""
    with suppress(OSError):
        text = (PROC / str(process) / "smaps_rollup").read_text()
        return 1024 * int(text.partition("\nPss:")[2].split()[0])
    return 0


if __name__ == "__main__":
    main()
