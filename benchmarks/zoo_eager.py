"""Eager torch for ``zoo.py``: the steps that each runtime must repeat, and their time, on one thread.

    python zoo_eager.py MODEL FOLDER

It first trains the module a little, because the scales of int8 are calibrated at the export. FOLDER receives the state
of that training, and the data. Then it uses the protocol of ``edge_device.py``. After the export, ``steps`` writes the
parameters after 20 steps in float32, with the random numbers of a device, to ``eager.npy``, those of float64 to
``exact.npy``, and those of float32 from parameters that differ by a rounding to ``shaken.npy``.
"""

import copy
import json
import sys
import time
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Final

import numpy as np
import torch
from edge_device import say, timed_ms
from torch import Tensor
from zoo_device import RANDOM_KEY
from zoo_export import BUNDLE, HELD_OUT_DATA, NUM_STEPS, PUBLISHER, STATE, TRAIN_DATA
from zoo_models import BATCH_SIZE, HELD_OUT, MODELS, PRETRAINING, TRAINING, app_of, examples_of

from fanin.clients.data.batching import batches_in_order
from fanin.clients.data.npz import read_npz, write_npz
from fanin.edge.bundles.bundle import open_folder
from fanin.edge.bundles.manifest import Manifest
from fanin.edge.export.module.draws import fixed_draws, values_of
from fanin.edge.export.module.kernels import plain_kernels
from fanin.edge.runtimes.base import PaddedBatch
from fanin.edge.runtimes.randomness import random_ports

NUM_HELD_OUT: Final = 256
PRETRAINING_BATCH: Final = 32
PRETRAINING_RATE: Final = 2e-3
ROUNDING: Final = 1e-7
"""Relative difference of a parameter that is rounded differently."""


class EagerModel:
    """The module of an App, trained by autograd and ``torch.optim``."""

    def __init__(self, name: str, folder: Path) -> None:
        self._app, self._folder, self._rate = app_of(name, folder / STATE), folder, MODELS[name].learning_rate
        self._batches = list(batches_in_order(read_npz(folder / TRAIN_DATA), self._app.batch_size))
        self._module = copy.deepcopy(self._app.module)
        self._optimizer = self._app.recipe.optimizer.eager(self._module.parameters(), self._rate)
        self._next = cycle(self._batches)

    def timed_ms(self, num: int) -> list[float]:
        """Return the milliseconds of each of ``num`` train steps. torch draws the random numbers itself."""

        def step() -> None:
            self._optimizer.zero_grad()
            self._loss(self._module, next(self._next), torch.float32).backward()
            self._optimizer.step()

        return timed_ms(step, num)

    def write_steps(self) -> None:
        """Write the parameters after all batches, in float32, in float64, and from parameters with another rounding.

        The Bundle has the order of the parameters and the random inputs.
        """
        shaken, generator = copy.deepcopy(self._app.module), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for value in shaken.parameters():
                value.mul_(1.0 + ROUNDING * torch.randn(value.shape, generator=generator))
        manifest = open_folder(self._folder / BUNDLE, trusted=[PUBLISHER.public]).manifest
        np.save(self._folder / "eager.npy", self._trained(self._app.module, torch.float32, manifest))
        np.save(self._folder / "exact.npy", self._trained(self._app.module, torch.float64, manifest))
        np.save(self._folder / "shaken.npy", self._trained(shaken, torch.float32, manifest))

    def _trained(self, start: torch.nn.Module, dtype: torch.dtype, manifest: Manifest) -> np.ndarray:
        module = copy.deepcopy(start).to(dtype)
        optimizer = self._app.recipe.optimizer.eager(module.parameters(), self._rate)
        ports = random_ports(manifest.signatures["train"].inputs)
        for step, batch in enumerate(self._batches):
            optimizer.zero_grad()
            with ExitStack() as stack:
                if ports:
                    stack.enter_context(plain_kernels())
                    stack.enter_context(fixed_draws(ports, values_of(ports, RANDOM_KEY, step)))
                loss = self._loss(module, batch, dtype)
            loss.backward()
            optimizer.step()
        values = dict(module.named_parameters()) | dict(module.named_buffers())
        return np.concatenate([values[row.name].detach().numpy().reshape(-1) for row in manifest.table.specs])

    def _loss(self, module: torch.nn.Module, batch: PaddedBatch, dtype: torch.dtype) -> Tensor:
        def tensor(array: np.ndarray) -> Tensor:
            value = torch.from_numpy(array)
            return value.to(dtype) if value.is_floating_point() else value

        output = self._app.call(module, {name: tensor(array) for name, array in batch.inputs.items()})
        assert isinstance(output, Tensor), "the App has checked its output"
        return self._app.loss(output, tensor(batch.y)).mean()


def prepare(name: str, folder: Path) -> None:
    """Write the data, and the state of the module after some steps of Adam in eager torch."""
    write_npz(folder / TRAIN_DATA, examples_of(name, TRAINING, NUM_STEPS * BATCH_SIZE))
    write_npz(folder / HELD_OUT_DATA, examples_of(name, HELD_OUT, NUM_HELD_OUT))
    app = app_of(name)
    module = app.module
    examples = examples_of(name, PRETRAINING, MODELS[name].num_pretraining_steps * PRETRAINING_BATCH)
    inputs = {key: torch.from_numpy(array).split(PRETRAINING_BATCH) for key, array in examples.inputs.items()}
    optimizer = torch.optim.Adam(module.parameters(), lr=PRETRAINING_RATE)
    torch.manual_seed(0)
    for step, y in enumerate(torch.from_numpy(examples.y).split(PRETRAINING_BATCH)):
        output = app.call(module, {key: parts[step] for key, parts in inputs.items()})
        assert isinstance(output, torch.Tensor), "the App has checked its output"
        optimizer.zero_grad()
        app.loss(output, y).mean().backward()
        optimizer.step()
    torch.save(module.state_dict(), folder / STATE)


def main() -> None:
    """Prepare the model, and answer requests until the input ends."""
    torch.set_num_threads(1)
    name, folder = sys.argv[1], Path(sys.argv[2])
    prepare(name, folder)
    eager = EagerModel(name, folder)
    eager.timed_ms(1)
    say({"first_step_s": time.monotonic(), "runtime": f"torch {torch.__version__}"})
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "steps":
            eager.write_steps()
            say({})
        else:
            say({"ms": eager.timed_ms(request["num"])})


if __name__ == "__main__":
    main()
