"""The production client in a separate process, with a trainer that draws its Update.

    device.py FOLDER INDEX ADDRESS DIE_AT [TRACES]

FOLDER is the folder of the site. ADDRESS is the address of its coordinator, which may be starting again. DIE_AT is the
byte of the first upload at which the device kills itself (SIGKILL). With the prefix ``down:`` it is a byte of its
downloads, and with ``phase:`` a phase, or ``upload``, whose message it does not send. TRACES is the URL of a collector
of OpenTelemetry.
"""

import logging
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fanin.clients.device.client import Client, ClientOptions, ClientParts
from fanin.clients.device.session.protocols import identity_of
from fanin.clients.device.session.tracing import DeviceTraces
from fanin.clients.device.storage.cache import Cache
from fanin.clients.transport import Connection, GrpcTransport, ReadPayload
from fanin.edge.spans import open_spans
from fanin.protos.calls import device_id_of
from fanin.protos.messages import Download, ExchangeOutcome, ExchangeRequest, UpdateHeader, UploadReply
from fanin.simulation import SyntheticTrainer


class DyingTransport(GrpcTransport):
    """A transport that kills its process.

    It does so when the upload reads bytes past ``die_at``, when ``die_down_at`` bytes were downloaded, or before it
    sends its message of the phase ``die_in``.
    """

    die_at: int = 1 << 60
    die_down_at: int = 1 << 60
    die_in: str = ""
    num_received: int = 0
    spool: Path = Path()

    def download(self, download: Download) -> Iterator[bytes]:
        """Yield the pieces. Kill the process once enough bytes have arrived."""
        for data in super().download(download):
            self.num_received += len(data)
            yield data
            if self.num_received >= self.die_down_at:
                os.kill(os.getpid(), signal.SIGKILL)

    def exchange(self, request: ExchangeRequest) -> ExchangeOutcome:
        """Send the message of a phase."""
        if request.phase == self.die_in:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().exchange(request)

    def upload(self, header: UpdateHeader, read: ReadPayload) -> UploadReply:
        """Upload. Kill the process if the Update is long enough."""
        if self.die_in == "upload":
            os.kill(os.getpid(), signal.SIGKILL)

        def reading(offset: int, size_bytes: int) -> bytes:
            if offset >= self.die_at:
                # Bytes that gRPC has accepted may not have arrived. Wait until the coordinator has stored some of them.
                part = self.spool / f"{header.assignment_id}.part"
                while not part.exists() or not part.stat().st_size:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            return read(offset, size_bytes)

        return super().upload(header, reading)


def main() -> None:
    """Take part until killed."""
    logging.basicConfig(level=logging.INFO)
    folder, index, address, die_at = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    state = folder / "state"
    cache = Cache(folder / f"device-{index}")
    line = Connection(address, (state / "tls" / "ca.pem").read_bytes())
    transport = GrpcTransport(line, cache.key())
    if die_at:
        transport = DyingTransport(line, cache.key())
        if die_at.startswith("down:"):
            transport.die_down_at = int(die_at.removeprefix("down:"))
        elif die_at.startswith("phase:"):
            transport.die_in = die_at.removeprefix("phase:")
        else:
            transport.die_at = int(die_at)
        transport.spool = state / "spool"
    spans = open_spans("fanin-device", sys.argv[5]) if len(sys.argv) > 5 else None
    device = device_id_of(cache.key().public)
    parts = ClientParts(
        traces=None if spans is None else DeviceTraces(spans, transport, device, time.time),
        transport=transport,
        cache=cache,
        trainer=SyntheticTrainer(partition=index, num_examples=10 + index),
        trusted=((folder / "publisher.pub").read_text(),),
        rng=random.Random(index),
        identity=identity_of(cache.key(), certificate=cache.certificate()),
    )
    token = (state / "tokens" / "device.token").read_text().strip()
    Client(parts, ClientOptions(token=token)).run()


if __name__ == "__main__":
    main()
