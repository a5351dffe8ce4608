"""``fanin bench rounds``: seconds a Round, compared with a bare gRPC stream of the same bytes.

The coordinator is ``fanin serve`` (TLS, durability = host). Each device is the production client in its own process and
trains nothing. A Round is timed from one published Version to the next. It contains a download and an upload of the
model by each device, the commit of each Update, the fold, and the Version on disk. The first Round is left out, because
processes start and connect in it. The bare stream (``harness.bare``) then moves the same bytes.
"""

import json as jsonlib
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

import typer

from fanin.commands.bench.harness import bare
from fanin.commands.bench.harness.report import sampled, write_report
from fanin.commands.bench.harness.site import (
    RUN_ID,
    ClientsOption,
    FolderOption,
    Load,
    MegabytesOption,
    begin_run,
    load_of,
    operating,
    place,
    state_of,
)
from fanin.commands.console.processes import START_S, Children, follow_run
from fanin.commands.console.terminal import JsonOption, run_command
from fanin.protos.errors import Conflict, Unavailable
from fanin.protos.messages import LoggedEvent, RunRested, RunState, VersionPublished

GATE_AGAINST_BARE: Final = 2.5
"""Most rounds of the bare stream that a Round may take, also in the ratchet."""
PARTS: Final = {"updates": "updates", "versions": "blobs"}
"""Files of a Round on disk: their name in the report, and their folder in the coordinator's state."""


def main(argv: Sequence[str]) -> int:
    """Run ``fanin bench rounds``."""
    return run_command(rounds, argv, "bench rounds")


def rounds(
    clients: ClientsOption = 4,
    megabytes: MegabytesOption = 16.0,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Number of timed rounds.")] = 10,
    baseline: Annotated[bool, typer.Option(help="Also time a bare gRPC stream of the same bytes.")] = True,
    folder: FolderOption = None,
    json: JsonOption = "",
) -> None:
    """Time rounds of a real coordinator and real device processes that train nothing, over TLS on loopback."""
    load = load_of(clients, megabytes, rounds + 1)
    with place(folder) as used:
        row = _rounds_row(used, load)
        if baseline:
            bare_s = time_bare(used, load)
            row |= sampled("bare_seconds_per_round", bare_s) | {"bare_bytes_on_wire": _least_bytes(load)}
            row["ratio_to_bare"] = _number(row["seconds_per_round"]) / _number(row["bare_seconds_per_round"])
            row["gate_ratio_to_bare"] = GATE_AGAINST_BARE
    write_report(row, json)


def time_rounds(folder: Path, load: Load) -> list[LoggedEvent]:
    """Run the Rounds and return their events. Raises Conflict if the Run or a process fails."""
    with Children(folder) as children:
        children.serve(state_of(folder))
        begin_run(folder, load)
        module = "fanin.commands.bench.harness.device"
        for index in range(load.num_clients):
            words = [str(folder), str(index), str(load.num_rounds)]
            children.start(f"device-{index}", [sys.executable, "-m", module, *words])
        with operating(folder) as operator:
            events = list(follow_run(operator, RUN_ID, 0, children.check_failed))
    last = events[-1].event
    if not isinstance(last, RunRested) or last.state is not RunState.FINISHED:
        raise Conflict(f"the run did not finish: {last}", code="FN-1044")
    return events


def time_bare(folder: Path, load: Load) -> list[float]:
    """Return the seconds of each round of the bare stream except the first."""
    (folder / bare.ADDRESS).unlink(missing_ok=True)
    module = "fanin.commands.bench.harness.bare"
    rest = [str(load.model_bytes), str(load.num_rounds)]
    with Children(folder) as children:
        words = ["serve", str(folder), str(load.num_clients), *rest]
        server = children.start("bare", [sys.executable, "-m", module, *words])
        until = time.monotonic() + START_S
        while not (folder / bare.ADDRESS).exists():
            if server.poll() is not None or time.monotonic() > until:
                raise Unavailable(f"the bare stream's server did not start: {children.tail('bare')}", code="FN-1042")
            time.sleep(0.02)
        for index in range(load.num_clients):
            children.start(f"sender-{index}", [sys.executable, "-m", module, "send", str(folder), str(index), *rest])
        while server.poll() is None:
            children.check_failed()
            time.sleep(0.05)
        children.check_failed()
    done_s: list[float] = jsonlib.loads((folder / bare.TIMES).read_text(encoding="utf-8"))
    return [after - before for before, after in pairwise(done_s)]


def _rounds_row(folder: Path, load: Load) -> dict[str, object]:
    entries = time_rounds(folder, load)
    published = [entry for entry in entries if isinstance(entry.event, VersionPublished) and entry.event.round]
    seconds = [after.time - before.time for before, after in pairwise(published)]
    versions = [entry.event for entry in published if isinstance(entry.event, VersionPublished)]
    if len({version.version_sha256 for version in versions}) != load.num_rounds:
        raise Conflict(
            f"got {versions}, expected another version after each of {load.num_rounds} rounds", code="FN-1045"
        )
    on_wire = [version.bytes_down + version.bytes_up for version in versions[1:]]
    if min(on_wire) < _least_bytes(load):
        raise Conflict(f"got rounds of {min(on_wire)} bytes, expected at least {_least_bytes(load)}", code="FN-1045")
    return {
        "clients": load.num_clients,
        "model_bytes": load.model_bytes,
        "rounds": load.num_rounds - 1,
        **sampled("seconds_per_round", seconds),
        **sampled("bytes_on_wire", on_wire),
        "least_bytes_on_wire": _least_bytes(load),
        "disk_bytes_per_round": _disk_bytes(state_of(folder), load),
    }


def _least_bytes(load: Load) -> int:
    """Return the bytes of a Round in which each device downloads and uploads the model once."""
    return 2 * load.num_clients * load.model_bytes


def _disk_bytes(state: Path, load: Load) -> Mapping[str, float]:
    sizes = {what: _size(state / name) / load.num_rounds for what, name in PARTS.items()}
    sizes["database"] = sum(path.stat().st_size for path in state.glob("fanin.db*")) / load.num_rounds
    return sizes


def _size(folder: Path) -> int:
    """Return the disk usage of the files in a folder, in bytes."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def _number(value: object) -> float:
    assert isinstance(value, float), f"{value!r}: a median"
    return value
