"""Many light devices in one process: one thread each, no disk, discarded downloads and synthetic uploads.

They use the production transport. A benchmark of the coordinator's memory needs many devices at once, and their own
memory does not matter. All devices of a Round upload the same random bytes. The coordinator cannot detect this.

    python -m fanin.commands.bench.harness.crowd FOLDER NUM_DEVICES NUM_VALUES NUM_ROUNDS
"""

import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import numpy as np

from fanin.clients.device.downloads import Fetching
from fanin.clients.transport import Connection, GrpcTransport
from fanin.commands.bench.harness.device import RUNTIME, device_token, open_line
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.codecs.fixed import CODECS
from fanin.protos import messages as m
from fanin.protos.chunks import Artifact, artifact_of
from fanin.protos.errors import Conflict

CHECK_IN_WAIT_S: Final = 40.0
CAPABILITIES: Final = m.Capabilities(codecs=tuple(CODECS), runtimes=(RUNTIME,), graph_formats=("onnx",))


class Payload:
    """The payload of a synthetic Update: random integers, small enough for any grid."""

    def __init__(self, num_values: int) -> None:
        values = np.random.default_rng().integers(-(1 << 24), 1 << 24, num_values, np.int32)
        self.data = values.tobytes()
        self.artifact: Artifact = artifact_of(self.data)

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return a slice of the payload."""
        return self.data[offset : offset + size_bytes]


class LightDevice:
    """One device with its own connection."""

    def __init__(self, line: Connection, key: SigningKey) -> None:
        self.transport = GrpcTransport(line, key)

    def begin(self) -> m.Assignment:
        """Check in until there is work."""
        while True:
            check_in = m.CheckIn(protocol=m.PROTOCOL, capabilities=CAPABILITIES, wait_s=CHECK_IN_WAIT_S)
            match self.transport.check_in(check_in):
                case m.Assigned(assignment=assignment):
                    return assignment
                case m.Rejected(text=text):
                    raise Conflict(f"check-in: rejected: {text}", code="FN-1045")
                case m.Wait():
                    pass

    def download(self, assignment: m.Assignment) -> int:
        """Download the Version and discard it. Returns its size in bytes."""
        chunks = assignment.version.parameters.chunks
        with Fetching(self.transport.download, assignment.assignment_id, chunks) as fetching:
            return sum(len(data) for ref in chunks for data in fetching.chunk(ref, 0))

    def upload(self, assignment: m.Assignment, payload: Payload) -> None:
        """Upload an Update. Raises Conflict unless it is accepted."""
        reply = self.transport.upload(header_of(assignment, payload), payload.read)
        if reply.update_state is not m.UpdateState.ACCEPTED:
            raise Conflict(f"upload: got {reply.update_state.value}, expected it to be accepted", code="FN-1045")


def header_of(assignment: m.Assignment, payload: Payload) -> m.UpdateHeader:
    """Return the header of a synthetic Update."""
    return m.UpdateHeader(
        format=m.UPDATE_FORMAT,
        assignment_id=assignment.assignment_id,
        run_id=assignment.run_id,
        round=assignment.round,
        version_sha256=assignment.version.sha256,
        codec=assignment.codec.name,
        shifts=(0,) * len(assignment.grid),
        payload=payload.artifact,
        statistics=m.Statistics(counts={m.EXAMPLES: 1}),
        telemetry=m.Telemetry(runtime=RUNTIME),
    )


class Crowd:
    """Light devices that run Rounds in lockstep: all download, then all upload at once."""

    def __init__(self, folder: Path, num_devices: int) -> None:
        self._folder = folder
        self._token = device_token(folder)
        self._together = threading.Barrier(num_devices)
        self._num_done = 0

    def run(self, num_values: int, num_rounds: int) -> None:
        """Run all Rounds. Raises Conflict if a device failed; its error is on standard error."""
        payloads = [Payload(num_values) for _ in range(num_rounds)]
        num_devices = self._together.parties
        threads = [threading.Thread(target=self._device, args=(payloads,)) for _ in range(num_devices)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._num_done != num_devices:
            raise Conflict(
                f"got {self._num_done} devices that took part in all rounds, expected {num_devices}", code="FN-1045"
            )

    def _device(self, payloads: Sequence[Payload]) -> None:
        try:
            with closing(open_line(self._folder)) as line:
                device = LightDevice(line, SigningKey.generate())
                device.transport.enroll(self._token)
                for payload in payloads:
                    assignment = device.begin()
                    device.download(assignment)
                    self._together.wait()
                    device.upload(assignment, payload)
            self._num_done += 1
        except threading.BrokenBarrierError:
            # Another device has failed and reports its error.
            return
        except BaseException:
            # The other devices would wait for this one.
            self._together.abort()
            raise


def main(argv: Sequence[str]) -> int:
    """Run the process."""
    num_devices, num_values, num_rounds = map(int, argv[1:])
    Crowd(Path(argv[0]), num_devices).run(num_values, num_rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
