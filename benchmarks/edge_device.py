"""A device for ``edge.py``: opens a Bundle in one runtime, and does so many steps of something when told.

    python edge_device.py RUNTIME BUNDLE PUBLISHER_KEY EXAMPLES.npz

It runs in a device's environment: neither torch nor onnx. One JSON object a line comes in, {"do": ..., "num": n}, and
one goes out for it; the first line out is there unasked, after the first train step, with when that was.
"""

import json
import sys
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Final

from fanin.clients.data.batching import batches_in_order
from fanin.clients.data.npz import read_npz
from fanin.edge.bundles.bundle import Bundle, open_folder
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import Runtime, StepSettings
from fanin.edge.runtimes.measure import measure

Call = Callable[[], object]
SETTINGS: Final = StepSettings(learning_rate=0.01)


class Device:
    """An open Bundle. What is measured is opened when it is first asked for, as a device would."""

    def __init__(self, runtime: Runtime, bundle: Bundle, examples: Path) -> None:
        self._runtime, self._bundle = runtime, bundle
        self._parameters = bundle.initial_parameters()
        self._batches = list(batches_in_order(read_npz(examples), bundle.manifest.batch_size))
        self._opened: dict[str, Call] = {}

    def timed_ms(self, what: str, num: int) -> list[float]:
        """What each of ``num`` calls took."""
        if what not in self._opened:
            self._opened |= self._open(what)
        return timed_ms(self._opened[what], num)

    def counts(self) -> dict[str, int]:
        """How many of the labels either form finds."""
        found = measure(self._runtime, self._bundle, self._parameters, self._batches)
        return {
            "num_examples": found.num_predictions,
            "num_correct_float": found.num_correct_float,
            "num_correct_int8": found.num_correct_int8,
            "num_agreeing": found.num_agreeing,
        }

    def _open(self, what: str) -> dict[str, Call]:
        """What there is to time once the graph behind it is open."""
        batches = cycle(self._batches)
        if what == "train":
            return {"train": self._train()}
        if what == "evaluate":
            evaluate = self._runtime.open_evaluate(self._bundle)
            return {"evaluate": lambda: evaluate(self._parameters, next(batches))}
        predict, x = self._runtime.open_predict(self._bundle, self._parameters), self._batches[0].x
        return {"predict_one": lambda: predict(x[:1]), "predict_batch": lambda: predict(x)}

    def _train(self) -> Call:
        step, batches = self._runtime.open_train(self._bundle), cycle(self._batches)
        state = step.begin(self._parameters)

        def train() -> None:
            nonlocal state
            state, _ = step(state, next(batches), SETTINGS)

        return train


def timed_ms(call: Call, num: int) -> list[float]:
    """What each of ``num`` calls took."""
    found = []
    for _ in range(num):
        before = time.perf_counter_ns()
        call()
        found.append((time.perf_counter_ns() - before) / 1e6)
    return found


def peak_rss_mb() -> float:
    """Of this process alone: what ``getrusage`` tells would count the parent that it was forked from."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


def main() -> None:
    """Answer until there is nothing more to read."""
    name, folder, publisher, examples = sys.argv[1:]
    runtime = open_runtime(name)
    device = Device(runtime, open_folder(Path(folder), trusted=[publisher]), Path(examples))
    device.timed_ms("train", 1)
    say({"first_step_s": time.monotonic(), "runtime": runtime.name})
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "memory":
            say({"peak_rss_mb": peak_rss_mb()})
        elif asked["do"] == "counts":
            say(device.counts())
        else:
            say({"ms": device.timed_ms(asked["do"], asked["num"])})


def say(row: object) -> None:
    """One line out."""
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
