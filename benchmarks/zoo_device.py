"""A device for ``zoo.py``: trains a Bundle in one runtime, on request.

    python zoo_device.py RUNTIME PUBLISHER_KEY LEARNING_RATE FOLDER

It runs in a device's environment, without torch and onnx, and uses the protocol of ``edge_device.py``. ``steps`` trains
one step on each batch, writes the parameters to ``RUNTIME.npy``, and compares int8 with float on the held-out data.
"""

import json
import sys
import time
from itertools import cycle
from pathlib import Path
from typing import Final

import numpy as np
from edge_device import say, timed_ms

from fanin.clients.data.batching import batches_in_order
from fanin.clients.data.npz import read_npz
from fanin.edge.bundles.bundle import Bundle, open_folder
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import Inputs, Runtime, StepSettings, VersionValues
from fanin.edge.runtimes.measure import measure
from fanin.edge.runtimes.randomness import random_key
from fanin.edge.tensors import Float32s

RANDOM_KEY: Final = random_key(1, 2, 3)
VALUE_TOLERANCE: Final = 0.1
"""Of the standard deviation of float's values: a value of int8 agrees if it is closer."""


class ZooDevice:
    """An open Bundle."""

    def __init__(self, runtime: Runtime, bundle: Bundle, folder: Path, learning_rate: float) -> None:
        self._runtime, self._bundle, self._folder = runtime, bundle, folder
        self._settings = StepSettings(learning_rate=learning_rate, random_key=RANDOM_KEY)
        self._step = runtime.open_train(bundle)
        self._batches = list(batches_in_order(read_npz(folder / "train.npz"), bundle.manifest.batch_size))
        self._state, self._next = self._step.begin(bundle.initial_parameters()), cycle(self._batches)

    def timed_ms(self, num: int) -> list[float]:
        """Return the milliseconds of each of ``num`` train steps."""

        def step() -> None:
            self._state, _ = self._step(self._state, next(self._next), self._settings)

        return timed_ms(step, num)

    def trained(self) -> Float32s:
        """Return the parameters after one step on each batch."""
        state = self._step.begin(self._bundle.initial_parameters())
        for batch in self._batches:
            state, _ = self._step(state, batch, self._settings)
        return state.parameters

    def agreement(self, parameters: Float32s) -> dict[str, float]:
        """Return the share of equal predictions of int8 and float, and float's accuracy, on the held-out data.

        Values are equal if they differ by less than VALUE_TOLERANCE. The accuracy of values is 1 less the squared error
        over the variance of the targets.
        """
        rows: list[tuple[Inputs, Inputs, Inputs]] = []
        batches = batches_in_order(read_npz(self._folder / "held-out.npz"), self._bundle.manifest.batch_size)
        measure(
            self._runtime, self._bundle, VersionValues(parameters=parameters), batches, lambda *row: rows.append(row)
        )
        y, in_float, in_int8 = (np.concatenate(parts) for parts in zip(*rows, strict=True))
        if self._bundle.manifest.num_classes:
            return {"int8_agreement": float((in_float == in_int8).mean()), "accuracy": float((in_float == y).mean())}
        is_equal = abs(in_int8 - in_float) < VALUE_TOLERANCE * in_float.std()
        error = np.square(in_float - y).mean() / np.square(y - y.mean()).mean()
        return {"int8_agreement": float(is_equal.mean()), "accuracy": float(1 - error)}


def main() -> None:
    """Answer requests until the input ends."""
    name, publisher, learning_rate, place = sys.argv[1:]
    runtime, folder = open_runtime(name), Path(place)
    device = ZooDevice(runtime, open_folder(folder / "bundle", trusted=[publisher]), folder, float(learning_rate))
    device.timed_ms(1)
    say({"first_step_s": time.monotonic(), "runtime": runtime.name})
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "steps":
            parameters = device.trained()
            np.save(folder / f"{name}.npy", parameters)
            say(device.agreement(parameters))
        else:
            say({"ms": device.timed_ms(request["num"])})


if __name__ == "__main__":
    main()
