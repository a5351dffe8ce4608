"""Seconds from SIGKILL until the coordinator serves again, with a Round open.

    python benchmarks/restart.py --json FILE

All devices but one have uploaded their Updates, and the last one is in the middle of its upload. The coordinator is
killed and restarted at once. It serves again when it answers a report of that device. Then the device uploads the
remaining bytes, which proves that the Round survived. The time from there to the Version is reported too.
"""

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from fanin.commands.bench.harness.crowd import LightDevice, Payload, header_of
from fanin.commands.bench.harness.device import device_token, open_line
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
from fanin.commands.console.processes import Children, follow_run
from fanin.commands.console.terminal import ADDRESS_FILE, JsonOption, run_command
from fanin.edge.bundles.keys import SigningKey
from fanin.protos import messages as m
from fanin.protos.errors import Conflict, Unavailable
from fanin.protos.messages import RunRested, RunState

GATE_S: Final = 3.0
UNDER_WAY_S: Final = 60.0


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    return run_command(restart, argv, "benchmarks/restart.py", "python")


def restart(
    clients: ClientsOption = 64,
    megabytes: MegabytesOption = 16.0,
    restarts: Annotated[int, typer.Option("--restarts", min=1, help="Number of kills in the same round.")] = 5,
    folder: FolderOption = None,
    json: JsonOption = "",
) -> None:
    """Time a coordinator from SIGKILL until it serves again, with a round open."""
    load = load_of(clients, megabytes, restarts)
    with place(folder) as used, Children(used) as children:
        row = _Restarts(used, load, children).row(restarts)
    write_report(row, json)


@dataclass(frozen=True, slots=True)
class _Restarts:
    """A coordinator that is killed and restarted during one Round."""

    folder: Path
    load: Load
    children: Children

    def row(self, num_restarts: int) -> dict[str, object]:
        """Run the benchmark and return its row."""
        process = self.children.serve(state_of(self.folder))
        begin_run(self.folder, Load(num_clients=self.load.num_clients, num_values=self.load.num_values, num_rounds=1))
        payload = Payload(self.load.num_values)
        for _ in range(self.load.num_clients - 1):
            with self._device(SigningKey.generate()) as device:
                device.upload(device.begin(), payload)
        last = SigningKey.generate()
        with self._device(last) as device:
            assignment = device.begin()
        serving_s = []
        for _ in range(num_restarts):
            with self._under_way(last, assignment, payload):
                killed_s = time.perf_counter()
                self.children.kill(process)
            process = self.children.serve(state_of(self.folder), self._address())
            with self._device(last, is_known=True) as device:
                reply = device.transport.report(m.Report(assignment_id=assignment.assignment_id, failure=""))
            serving_s.append(time.perf_counter() - killed_s)
            if reply.update_state is not m.UpdateState.RECEIVING:
                raise Conflict(f"got {reply.update_state.value} after the restart, expected the round to be open")
        started_s = time.perf_counter()
        with self._device(last, is_known=True) as device:
            device.upload(assignment, payload)
        self._finish()
        return {
            "clients": self.load.num_clients,
            "model_bytes": self.load.model_bytes,
            "restarts": num_restarts,
            **sampled("seconds_to_serving", serving_s),
            "gate_seconds_to_serving": GATE_S,
            "seconds_from_last_update_to_version": time.perf_counter() - started_s,
        }

    def _address(self) -> str:
        return (state_of(self.folder) / ADDRESS_FILE).read_text().strip()

    @contextmanager
    def _device(self, key: SigningKey, *, is_known: bool = False) -> Iterator[LightDevice]:
        with closing(open_line(self.folder)) as line:
            device = LightDevice(line, key)
            if not is_known:
                device.transport.enroll(device_token(self.folder))
            yield device

    @contextmanager
    def _under_way(self, key: SigningKey, assignment: m.Assignment, payload: Payload) -> Iterator[None]:
        """Hold an upload half-way inside the context, until it breaks with the coordinator."""
        half, broken = threading.Event(), threading.Event()

        def read(offset: int, size_bytes: int) -> bytes:
            if offset >= len(payload.data) // 2:
                half.set()
                broken.wait()
            return payload.read(offset, size_bytes)

        def upload() -> None:
            with self._device(key, is_known=True) as device, suppress(Unavailable):
                device.transport.upload(header_of(assignment, payload), read)

        with ExitStack() as stack:
            thread = threading.Thread(target=upload)
            thread.start()
            stack.callback(thread.join)
            stack.callback(broken.set)
            if not half.wait(UNDER_WAY_S):
                raise Unavailable(f"got no half of an upload within {UNDER_WAY_S:g} s")
            yield

    def _finish(self) -> None:
        with operating(self.folder) as operator:
            *_, last = follow_run(operator, RUN_ID, 0, self.children.check_failed)
        if not isinstance(last.event, RunRested) or last.event.state is not RunState.FINISHED:
            raise Conflict(f"the run did not finish: {last.event}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
