"""The work of each side of the comparison, and its results."""

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
    """Rounds in which each client process receives the model and sends one of the same size."""

    num_clients: int
    megabytes: float
    num_rounds: int

    @property
    def num_values(self) -> int:
        """Return the number of float32 values."""
        return int(self.megabytes * MEGABYTE) // VALUE_BYTES


def seconds_between(done_s: Sequence[float]) -> list[float]:
    """Return the seconds of each round but the first, in which processes start."""
    return [after - before for before, after in pairwise(done_s)]


def row_of(seconds: Sequence[float]) -> dict[str, object]:
    """Return the median and all samples."""
    return {"seconds_per_round": statistics.median(seconds), "seconds_per_round_samples": list(seconds)}


def free_ports(num: int) -> tuple[int, ...]:
    """Return free loopback ports outside of the range that the system assigns to new connections."""
    ports: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == num:
            return tuple(ports)
    raise RuntimeError(f"ports: got {len(ports)} free ones from {PORTS.start} to {PORTS.stop - 1}, expected {num}")
