"""The cost of one event of the round machine, and the memory of a Round, in a large cohort.

    python benchmarks/machine.py --json FILE

A Round is stepped from its first check-in to its closing. Each device checks in, one in ten gives up and returns, then
all Updates are committed. No store, network or disk is involved.
"""

import gc
import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Final

import typer

from fanin.commands.bench.harness.report import sampled, write_report
from fanin.commands.console.terminal import JsonOption, run_command
from fanin.server.protocols import events as e
from fanin.server.protocols import phases
from fanin.server.protocols.machine import Round, Rules
from fanin.server.protocols.plain import PLAIN

GATE_US: Final = 50.0
SMALL_COHORT: Final = 100
BATCH_EVENTS: Final = 1000
"""Events whose time is one sample: a single one is too short for the clock."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    return run_command(machine, argv, "benchmarks/machine.py", "python")


def machine(
    devices: Annotated[int, typer.Option("--devices", min=1000, help="Devices in one round.")] = 100_000,
    json: JsonOption = "",
) -> None:
    """Time the events of a round with many devices, and of rounds with 100 devices, and measure the memory."""
    # First, because later measurements would reuse the memory that a Round has freed.
    held_bytes = _round_bytes(devices)
    large_us = _sample(devices, 1)
    small_us = _sample(SMALL_COHORT, max(devices // SMALL_COHORT // 10, 10))
    row: dict[str, object] = {"devices": devices}
    row |= sampled("event_us", large_us) | sampled(f"event_us_{SMALL_COHORT}_devices", small_us)
    row |= {"gate_event_us": GATE_US, "round_bytes_per_device": held_bytes / devices}
    write_report(row, json)


def _events(num_devices: int) -> Iterator[e.Event]:
    names = [f"device-{number:09d}" for number in range(num_devices)]
    yield from (e.CheckedIn(device=name) for name in names)
    yield from chain.from_iterable((e.GaveUp(device=name), e.CheckedIn(device=name)) for name in names[::10])
    yield from (e.UpdateCommitted(device=name) for name in names)


def _round(num_devices: int) -> Round:
    rules = Rules(concurrency=num_devices, buffer=num_devices, quorum=num_devices // 2, deadline_s=600.0)
    return Round(protocol=PLAIN, rules=rules)


def _sample(num_devices: int, repeats: int) -> list[float]:
    """Return microseconds an event, one sample for each ``BATCH_EVENTS`` events."""
    samples_us, states = [], [(_round(num_devices), list(_events(num_devices))) for _ in range(repeats)]
    num_events, elapsed_s = 0, 0.0
    for state, events in states:
        for first in range(0, len(events), BATCH_EVENTS):
            batch, started_s = events[first : first + BATCH_EVENTS], time.perf_counter()
            for event in batch:
                state, _ = state.step(event, 1.0)
            elapsed_s += time.perf_counter() - started_s
            num_events += len(batch)
            if num_events >= BATCH_EVENTS:
                samples_us.append(elapsed_s / num_events * 1e6)
                num_events, elapsed_s = 0, 0.0
        # Check that the events brought the Round to its closing.
        if state.phase is not phases.CLOSING or len(state.cohort.accepted) != num_devices:
            raise AssertionError(f"the round is {state.phase.value} with {len(state.cohort.accepted)} updates")
    return samples_us


def _round_bytes(num_devices: int) -> int:
    """Return by how much the process grows until all devices of a Round are at work, without their names."""
    events = list(_events(num_devices))[:num_devices]
    state = _round(num_devices)
    gc.collect()
    before_bytes = _resident_bytes()
    for event in events:
        state, _ = state.step(event, 1.0)
    gc.collect()
    assert len(state.cohort.at_work) == num_devices, "all devices are at work"
    return _resident_bytes() - before_bytes


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
