"""Parity: twenty train steps of each reference model in each runtime, compared with eager torch.

    python benchmarks/parity.py [--models resnet8,gru] [--json FILE]          (tflite-runtime: `make devices`)
    python benchmarks/parity.py --layers [--json FILE]                        (each kind of layer instead)

The benchmark reports the largest difference of a parameter, max |a - b| / max(1, |b|), after twenty steps of SGD with
momentum. The columns ", 1" report the largest difference after a single step from eager torch's own state, over the
twenty steps.

The reference column is the difference between float32 and float64 in eager torch after twenty steps. If the input of a
ReLU is almost zero, rounding decides its sign. A model that amplifies such a difference ends elsewhere in every
runtime.

Convolutional models are first trained a little. Their BatchNorms then keep their statistics, as on devices. In
``-batch`` models the norms train from the beginning; ``-group`` models have GroupNorms.
"""

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.layer_parity import RUNTIMES as FORMATS
from support.layer_parity import Course as LayerCourse
from support.layers import CASES
from support.remote_runtime import runtime_of

from fanin.datacenter.models import cnn, mlp
from fanin.datacenter.models.recurrent import RecurrentClassifier, RecurrentShape
from fanin.datacenter.models.tiny import ds_cnn, mobilenet, resnet8
from fanin.datacenter.models.tiny.layers import Norm
from fanin.datacenter.models.transformer import DecoderShape, DecoderTransformer
from fanin.edge.bundles.bundle import Bundle, open_folder, read_signed_manifest
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.export import App, Recipe, Sgd, export, next_token
from fanin.edge.runtimes.base import PaddedBatch, StepSettings, TrainState
from fanin.edge.runtimes.graphs import optimizer_table, state_port
from fanin.edge.tensors import Float32s, TensorTable

RUNTIMES: Final = ("onnx", "litert", "tflite")
NUM_STEPS: Final = 20
NUM_BATCHES: Final = 5
NUM_EARLIER_STEPS: Final = 100
"""Training steps before the statistics of a BatchNorm are frozen."""
MOMENTUM: Final = 0.9
VOCABULARY: Final = 32
LENGTH: Final = 8
NOISE: Final = 0.3
SMOOTHING: Final = 0.1
"""Label smoothing. Without it a model that has memorized its data would have gradients of rounding errors only."""
Data = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A module, the data of some batches, and the number of classes."""

    module: Callable[[], nn.Module]
    data: Callable[[int], Data]
    num_classes: int
    batch_size: int = 8
    learning_rate: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The batches that every runtime trains on, in order."""

    bundle: Bundle
    batches: Sequence[Data]
    learning_rate: float

    def batch(self, index: int) -> Data:
        """Return the batch of a step."""
        return self.batches[index % len(self.batches)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The results of one model."""

    export_s: float
    eager32: float
    """eager float32 against eager float64"""
    differences: Mapping[str, float]
    """by runtime, after all steps"""
    in_a_step: Mapping[str, float]
    """by runtime, the worst step from a state of eager torch"""
    moved: float
    """The largest movement of a parameter: what the differences are to be seen beside."""


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each sample."""
    return nn.functional.cross_entropy(logits, labels, label_smoothing=SMOOTHING, reduction="none")


def images(shape: Sequence[int], num_classes: int) -> Callable[[int], Data]:
    """Return one smooth image for each class, with noise."""

    def make(num: int) -> Data:
        coarse = torch.rand(num_classes, shape[0], 4, 4)
        prototypes = nn.functional.interpolate(coarse, size=tuple(shape[1:]), mode="bilinear")
        labels = torch.arange(num) % num_classes
        return prototypes[labels] + NOISE * torch.rand(num, *shape), labels

    return make


def sequences(num: int) -> Data:
    """Return sequences that count up by a step of their own. The label is the step."""
    pace = torch.arange(num) % 4
    start = torch.randint(0, VOCABULARY, (num,))
    places = torch.arange(LENGTH)
    return ((start[:, None] + (pace[:, None] + 1) * places) % VOCABULARY).to(torch.int32), pace


def next_tokens(num: int) -> Data:
    """Return the same sequences with each next token as the target."""
    x, _ = sequences(num)
    return x, torch.cat([x[:, 1:], torch.full((num, 1), -1, dtype=torch.int32)], dim=1).long()


def convolutional(name: str, norm: Norm) -> Callable[[], nn.Module]:
    """Return a convolutional reference model."""
    known: dict[str, Callable[[], nn.Module]] = {
        "resnet8": lambda: resnet8.ResNet8(norm=norm),
        "ds_cnn": lambda: ds_cnn.DsCnn(norm=norm),
        "mobilenet": lambda: mobilenet.MobileNetV1(norm=norm),
    }
    return known[name]


def recurrent(cell: str) -> Model:
    """Return a recurrent classifier."""
    shape = RecurrentShape(
        vocabulary=VOCABULARY, width=16, hidden=32, num_classes=4, cell="gru" if cell == "gru" else "lstm"
    )
    return Model(module=lambda: RecurrentClassifier(shape=shape), data=sequences, num_classes=4)


def reference(name: str, norm: Norm) -> Model:
    """Return an MLPerf Tiny model."""
    source = {"resnet8": resnet8, "ds_cnn": ds_cnn, "mobilenet": mobilenet}[name]
    return Model(
        module=convolutional(name, norm),
        data=images(source.INPUT_SHAPE, source.NUM_CLASSES),
        num_classes=source.NUM_CLASSES,
        batch_size=4,
        # With frozen statistics, larger steps diverge even in eager torch.
        learning_rate=0.001,
    )


DECODER: Final = DecoderShape(vocabulary=VOCABULARY, context=LENGTH, width=32, num_heads=2, num_blocks=2)
MODELS: Final[Mapping[str, Model]] = MappingProxyType(
    {
        "mlp": Model(module=mlp.Mlp, data=images(mlp.INPUT_SHAPE, mlp.NUM_CLASSES), num_classes=mlp.NUM_CLASSES),
        "digits_cnn": Model(
            module=cnn.DigitsCnn, data=images(cnn.INPUT_SHAPE, cnn.NUM_CLASSES), num_classes=cnn.NUM_CLASSES
        ),
        "decoder": Model(
            module=lambda: DecoderTransformer(shape=DECODER), data=next_tokens, num_classes=VOCABULARY, batch_size=4
        ),
        "gru": recurrent("gru"),
        "lstm": recurrent("lstm"),
        "ds_cnn": reference("ds_cnn", "batch"),
        "resnet8": reference("resnet8", "batch"),
        "mobilenet": reference("mobilenet", "batch"),
        "ds_cnn-batch": reference("ds_cnn", "batch"),
        "resnet8-batch": reference("resnet8", "batch"),
        "mobilenet-batch": reference("mobilenet", "batch"),
        "ds_cnn-group": reference("ds_cnn", "group"),
        "resnet8-group": reference("resnet8", "group"),
        "mobilenet-group": reference("mobilenet", "group"),
    }
)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Parameters after 20 steps in each runtime, against eager torch.")
    parser.add_argument("--models", default=",".join(name for name in MODELS if "-" not in name))
    parser.add_argument("--runtimes", default=",".join(RUNTIMES))
    parser.add_argument("--layers", action="store_true", help="the small modules of tests/support/layers.py instead")
    parser.add_argument("--json", metavar="FILE", default="")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.layers:
        return layers(options.json)
    runtimes = options.runtimes.split(",")
    rows = {}
    heads = [*runtimes, *(f"{name}, 1" for name in runtimes)]
    sys.stdout.write(f"{'model':16} {'moved':>9} {'eager32':>9} {' '.join(f'{name:>9}' for name in heads)}\n")
    for name in options.models.split(","):
        row = rows[name] = measured(name, MODELS[name], runtimes)
        values = [row.moved, row.eager32, *row.differences.values(), *row.in_a_step.values()]
        sys.stdout.write(f"{name:16} {' '.join(f'{value:9.1e}' for value in values)}\n")
        sys.stdout.flush()
    if options.json:
        Path(options.json).write_text(json.dumps(report_of(rows), indent=1) + "\n")
    return 0


def layers(json_file: str) -> int:
    """Return the table of layers: the largest difference of each kind after all steps, in each runtime."""
    rows = {}
    sys.stdout.write(f"{'layers':16} {' '.join(f'{name:>9}' for name in RUNTIMES)}\n")
    for case in CASES:
        course = LayerCourse(case)
        errors = {runtime: error for name in FORMATS for runtime, error in course.errors(name).items()}
        rows[case] = {runtime: max(errors[runtime].values()) for runtime in RUNTIMES}
        sys.stdout.write(f"{case:16} {' '.join(f'{value:9.1e}' for value in rows[case].values())}\n")
        sys.stdout.flush()
    if json_file:
        Path(json_file).write_text(json.dumps({"max_parameter_difference": rows}, indent=1) + "\n")
    return 0


def report_of(rows: Mapping[str, Row]) -> dict[str, object]:
    """Return the results as one JSON object."""
    return {
        "num_steps": NUM_STEPS,
        "learning_rate": {name: MODELS[name].learning_rate for name in rows},
        "max_parameter_difference": {name: dict(row.differences) for name, row in rows.items()},
        "max_parameter_difference_in_a_step": {name: dict(row.in_a_step) for name, row in rows.items()},
        "max_parameter_difference_eager_float32_to_float64": {name: row.eager32 for name, row in rows.items()},
        "max_parameter_movement": {name: row.moved for name, row in rows.items()},
        "export_seconds": {name: row.export_s for name, row in rows.items()},
    }


def measured(name: str, model: Model, runtimes: Sequence[str]) -> Row:
    """Measure one row of the table."""
    torch.manual_seed(0)
    module = model.module()
    x, y = model.data(NUM_BATCHES * model.batch_size)
    if "-" not in name:
        settle(module, x, y)
    batches = list(zip(x.split(model.batch_size), y.split(model.batch_size), strict=True))
    app = App(
        name=name,
        module=module,
        calibration=x,
        batch_size=model.batch_size,
        num_classes=model.num_classes,
        loss=next_token if y.dim() > 1 else smoothed,
        recipe=Recipe(optimizer=Sgd(momentum=MOMENTUM)),
    )
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fanin-parity-") as folder:
        key = SigningKey(bytes(range(32)))
        formats = sorted({runtime_of(runtime).graph_format for runtime in runtimes})
        export(app, Path(folder), key, formats)
        export_s = time.monotonic() - start
        bundle = open_folder(Path(folder), trusted=[read_signed_manifest(Path(folder)).public_key])
        course = Course(bundle=bundle, batches=batches, learning_rate=model.learning_rate)
        states = eager(course, module, torch.float32)
        expected, exact = states[-1].parameters, eager(course, module, torch.float64)[-1].parameters
        differences, in_a_step = {}, {}
        for runtime in runtimes:
            differences[runtime], in_a_step[runtime] = compared(course, runtime, states)
        return Row(
            export_s=export_s,
            eager32=difference(expected, exact),
            differences=differences,
            in_a_step=in_a_step,
            moved=float(np.abs(expected - bundle.initial_parameters()).max()),
        )


def settle(module: nn.Module, x: Tensor, y: Tensor) -> None:
    """Train a module with BatchNorms a little, and then freeze their statistics."""
    norms = [layer for layer in module.modules() if isinstance(layer, nn.BatchNorm2d)]
    if not norms:
        return
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=MOMENTUM)
    for _ in range(NUM_EARLIER_STEPS):
        some = torch.randperm(len(x))[: len(x) // 2]
        optimizer.zero_grad()
        torch.autograd.backward(smoothed(module(x[some]), y[some]).mean())
        optimizer.step()
    for layer in norms:
        layer.eval()


def eager(course: Course, module: nn.Module, dtype: torch.dtype) -> list[TrainState]:
    """Return torch's states before each step and after the last, in the dtype of the computation."""
    module = copy.deepcopy(module).to(dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=course.learning_rate, momentum=MOMENTUM)
    states = [state_of(course.bundle, module, optimizer, 0)]
    for index in range(NUM_STEPS):
        x, y = course.batch(index)
        optimizer.zero_grad()
        logits = module(x.to(dtype) if x.is_floating_point() else x)
        loss = next_token if y.dim() > 1 else smoothed
        torch.autograd.backward(loss(logits, y).mean())
        optimizer.step()
        states.append(state_of(course.bundle, module, optimizer, index + 1))
    return states


def state_of(bundle: Bundle, module: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> TrainState:
    """Return a state in the form of a train graph."""
    values = dict(module.named_parameters()) | dict(module.named_buffers())
    momenta = {
        state_port("momentum", name): optimizer.state[value].get("momentum_buffer", torch.zeros_like(value))
        for name, value in module.named_parameters()
    }

    def flat(table: TensorTable, tensors: Mapping[str, Tensor]) -> Float32s:
        state: Float32s = np.concatenate([tensors[spec.name].detach().numpy().reshape(-1) for spec in table.specs])
        return state

    return TrainState(
        parameters=flat(bundle.manifest.table, values),
        optimizer=flat(optimizer_table(bundle.manifest), momenta),
        num_steps=num_steps,
    )


def compared(course: Course, runtime: str, states: Sequence[TrainState]) -> tuple[float, float]:
    """Return the difference of a train graph after all steps, and the largest after one step from torch's own state."""
    step, settings = runtime_of(runtime).open_train(course.bundle), StepSettings(learning_rate=course.learning_rate)
    state, worst = step.begin(course.bundle.initial_parameters()), 0.0
    for index in range(NUM_STEPS):
        x, y = course.batch(index)
        batch = PaddedBatch(inputs={"x": x.numpy()}, y=y.to(torch.int32).numpy(), mask=np.ones(len(x), np.float32))
        state, _ = step(state, batch, settings)
        once, _ = step(states[index], batch, settings)
        worst = max(worst, difference(once.parameters, states[index + 1].parameters))
    return difference(state.parameters, states[-1].parameters), worst


def difference(actual: Float32s, expected: Float32s) -> float:
    """Return max |a - b| / max(1, |b|)."""
    return float((np.abs(actual - expected) / np.maximum(1.0, np.abs(expected))).max())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
