"""A device for ``edge.py``: opens a Bundle in one runtime, and runs operations on request.

    python edge_device.py RUNTIME BUNDLE PUBLISHER_KEY EXAMPLES.npz

It runs in a device's environment, without torch and onnx. Each request is a line with a JSON object, {"do": ..., "num":
n}; so is each answer. The first line of output has no request: it reports the time of the first train step.
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
from fanin.edge.runtimes.base import Runtime, StepSettings, VersionValues
from fanin.edge.runtimes.measure import measure

Call = Callable[[], object]
SETTINGS: Final = StepSettings(learning_rate=0.01)


class Device:
    """An open Bundle. Each graph is opened at its first use, as on a device."""

    def __init__(self, runtime: Runtime, bundle: Bundle, examples: Path) -> None:
        self._runtime, self._bundle = runtime, bundle
        self._parameters = bundle.initial_parameters()
        self._batches = list(batches_in_order(read_npz(examples), bundle.manifest.batch_size))
        self._opened: dict[str, Call] = {}

    def timed_ms(self, what: str, num: int) -> list[float]:
        """Return the milliseconds of each of ``num`` calls."""
        if what not in self._opened:
            self._opened |= self._open(what)
        return timed_ms(self._opened[what], num)

    def counts(self) -> dict[str, int]:
        """Return the number of correct labels in float and in int8."""
        result = measure(self._runtime, self._bundle, VersionValues(parameters=self._parameters), self._batches)
        return {
            "num_examples": result.num_predictions,
            "num_correct_float": result.num_correct_float,
            "num_correct_int8": result.num_correct_int8,
            "num_agreeing": result.num_agreeing,
        }

    def _open(self, what: str) -> dict[str, Call]:
        """Return the function to time, with its graph opened."""
        batches = cycle(self._batches)
        if what == "train":
            return {"train": self._train()}
        if what == "evaluate":
            evaluate = self._runtime.open_evaluate(self._bundle)
            return {"evaluate": lambda: evaluate(self._parameters, next(batches))}
        predict, x = self._runtime.open_predict(self._bundle, self._parameters), self._batches[0].inputs["x"]
        return {"predict_one": lambda: predict({"x": x[:1]}), "predict_batch": lambda: predict({"x": x})}

    def _train(self) -> Call:
        step, batches = self._runtime.open_train(self._bundle), cycle(self._batches)
        state = step.begin(self._parameters)

        def train() -> None:
            nonlocal state
            state, _ = step(state, next(batches), SETTINGS)

        return train


def timed_ms(call: Call, num: int) -> list[float]:
    """Return the milliseconds of each of ``num`` calls."""
    times_ms = []
    for _ in range(num):
        before = time.perf_counter_ns()
        call()
        times_ms.append((time.perf_counter_ns() - before) / 1e6)
    return times_ms


def peak_rss_mb() -> float:
    """Return the peak RSS of this process. ``getrusage`` would include the parent that it was forked from."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


def main() -> None:
    """Answer requests until the input ends."""
    name, folder, publisher, examples = sys.argv[1:]
    runtime = open_runtime(name)
    device = Device(runtime, open_folder(Path(folder), trusted=[publisher]), Path(examples))
    device.timed_ms("train", 1)
    say({"first_step_s": time.monotonic(), "runtime": runtime.name})
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "memory":
            say({"peak_rss_mb": peak_rss_mb()})
        elif request["do"] == "counts":
            say(device.counts())
        else:
            say({"ms": device.timed_ms(request["do"], request["num"])})


def say(row: object) -> None:
    """Write one line of output."""
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
