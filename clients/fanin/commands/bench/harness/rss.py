"""Memory and processor time of a process and its children, from proc(5): VmRSS is current, VmHWM is the peak."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fanin.protos.errors import InvalidInput

PROC: Final = Path("/proc")
KILOBYTE: Final = 1024
POLL_S: Final = 0.05
RESET_PEAK: Final = "5"
"""Writing this to ``clear_refs`` resets VmHWM to VmRSS."""


class PeakRss:
    """Measures a process and its children inside the context; ``idle_bytes`` and ``peak_bytes`` are their sums."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peaks: dict[int, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.idle_bytes = 0

    def __enter__(self) -> "PeakRss":
        if not (PROC / str(self._pid) / "clear_refs").exists():
            raise InvalidInput(
                f"{PROC}: got no clear_refs of process {self._pid}, expected it as Linux has it; run this on Linux",
                code="FN-1047",
            )
        for pid in tree(self._pid):
            (PROC / str(pid) / "clear_refs").write_text(RESET_PEAK, encoding="utf-8")
            self.idle_bytes += memory_bytes(pid, "VmRSS")
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._over.set()
        self._thread.join()
        self._poll()

    @property
    def peak_bytes(self) -> int:
        """Sum of the peaks of all processes; at least the peak of their sum."""
        return sum(self._peaks.values())

    def _watch(self) -> None:
        # Poll: the peak of a child that has ended is lost.
        while not self._over.wait(POLL_S):
            self._poll()

    def _poll(self) -> None:
        for pid in tree(self._pid):
            self._peaks[pid] = max(self._peaks.get(pid, 0), memory_bytes(pid, "VmHWM"))


def tree(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield pid
    try:
        children = [path.read_text(encoding="utf-8") for path in (PROC / str(pid) / "task").glob("*/children")]
    except OSError:
        # The process has just ended.
        return
    for child in " ".join(children).split():
        yield from tree(int(child))


def memory_bytes(pid: int, key: str) -> int:
    """Return one line of a process's status in bytes; 0 if it has ended."""
    try:
        lines = (PROC / str(pid) / "status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    sizes = (line.split()[1] for line in lines if line.startswith(f"{key}:"))
    return KILOBYTE * int(next(sizes, 0))


def cpu_ticks(pid: int) -> int:
    """Return the processor time of a process, in ticks of ``sysconf(SC_CLK_TCK)``."""
    # After the name, which may hold spaces: field 14 and 15 of the line are user and system time.
    fields = (PROC / str(pid) / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
