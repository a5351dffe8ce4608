"""One model of the zoo, in a process of its own: exported in each format, and trained for five steps.

    .venv-zoo/bin/python benchmarks/zoo_model.py NAME FORMAT...

It prints the row of ``zoo.py`` as JSON. Before each step the runtime receives torch's own state, so that the error of a
step does not grow in the next one.
"""

import copy
import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from zoo_packages import NUM_CALIBRATION, prepare_imports
from zoo_sequences import SEQUENCES
from zoo_vision import VISION

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.remote_runtime import runtime_of

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.export import App, export
from fanin.edge.export.module.draws import fixed_draws, values_of
from fanin.edge.export.module.kernels import plain_kernels
from fanin.edge.ranges import columns, initial_ranges, ranges_of_data
from fanin.edge.runtimes.base import PaddedBatch, Predict, Runtime, StepSettings, TrainState
from fanin.edge.runtimes.graphs import optimizer_table, state_port
from fanin.edge.runtimes.randomness import random_key, random_ports
from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos.errors import FaninError

MODELS: Final = MappingProxyType({**VISION, **SEQUENCES})
RUNTIMES: Final = MappingProxyType({"onnx": ("onnx",), "tflite": ("litert", "tflite")})
"""The runtimes of each format."""
KEY: Final = SigningKey(bytes(range(32)))
RANDOM_KEY: Final = random_key(1, 2, 3)
BATCH_SIZE: Final = 4
NUM_STEPS: Final = 5
LEARNING_RATE: Final = 0.01
LEAST_RMS: Final = 0.01
"""Least root mean square to which the difference of a tensor is relative."""
ROUNDING: Final = 1e-7
"""Relative difference of a parameter that is rounded differently."""
NUM_SHAKEN: Final = 2
"""Trials with parameters that are rounded differently."""
Row = dict[str, object]
Tensors = Mapping[str, Tensor]
Optimizer = torch.optim.Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of eager torch.

    Attributes:
        before: The state before it, in the form of a train graph.
        batch: Its examples.
        after: The parameters after it.
        exact: The parameters after the same step in float64.
        shaken: The parameters after it from parameters that are rounded differently, by trial.
    """

    before: TrainState
    batch: PaddedBatch
    after: Float32s
    exact: Float32s
    shaken: tuple[Float32s, ...]


def main() -> None:
    """Print the row of one model."""
    name, *formats = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    prepare_imports()
    torch.manual_seed(0)
    stock = MODELS[name].make()
    app = App(
        name=name,
        module=stock.module,
        calibration={key: value[:NUM_CALIBRATION] for key, value in stock.inputs.items()},
        batch_size=BATCH_SIZE,
        num_classes=stock.num_classes,
        class_axis=stock.class_axis,
        loss=stock.loss,
        output=stock.output,
    )
    held_out = {key: value[NUM_CALIBRATION:] for key, value in stock.inputs.items()}
    row: Row = {
        "package": MODELS[name].package,
        "version": version(MODELS[name].package),
        "model": name,
        "settings": MODELS[name].settings,
        "parameters": sum(value.numel() for value in app.module.parameters()),
        "formats": {each: in_format(app, held_out, each) for each in formats},
    }
    sys.stdout.write(json.dumps(row) + "\n")


def in_format(app: App, held_out: Tensors, graph_format: str) -> Row:
    """Return the results of one format: the refusal, or those of its runtimes."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fanin-zoo-") as folder:
        try:
            bundle = export(app, Path(folder) / "bundle", KEY, (graph_format,)).bundle
        except Exception as exc:  # Of any kind: an error of a converter is a finding of the benchmark.
            logging.exception("%s", app.name)
            code = exc.code if isinstance(exc, FaninError) else type(exc).__name__
            return {"refusal": f"{code}: {exc}", "seconds": time.monotonic() - began_s}
        export_s = time.monotonic() - began_s
        runtimes = {name: runtime_of(name) for name in RUNTIMES[graph_format]}
        module = copy.deepcopy(app.module)

        def gaps(*, fresh: bool = False) -> dict[str, float]:
            """Return the gap of each runtime, with the scales of the export or with fresh ones."""
            parameters = bundle.completed(parameters_of(bundle, module))
            ranges = {
                each: fresh_ranges(app, bundle, runtimes[each], parameters) if fresh else None for each in runtimes
            }
            return {
                name: int8_gap(app, module, held_out, runtime.open_predict(bundle, parameters, ranges[name]))
                for name, runtime in runtimes.items()
            }

        before = gaps()
        row = differences(app, bundle, runtimes, module)
        after, fresh = gaps(), gaps(fresh=True)
        times = {"export_seconds": export_s, "seconds": time.monotonic() - began_s}
        return row | {"int8_at_export": before, "int8": after, "int8_fresh": fresh} | times


def differences(app: App, bundle: Bundle, runtimes: Mapping[str, Runtime], module: nn.Module) -> Row:
    """Train ``module`` for NUM_STEPS steps. Return the worst difference of each runtime, and of torch from itself."""
    table, settings = bundle.manifest.table, StepSettings(learning_rate=LEARNING_RATE, random_key=RANDOM_KEY)
    trains = {name: runtime.open_train(bundle) for name, runtime in runtimes.items()}
    errors: dict[str, tuple[float, str]] = dict.fromkeys(runtimes, (0.0, ""))
    exact, shaken = (0.0, ""), (0.0, "")
    for each in torch_steps(app, bundle, module):
        exact = max(exact, difference(table, each.exact, each.after))
        shaken = max(shaken, *(difference(table, trial, each.after) for trial in each.shaken))
        for name, train in trains.items():
            state, _ = train(each.before, each.batch, settings)
            errors[name] = max(errors[name], difference(table, state.parameters, each.after))
    return {
        "errors": {name: error for name, (error, _) in errors.items()},
        "tensors": {name: tensor for name, (_, tensor) in errors.items()},
        "float64": exact[0],
        "shaken": shaken[0],
    }


def torch_steps(app: App, bundle: Bundle, module: nn.Module) -> Iterator[Step]:
    """Train ``module`` in place. Return each step with what a runtime needs to repeat it."""
    optimizer = app.recipe.optimizer.eager(module.parameters(), LEARNING_RATE)
    generator = torch.Generator().manual_seed(0)
    for number in range(NUM_STEPS):
        before = state_of(bundle, module, optimizer, number)
        inputs, y = examples(app, module, generator)
        exact_module, exact_optimizer = in_float64(*copy.deepcopy((module, optimizer)))
        shaken_steps = []
        for _ in range(NUM_SHAKEN):
            shaken_module, shaken_optimizer = copy.deepcopy((module, optimizer))
            with torch.no_grad():
                for value in shaken_module.parameters():
                    value.mul_(1.0 + ROUNDING * torch.randn(value.shape, generator=generator))
            shaken_steps.append((shaken_module, shaken_optimizer))
        for twin, its_optimizer in ((module, optimizer), (exact_module, exact_optimizer), *shaken_steps):
            train(app, bundle, twin, its_optimizer, (inputs, y), number)
        yield Step(
            before=before,
            batch=PaddedBatch(
                inputs={name: value.numpy() for name, value in inputs.items()},
                y=y.numpy().astype(np.int32 if app.num_classes else np.float32),
                mask=np.ones(BATCH_SIZE, np.float32),
            ),
            after=parameters_of(bundle, module),
            exact=parameters_of(bundle, exact_module),
            shaken=tuple(parameters_of(bundle, twin) for twin, _ in shaken_steps),
        )


def train(
    app: App,
    bundle: Bundle,
    module: nn.Module,
    optimizer: Optimizer,
    batch: tuple[Tensors, Tensor],
    number: int,
) -> None:
    """Run one step of eager torch, in the dtype of the module, with the random numbers of a device."""
    dtype = next(module.parameters()).dtype
    inputs, y = batch
    ports = random_ports(bundle.manifest.signatures["train"].inputs)
    optimizer.zero_grad()
    with ExitStack() as stack:
        if ports:
            stack.enter_context(plain_kernels())
            stack.enter_context(fixed_draws(ports, values_of(ports, RANDOM_KEY, number)))
        output = app.call(module, {name: cast(value, dtype) for name, value in inputs.items()})
        app.loss(output, cast(y, dtype)).mean().backward()
    optimizer.step()


def cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values in a dtype, and integers as they are."""
    return value.to(dtype) if value.is_floating_point() else value


def in_float64(module: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Convert a module and its optimizer in place. Return both."""
    module.double()
    for state in optimizer.state.values():
        state |= {key: cast(value, torch.float64) for key, value in state.items() if isinstance(value, Tensor)}
    return module, optimizer


def examples(app: App, module: nn.Module, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Return a batch of random rows of the calibration data, and random targets."""
    num = len(next(iter(app.inputs.values())))
    rows = torch.randint(num, (BATCH_SIZE,), generator=generator)
    inputs = {name: value[rows] for name, value in app.inputs.items()}
    values = predictions(app, module, inputs)
    if not app.num_classes:
        return inputs, torch.randn(values.shape, generator=generator)
    return inputs, torch.randint(app.num_classes, values.shape[:-1], generator=generator)


def predictions(app: App, module: nn.Module, inputs: Tensors) -> Tensor:
    """Return the predictions of a module in evaluation, with the classes in the last axis."""
    with torch.no_grad():
        output = app.call(copy.deepcopy(module).eval(), dict(inputs))
    return app.predicted(output)


def state_of(bundle: Bundle, module: nn.Module, optimizer: Optimizer, num_steps: int) -> TrainState:
    """Return the state of torch in the form of a train graph."""
    momenta = {
        state_port("momentum", name): optimizer.state[value].get("momentum_buffer", torch.zeros_like(value))
        for name, value in module.named_parameters()
    }
    return TrainState(
        parameters=parameters_of(bundle, module),
        optimizer=flat(optimizer_table(bundle.manifest), momenta),
        num_steps=num_steps,
    )


def parameters_of(bundle: Bundle, module: nn.Module) -> Float32s:
    """Return the parameters and buffers of a module in the order of the Bundle, in the module's dtype."""
    return flat(bundle.manifest.table, dict(module.named_parameters()) | dict(module.named_buffers()))


def flat(table: TensorTable, tensors: Tensors) -> Float32s:
    """Return a copy of tensors in the order of a table."""
    values: Float32s = np.concatenate([tensors[spec.name].detach().numpy().reshape(-1) for spec in table.specs])
    return values


def difference(table: TensorTable, actual: Float32s, expected: Float32s) -> tuple[float, str]:
    """Return the largest relative L2 difference of a tensor, and its name.

    The difference is relative to the norm of ``expected``. A tensor whose root mean square is below LEAST_RMS counts as
    if it were LEAST_RMS: a bias that only rounding moves has almost no norm.
    """
    worst, offset = (0.0, ""), 0
    for spec in table.specs:
        size = int(np.prod(spec.shape))
        a, b = (values[offset : offset + size].astype(np.float64) for values in (actual, expected))
        norm = max(float(np.linalg.norm(b)), LEAST_RMS * size**0.5)
        worst, offset = max(worst, (float(np.linalg.norm(a - b)) / norm, spec.name)), offset + size
    return worst


def fresh_ranges(app: App, bundle: Bundle, runtime: Runtime, parameters: Float32s) -> Float32s:
    """Return the ranges of the activations for these parameters, measured on the calibration data."""
    lows, highs = runtime.open_ranges(bundle, parameters)({name: value.numpy() for name, value in app.inputs.items()})
    where = columns(bundle.manifest.activations, runtime.graph_format)
    ranges = initial_ranges(bundle.manifest.activations).reshape(-1, 2)
    ranges[where] = ranges_of_data(lows, highs, ranges[where])
    return ranges.reshape(-1)


def int8_gap(app: App, module: nn.Module, inputs: Tensors, predict: Predict) -> float:
    """Return the rms of int8's difference from torch, relative to the spread of torch's predictions."""
    expected = predictions(app, module, inputs).numpy()
    actual = predict({name: value.numpy() for name, value in inputs.items()})
    return float(np.sqrt(np.square(actual - expected).mean()) / expected.std())


if __name__ == "__main__":
    main()
