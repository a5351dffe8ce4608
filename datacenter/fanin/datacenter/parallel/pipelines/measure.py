"""How long each part of a model takes on this machine: what a pipeline is cut by, measured before it is cut.

One microbatch goes through the model. Each part that the layout names is computed several times as the microbatch
reaches it, forward and backward, and hands on what it gave. So there is one part at a time on the device, with one
part's activations and gradients, and a model that no device could hold can be measured. The module is as it was
afterwards, to the bit: parts are computed with values that are its own and gradients that are not, with copies of its
statistics, and with random numbers that nobody else draws. Parts are whole, as no ``tp`` splits them, and not compiled.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fanin.datacenter.parallel.build import Model
from fanin.datacenter.parallel.engine import Batch
from fanin.datacenter.parallel.layout import Layout
from fanin.datacenter.parallel.pipelines.pipeline import skeleton
from fanin.datacenter.parallel.recompute import recomputed
from fanin.datacenter.parallel.settings import ParallelSettings, Recompute
from fanin.datacenter.parallel.shard import HALF
from fanin.protos.errors import InvalidInput

REPEATS: Final = 5
"""An odd number, of which the median is taken; one more comes first and does not count."""
CPU: Final = torch.device("cpu")
ALONE: Final = ParallelSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What is called beside the model: a clock; and after each part whoever waits for the rest, as it is not timed."""

    clock: Callable[[], float] = time.perf_counter
    after_part: Callable[[], object] = lambda: None


BESIDE: Final = Beside()


def measure_layer_times(
    model: Model,
    batch: Batch,
    parallel: ParallelSettings = ALONE,
    device: torch.device = CPU,
    beside: Beside = BESIDE,
) -> tuple[float, ...]:
    """Seconds of the inputs, each layer, and the outputs with the loss, for one microbatch, forward and backward.

    ``batch`` is the microbatch, where the module is. Of ``parallel`` the precision counts, and what is computed again.
    What is not to train must be frozen already. Raises InvalidInput if a part gives no tensor.
    """
    stopwatch = _Stopwatch(device=device, half=HALF.get(parallel.precision), beside=beside)
    places = dict(_places(model.layout))
    times = [0.0] * (model.layout.sizes.num_layers + 2)

    def timed(name: str, mode: Recompute) -> nn.Module:
        part, place = model.module.get_submodule(name), places[name]

        def run(*args: object, **kwargs: object) -> Tensor:
            output, seconds = stopwatch.time(_calls(part, name, mode), _values(part), (args, kwargs))
            times[place] += seconds
            return output

        return _Timed(run)

    layers = range(1, len(times) - 1)
    parts = {name: timed(name, parallel.recompute if place in layers else "none") for name, place in places.items()}
    with _undisturbed(model.module, device), torch.enable_grad():
        outputs = skeleton(model.module, parts).train()(batch.inputs, **batch.extra)
        # The loss is the last stage's too.
        _, seconds = stopwatch.time(
            lambda values, args, kwargs: model.objective.loss_sum(*args), {}, ((outputs, batch.targets), {})
        )
        times[-1] += seconds
    return tuple(times)


Arguments = tuple[tuple[object, ...], dict[str, object]]


class _Timed(nn.Module):
    """Stands where a part is. What it runs is no module within it, so that nothing reaches the part by way of it."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self._run = run

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """What the part gives."""
        return self._run(*args, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stopwatch:
    device: torch.device
    half: torch.dtype | None
    beside: Beside

    def time(
        self,
        compute: Callable[..., Tensor],
        values: Mapping[str, Tensor],
        given: Arguments,
    ) -> tuple[Tensor, float]:
        """(what a part gives, where its arguments are, and the seconds that it takes forward and backward)."""
        leaves: list[Tensor] = []
        here = {name: _moved(value, self.device, leaves) for name, value in values.items()}
        args, kwargs = (_moved(each, self.device, leaves) for each in given)
        found, output = [], None
        for _ in range(1 + REPEATS):
            # Freed first: two of them are never there.
            output = None
            started_s = self._now()
            with self._precision():
                output = compute(here, args, kwargs)
            if output.requires_grad:
                torch.autograd.grad(output, leaves, torch.ones_like(output), allow_unused=True)
            found.append(self._now() - started_s)
        assert output is not None
        self.beside.after_part()
        handed = output.detach().to(_home(given)).requires_grad_(output.requires_grad)
        return handed, median(found[1:])

    def _now(self) -> float:
        if self.device.type == "cuda":
            # What was given out is to be done.
            torch.cuda.synchronize(self.device)
        return self.beside.clock()

    def _precision(self) -> AbstractContextManager[object]:
        return nullcontext() if self.half is None else torch.autocast(self.device.type, self.half)


def _places(layout: Layout) -> Iterator[tuple[str, int]]:
    """The name of each part and whose time its own is."""
    num_layers = layout.sizes.num_layers
    yield from ((name, 0) for name in layout.inputs)
    yield from ((f"{layout.layers}.{layer}", 1 + layer) for layer in range(num_layers))
    yield from ((name, 1 + num_layers) for name in layout.outputs)


def _values(part: nn.Module) -> dict[str, Tensor]:
    """A part's parameters, and copies of its buffers, which a forward pass may change."""
    buffers = {name: value.detach().clone() for name, value in part.named_buffers()}
    return {**dict(part.named_parameters()), **buffers}


def _calls(part: nn.Module, name: str, mode: Recompute) -> Callable[..., Tensor]:
    """A part as it is computed with values that are given, and recomputed as in training."""

    def call(values: dict[str, Tensor], args: tuple[object, ...], kwargs: Mapping[str, object]) -> Tensor:
        def forward(*args: object, **kwargs: object) -> object:
            return functional_call(part, values, args, kwargs)

        output = recomputed(forward, mode)(*args, **kwargs)
        if not isinstance(output, Tensor):
            raise InvalidInput(f"layout: {name} gives {type(output).__name__}, expected one tensor that is handed on")
        return output

    return call


def _moved(value: object, device: torch.device, leaves: list[Tensor]) -> object:
    """What a part is given, on a device; tensors whose gradients it is to make are put into ``leaves``."""
    if isinstance(value, Tensor):
        moved = value.detach().to(device).requires_grad_(value.requires_grad)
        if moved.requires_grad:
            leaves.append(moved)
        return moved
    # Kinds of their own that hold tensors are handed on as they are.
    if type(value) is tuple:
        return tuple(_moved(each, device, leaves) for each in value)
    if type(value) is dict:
        return {name: _moved(each, device, leaves) for name, each in value.items()}
    return value


def _home(given: Arguments) -> torch.device:
    args, kwargs = given
    return next((each.device for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), CPU)


@contextmanager
def _undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Train mode within; afterwards the modes and the random numbers are as they were."""
    modes = {each: each.training for each in module.modules()}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            module.train()
            yield
        finally:
            for each, training in modes.items():
                each.training = training
