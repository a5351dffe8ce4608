"""Measures the time of each part of a model on this machine, so that a pipeline can be cut by it.

One microbatch runs through the model. When the microbatch reaches a part that the layout names, the part is computed
several times, forward and backward. Its output is the input of the next part. Only one part at a time is on the device,
with its own activations and gradients. A model that is too large for the device can therefore be measured. Parameters
on the meta device are random numbers in the measurement.

The measurement leaves the module bit-identical. Parts use their own parameters, but separate gradients, copies of the
buffers and a forked random number generator. Parts are complete, not split by ``tp``, and not compiled.
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

from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.layout import Layout
from fanin.datacenter.parallel.pipelines.stages import skeleton
from fanin.datacenter.parallel.settings import ParallelSettings, Recompute
from fanin.datacenter.parallel.transforms.data import HALF
from fanin.datacenter.parallel.transforms.recompute import recomputed
from fanin.protos.errors import InvalidInput

REPEATS: Final = 5
"""Timed repetitions of a part, after one that is not timed. The result is their median, so the number is odd."""
INITIAL_STD: Final = 0.02
"""Standard deviation of parameters that have no values yet."""
CPU: Final = torch.device("cpu")
ALONE: Final = ParallelSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementHooks:
    """Functions that a measurement calls.

    Attributes:
        clock: returns seconds.
        after_part: called after each part, outside of the timed region.
    """

    clock: Callable[[], float] = time.perf_counter
    after_part: Callable[[], object] = lambda: None


DEFAULT_HOOKS: Final = MeasurementHooks()


def measure_layer_times(
    model: TrainableModel,
    batch: Batch,
    parallel: ParallelSettings = ALONE,
    device: torch.device = CPU,
    hooks: MeasurementHooks = DEFAULT_HOOKS,
) -> tuple[float, ...]:
    """Measure the seconds of each part of a model for one microbatch, forward and backward.

    Args:
        model: the complete model. Parameters that do not train must be frozen already.
        batch: the microbatch, on the device of the module.
        parallel: the settings of the job. Only ``precision`` and ``recompute`` are used.
        device: the device that computes the parts.
        hooks: the clock, and a function that is called after each part.

    Returns:
        Seconds of the inputs, each layer, and the outputs with the loss: ``num_layers + 2`` numbers.

    Raises:
        InvalidInput: a part does not return exactly one tensor.
    """
    stopwatch = _Stopwatch(device=device, half=HALF.get(parallel.precision), hooks=hooks)
    index_of = dict(_time_indices(model.layout))
    times = [0.0] * (model.layout.sizes.num_layers + 2)

    def timed(name: str, mode: Recompute) -> nn.Module:
        part, index = model.module.get_submodule(name), index_of[name]

        def run(*args: object, **kwargs: object) -> Tensor:
            output, seconds = stopwatch.time(_calling(part, name, mode), _values(part), (args, kwargs))
            times[index] += seconds
            return output

        return _TimedModule(run)

    layers = range(1, len(times) - 1)
    parts = {name: timed(name, parallel.recompute if index in layers else "none") for name, index in index_of.items()}
    with _restored(model.module, device), torch.enable_grad():
        outputs = skeleton(model.module, parts).train()(batch.inputs, **batch.extra)
        # The last stage also computes the loss.
        _, seconds = stopwatch.time(
            lambda values, args, kwargs: model.objective.loss_sum(*args), {}, ((outputs, batch.targets), {})
        )
        times[-1] += seconds
    return tuple(times)


Arguments = tuple[tuple[object, ...], dict[str, object]]


class _TimedModule(nn.Module):
    """A substitute for a part that times it. The part is not a submodule, so module traversals do not reach it."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self._run = run

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """Return the output of the part."""
        return self._run(*args, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stopwatch:
    device: torch.device
    half: torch.dtype | None
    hooks: MeasurementHooks

    def time(
        self,
        compute: Callable[..., Tensor],
        values: Mapping[str, Tensor],
        arguments: Arguments,
    ) -> tuple[Tensor, float]:
        """Return (the output of a part on the device of its arguments, its seconds forward and backward)."""
        leaves: list[Tensor] = []
        own_values = {name: _moved(value, self.device, leaves) for name, value in values.items()}
        args, kwargs = (_moved(each, self.device, leaves) for each in arguments)
        seconds, output = list[float](), None
        for _ in range(1 + REPEATS):
            # Freed first, so that two outputs are never in memory.
            output = None
            started_s = self._now()
            with self._precision():
                output = compute(own_values, args, kwargs)
            if output.requires_grad:
                torch.autograd.grad(output, leaves, torch.ones_like(output), allow_unused=True)
            seconds.append(self._now() - started_s)
        assert output is not None
        self.hooks.after_part()
        result = output.detach().to(_device_of(arguments)).requires_grad_(output.requires_grad)
        return result, median(seconds[1:])

    def _now(self) -> float:
        if self.device.type == "cuda":
            # Kernels run asynchronously.
            torch.cuda.synchronize(self.device)
        return self.hooks.clock()

    def _precision(self) -> AbstractContextManager[object]:
        return nullcontext() if self.half is None else torch.autocast(self.device.type, self.half)


def _time_indices(layout: Layout) -> Iterator[tuple[str, int]]:
    """Yield the name of each part and the index of the time that it adds to."""
    num_layers = layout.sizes.num_layers
    yield from ((name, 0) for name in layout.inputs)
    yield from ((f"{layout.layers}.{layer}", 1 + layer) for layer in range(num_layers))
    yield from ((name, 1 + num_layers) for name in layout.outputs)


def _values(part: nn.Module) -> dict[str, Tensor]:
    """Return a part's parameters, and copies of its buffers, which a forward pass may change."""
    buffers = {name: value.detach().clone() for name, value in part.named_buffers()}
    return {**dict(part.named_parameters()), **buffers}


def _calling(part: nn.Module, name: str, mode: Recompute) -> Callable[..., Tensor]:
    """Return a function that computes a part with other values, and recomputes activations as in training."""

    def call(values: dict[str, Tensor], args: tuple[object, ...], kwargs: Mapping[str, object]) -> Tensor:
        def forward(*args: object, **kwargs: object) -> object:
            return functional_call(part, values, args, kwargs)

        output = recomputed(forward, mode)(*args, **kwargs)
        if not isinstance(output, Tensor):
            raise InvalidInput(
                f"layout: {name} returned {type(output).__name__}, expected one tensor; return a tensor in its forward",
                code="FN-1306",
            )
        return output

    return call


def _moved(value: object, device: torch.device, leaves: list[Tensor]) -> object:
    """Return an argument of a part on a device. Tensors that require gradients are appended to ``leaves``."""
    if isinstance(value, Tensor):
        if value.is_meta:
            # Times do not depend on the values, but the smallest numbers of uninitialized memory are slow.
            moved = torch.empty_like(value, device=device).normal_(std=INITIAL_STD).requires_grad_(value.requires_grad)
        else:
            moved = value.detach().to(device).requires_grad_(value.requires_grad)
        if moved.requires_grad:
            leaves.append(moved)
        return moved
    # Other classes that contain tensors are passed on unchanged.
    if type(value) is tuple:
        return tuple(_moved(each, device, leaves) for each in value)
    if type(value) is dict:
        return {name: _moved(each, device, leaves) for name, each in value.items()}
    return value


def _device_of(arguments: Arguments) -> torch.device:
    args, kwargs = arguments
    return next((each.device for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), CPU)


@contextmanager
def _restored(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Set train mode, and restore the modes and the random number generators at the end."""
    modes = {each: each.training for each in module.modules()}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            module.train()
            yield
        finally:
            for each, training in modes.items():
                each.training = training
