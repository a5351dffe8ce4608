"""``fanin bench checkins``: check-ins a second on new and on kept connections, with many registered devices.

The coordinator is ``fanin serve`` with a Run whose only place is taken. It verifies each check-in, considers it for
every Run and answers Wait. Each check-in is by another device, so the coordinator has never seen its key before. The
``callers`` share the processors with the coordinator, so the coordinator's own processor time is reported too.
"""

import asyncio
import json as jsonlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import click
import typer

from fanin.commands.bench.harness.callers import key_of
from fanin.commands.bench.harness.crowd import LightDevice
from fanin.commands.bench.harness.device import device_token, open_line
from fanin.commands.bench.harness.report import percentile, write_report
from fanin.commands.bench.harness.rss import cpu_ticks
from fanin.commands.bench.harness.site import FolderOption, begin_run, load_of, place, state_of
from fanin.commands.console.processes import Children
from fanin.commands.console.terminal import JsonOption, run_command
from fanin.edge.bundles.keys import SigningKey
from fanin.protos.errors import Conflict
from fanin.server.folder import hold_folder, open_state
from fanin.server.storage.disk import Durability
from fanin.server.storage.lanes import inline
from fanin.server.storage.records import EnrolledDevice

GATE_PER_SECOND: Final = 1000.0
NUM_PROCESSES: Final = 2
MODEL_MEGABYTES: Final = 0.01


def main(argv: Sequence[str]) -> int:
    """Run ``fanin bench checkins``."""
    return run_command(checkins, argv, "bench checkins")


def checkins(
    devices: Annotated[int, typer.Option("--devices", help="Number of registered devices.")] = 100_000,
    calls: Annotated[int, typer.Option("--calls", help="Number of check-ins on kept connections.")] = 10_000,
    new_calls: Annotated[int, typer.Option("--new-calls", help="Number of check-ins on new connections.")] = 2_000,
    connections: Annotated[int, typer.Option("--connections", help="Number of concurrent connections.")] = 32,
    folder: FolderOption = None,
    json: JsonOption = "",
) -> None:
    """Measure check-ins a second: signed, over TLS, each by another registered device."""
    if min(calls, new_calls) < NUM_PROCESSES or connections < NUM_PROCESSES or devices < calls + new_calls:
        raise click.UsageError(
            f"--devices, --calls, --new-calls, --connections: got {devices}, {calls}, {new_calls} and {connections}, "
            f"expected {NUM_PROCESSES} or more of each, a device for each call"
        )
    row: dict[str, object] = {"devices": devices, "connections": connections}
    with place(folder) as used, Children(used) as children:
        row["seconds_to_register"] = register(state_of(used), devices)
        process = children.serve(state_of(used))
        begin_run(used, load_of(1, MODEL_MEGABYTES, 1))
        with closing(open_line(used)) as line:
            holder = LightDevice(line, SigningKey.generate())
            holder.transport.enroll(device_token(used))
            holder.begin()
        callers = _Callers(used, children, process, devices // (calls + new_calls), connections // NUM_PROCESSES)
        row |= callers.call("kept", 0, calls) | callers.call("new", calls, new_calls)
    row["gate_check_ins_per_second"] = GATE_PER_SECOND
    write_report(row, json)


def register(state: Path, num_devices: int) -> float:
    """Enroll devices directly in the store, as if over years. Returns the seconds that it took."""
    started_s = time.perf_counter()
    publics = [key_of(number).public for number in range(num_devices)]
    with hold_folder(state):
        opened = open_state(state, Durability.PROCESS, (inline, inline), time.time)
        # A folder with a database and no authority is refused. In an empty one, a new authority is created.
        (state / "tls").mkdir()
        asyncio.run(opened.devices.enroll([EnrolledDevice(public_key=public) for public in publics], time.time()))
    return time.perf_counter() - started_s


@dataclass(frozen=True, slots=True)
class _Callers:
    """Processes that check in. Each device number is used once; the numbers are ``spread`` apart."""

    folder: Path
    children: Children
    coordinator: "subprocess.Popen[bytes]"
    spread: int
    num_threads: int

    def call(self, kind: str, first: int, count: int) -> dict[str, object]:
        """Run ``count`` check-ins, starting with the device at index ``first``."""
        before = cpu_ticks(self.coordinator.pid)
        started: list[tuple[Path, subprocess.Popen[bytes]]] = []
        for index in range(NUM_PROCESSES):
            own = [place for place in range(first, first + count) if place % NUM_PROCESSES == index]
            out = self.folder / f"{kind}-{index}.json"
            numbers = (self.num_threads, own[0] * self.spread, self.spread * NUM_PROCESSES, len(own))
            words = [str(self.folder), str(out), kind, *map(str, numbers)]
            command = [sys.executable, "-m", "fanin.commands.bench.harness.callers", *words]
            started.append((out, self.children.start(f"{kind}-{index}", command)))
        for out, process in started:
            if process.wait():
                raise Conflict(
                    f"{out.stem} ended with status {process.returncode}: {self.children.tail(out.stem)}", code="FN-1042"
                )
        results = [jsonlib.loads(out.read_text(encoding="utf-8")) for out, _ in started]
        cpu_s = (cpu_ticks(self.coordinator.pid) - before) / os.sysconf("SC_CLK_TCK")
        latencies_s = [one for _, _, part in results for one in part]
        seconds = max(end_s for _, end_s, _ in results) - min(start_s for start_s, _, _ in results)
        return {
            f"{kind}_check_ins": count,
            f"{kind}_check_ins_per_second": count / seconds,
            f"{kind}_p50_seconds": percentile(latencies_s, 50),
            f"{kind}_p99_seconds": percentile(latencies_s, 99),
            f"{kind}_latency_seconds_samples": latencies_s,
            f"{kind}_coordinator_cpu_seconds_per_check_in": cpu_s / count,
        }
