"""A device process that trains nothing: the production client, with fresh random values each Round.

python -m fanin.commands.bench.harness.device FOLDER INDEX NUM_UPDATES
"""

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from fanin.clients.device.client import Client, ClientOptions, ClientParts
from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.storage.cache import Cache
from fanin.clients.device.updates import Change
from fanin.clients.textfiles import read_token
from fanin.clients.transport import Connection, GrpcTransport
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m

STATE: Final = "fanin-state"
PUBLISHER: Final = "publisher.pub"
RUNTIME: Final = "random 1"


class RandomTrainer:
    """A Trainer whose change is random, so it cannot be predicted or compressed."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng()

    @property
    def runtime(self) -> str:
        """A name that no real runtime has."""
        return RUNTIME

    @property
    def graph_format(self) -> str:
        """The format of the synthetic model's graphs."""
        return "onnx"

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        """Draw a value between -1/2 and 1/2 for each parameter."""
        should_continue()
        values: Float32s = self._rng.random(model.parameters.size, dtype=np.float32)
        values -= np.float32(0.5)
        return Change(values=values, counts={m.EXAMPLES: 1})


def open_line(folder: Path) -> Connection:
    """Connect to the coordinator whose state is in this folder."""
    state = folder / STATE
    return Connection((state / "address").read_text(encoding="utf-8").strip(), (state / "tls" / "ca.pem").read_bytes())


def device_token(folder: Path) -> str:
    """Return the enrollment token of that coordinator."""
    return read_token(folder / STATE / "tokens" / "device.token", "")


def main(argv: Sequence[str]) -> int:
    """Run the process."""
    folder, index, num_updates = Path(argv[0]), int(argv[1]), int(argv[2])
    cache = Cache(folder / f"device-{index}")
    line = open_line(folder)
    parts = ClientParts(
        transport=GrpcTransport(line, cache.key()),
        cache=cache,
        trainer=RandomTrainer(),
        trusted=((folder / PUBLISHER).read_text(encoding="utf-8"),),
        rng=random.Random(),
    )
    Client(parts, ClientOptions(token=device_token(folder), max_updates=num_updates)).run()
    line.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
