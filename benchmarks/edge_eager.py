"""Eager torch for ``edge.py``: the same model, batches and optimizer, with autograd and ``torch.optim``, on one thread.

    python edge_eager.py MODEL

It uses the protocol of ``edge_device.py``. The loss is torch's fused cross-entropy, which is faster than the exported
one.
"""

import json
import sys
import time
from itertools import cycle

import torch
from edge_device import SETTINGS, Call, peak_rss_mb, say, timed_ms
from edge_models import BATCH_SIZE, app_of, examples_of
from torch import Tensor
from torch.nn.functional import cross_entropy


class Eager:
    """The module of the App, run by eager torch."""

    def __init__(self, name: str) -> None:
        app, examples = app_of(name), examples_of(name)
        self._module = app.module
        self._optimizer = app.recipe.optimizer.eager(self._module.parameters(), SETTINGS.learning_rate)
        x, y = torch.from_numpy(examples.inputs["x"]), torch.from_numpy(examples.y).long()
        self._first = x[:BATCH_SIZE]
        self._batches = cycle(list(zip(x.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True)))

    def timed_ms(self, what: str, num: int) -> list[float]:
        """Return the milliseconds of each of ``num`` calls."""
        calls: dict[str, Call] = {
            "train": self._train,
            "evaluate": lambda: self._forward(self._first),
            "predict_one": lambda: self._forward(self._first[:1]),
            "predict_batch": lambda: self._forward(self._first),
        }
        return timed_ms(calls[what], num)

    def _train(self) -> float:
        x, y = next(self._batches)
        self._optimizer.zero_grad()
        loss = cross_entropy(self._module(x).flatten(end_dim=-2), y.flatten())
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def _forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            output: Tensor = self._module(x)
        return output


def main() -> None:
    """Answer requests until the input ends."""
    torch.set_num_threads(1)
    eager = Eager(sys.argv[1])
    eager.timed_ms("train", 1)
    say({"first_step_s": time.monotonic(), "runtime": f"torch {torch.__version__}"})
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "memory":
            say({"peak_rss_mb": peak_rss_mb()})
        else:
            say({"ms": eager.timed_ms(request["do"], request["num"])})


if __name__ == "__main__":
    main()
