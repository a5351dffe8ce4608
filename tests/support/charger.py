"""The production client in a separate process, on a charger that is unplugged three times.

    charger.py FOLDER DOWN_AT BATCH_AT UP_AT

FOLDER is the folder of the site. The charger is unplugged while the file ``on-battery`` is in it. The process creates
the file when DOWN_AT bytes were downloaded, after the batch BATCH_AT of a training, and when the byte UP_AT of the
Update is read. It does so once each, and never for 0. The test removes the file. Each batch adds a line to the file
``batches``. The process ends after one accepted Update.
"""

import logging
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fanin.clients.device.client import Client, ClientOptions, ClientParts
from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.storage.cache import Cache
from fanin.clients.device.updates import Change
from fanin.clients.transport import Connection, GrpcTransport, ReadPayload
from fanin.edge.bundles.keys import SigningKey
from fanin.protos import messages as m

NUM_BATCHES = 8


class Unplugging(GrpcTransport):
    """A transport that unplugs the charger during a download and during an upload."""

    def __init__(self, line: Connection, key: SigningKey, on_battery: Path, down_at: int, up_at: int) -> None:
        super().__init__(line, key)
        self._on_battery = on_battery
        self._num_remaining = down_at
        self._up_at = up_at

    def download(self, download: m.Download) -> Iterator[bytes]:
        """Count each piece before the client stores it."""
        for data in super().download(download):
            if 0 < self._num_remaining <= len(data):
                self._on_battery.touch()
            self._num_remaining -= len(data)
            yield data

    def upload(self, header: m.UpdateHeader, read: ReadPayload) -> m.UploadReply:
        """Unplug the charger before the client reads."""

        def reading(offset: int, size_bytes: int) -> bytes:
            if 0 < self._up_at <= offset:
                self._up_at = 0
                self._on_battery.touch()
            return read(offset, size_bytes)

        return super().upload(header, reading)


class BatchTrainer:
    """A trainer that sums ``NUM_BATCHES`` random steps, and unplugs the charger after one of them."""

    runtime = "synthetic 1"
    graph_format = "onnx"

    def __init__(self, folder: Path, batch_at: int) -> None:
        self._on_battery = folder / "on-battery"
        self._batches = folder / "batches"
        self._batch_at = batch_at

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        """Draw each step from the seed and the Round."""
        rng = np.random.default_rng((assignment.training.seed, assignment.round))
        values = np.zeros(model.parameters.size, np.float32)
        for batch in range(1, NUM_BATCHES + 1):
            should_continue()
            with self._batches.open("a") as file:
                file.write(f"{batch}\n")
            values += rng.normal(0.0, 0.01, values.size).astype(np.float32)
            if batch == self._batch_at:
                self._batch_at = 0
                self._on_battery.touch()
        return Change(values=values, counts={m.EXAMPLES: NUM_BATCHES}, num_steps=NUM_BATCHES)


def main() -> None:
    """Take part until one Update is accepted."""
    logging.basicConfig(level=logging.INFO)
    folder = Path(sys.argv[1])
    down_at, batch_at, up_at = (int(argument) for argument in sys.argv[2:])
    state, on_battery = folder / "state", folder / "on-battery"
    cache = Cache(folder / "device-0")
    line = Connection((state / "address").read_text().strip(), (state / "tls" / "ca.pem").read_bytes())
    parts = ClientParts(
        transport=Unplugging(line, cache.key(), on_battery, down_at, up_at),
        cache=cache,
        trainer=BatchTrainer(folder, batch_at),
        trusted=((folder / "publisher.pub").read_text(),),
        rng=random.Random(0),
    )
    options = ClientOptions(
        token=(state / "tokens" / "device.token").read_text().strip(),
        max_updates=1,
        may_work=lambda: not on_battery.exists(),
        recheck_s=0.1,
        ask_every_s=0.0,
    )
    Client(parts, options).run()


if __name__ == "__main__":
    main()
