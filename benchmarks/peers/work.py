"""What each side of the comparison is asked to do, and what it found."""

import random
import socket
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

VALUE_BYTES = 4
MEGABYTE = 1 << 20
PORTS: Final = range(20_000, 30_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Rounds in which each of the clients, a process of its own, receives the model and sends one as large."""

    num_clients: int
    megabytes: float
    num_rounds: int

    @property
    def num_values(self) -> int:
        """Values of float32."""
        return int(self.megabytes * MEGABYTE) // VALUE_BYTES


def seconds_between(done_s: Sequence[float]) -> list[float]:
    """Of each round but the first, in which processes start."""
    return [after - before for before, after in pairwise(done_s)]


def row_of(seconds: Sequence[float]) -> dict[str, object]:
    """The median and all samples."""
    return {"seconds_per_round": statistics.median(seconds), "seconds_per_round_samples": list(seconds)}


def free_ports(num: int) -> tuple[int, ...]:
    """Ports of loopback that nobody listens on, and that systems do not give to whoever connects in the meantime."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == num:
            return tuple(found)
    raise RuntimeError(f"ports: got {len(found)} free ones from {PORTS.start} to {PORTS.stop - 1}, expected {num}")
