"""Targets and outputs of several kinds of models, in exported graphs and in a vectorized step, against eager torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from onnxruntime import InferenceSession
from support.models import export_bundle
from support.nightly import in_ci
from support.remote_runtime import runtime_of
from torch import Tensor, nn
from torch.nn import functional

from fanin.clients.data.batching import batches_in_order
from fanin.clients.data.examples import Examples
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export import App, cross_entropy, next_token
from fanin.edge.export.losses import Loss
from fanin.edge.export.standalone.floats import float_models
from fanin.edge.export.vectorized.step import VectorSettings, VectorStep
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import PaddedBatch, StepSettings
from fanin.edge.runtimes.measure import measure
from fanin.protos.errors import UnsupportedModel
from fanin.server.evaluation.metrics import evaluate_version

RATE = 0.05
NUM = 77
BATCH_SIZE = 8
NUM_CLASSES = 3
LENGTH = 6
QUANTILES = (0.1, 0.5, 0.9)


class ClassesFirst(nn.Module):
    """A segmentation model as torch has them: its class scores are (B, C, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, NUM_CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, C, H, W)."""
        return self.last(torch.relu(self.first(x)))


class Pixels(ClassesFirst):
    """A segmentation model that returns the classes as the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, H, W, C)."""
        return super().forward(x).movedim(1, -1)


class Cells(nn.Module):
    """A detector: for each of 4 x 4 cells, the score of an object, its box and its class."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(8, 5 + NUM_CLASSES, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Values (B, 5 + C, 4, 4)."""
        return self.body(x)


class TwoClassifiers(nn.Module):
    """A classifier with an auxiliary classifier on its hidden layer, which only the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 16), nn.Linear(16, NUM_CLASSES)
        self.auxiliary = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor) -> dict[str, object]:
        """Logits (B, C) of both classifiers; the auxiliary ones are in a tuple."""
        hidden = torch.tanh(self.first(x))
        return {"others": (hidden, self.auxiliary(hidden)), "logits": self.last(hidden)}


class TwoHeads(nn.Module):
    """Two heads of different sizes on one body: the class of a sample, and two of its measures."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.measures = nn.Linear(5, 16), nn.Linear(16, NUM_CLASSES), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, C) and values (B, 2)."""
        hidden = torch.tanh(self.body(x))
        return self.kind(hidden), self.measures(hidden)


def two_classifiers_loss(output: dict[str, Tensor], y: Tensor) -> Tensor:
    """Return the sum of both classifiers' losses for y (B,), with a weight of 0.3 for the inner one."""
    inner = functional.cross_entropy(output["others.1"], y.long(), reduction="none")
    return functional.cross_entropy(output["logits"], y.long(), reduction="none") + 0.3 * inner


def two_heads_loss(output: dict[str, Tensor], y: Tensor) -> Tensor:
    """Return the sum of both heads' losses for y (B, 3): the number of the class, and two measures."""
    class_loss = functional.cross_entropy(output["0"], y[:, 0].long(), reduction="none")
    return class_loss + 0.5 * (output["1"] - y[:, 1:]).square().mean(dim=1)


def gaussian_loss(output: Tensor, y: Tensor) -> Tensor:
    """Return the negative log-likelihood of y (B, 1) for means and logarithms of variances (B, 2)."""
    mean, log_variance = output[:, :1], output[:, 1:]
    return (0.5 * (log_variance + (y - mean).square() * torch.exp(-log_variance))).mean(dim=1)


def pinball_loss(output: Tensor, y: Tensor) -> Tensor:
    """Return the mean pinball loss of three quantiles (B, 3) for y (B,)."""
    error = y.unsqueeze(1) - output
    quantiles = torch.tensor(QUANTILES)
    return torch.maximum(quantiles * error, (quantiles - 1.0) * error).mean(dim=1)


def pixel_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Return torch's cross-entropy, averaged over the labelled pixels (B, H, W) of each sample."""
    losses = functional.cross_entropy(logits.movedim(-1, 1), y.long(), ignore_index=-1, reduction="none")
    return losses.sum(dim=(1, 2)) / (y >= 0).sum(dim=(1, 2)).clamp(min=1)


def class_axis_loss(output: Tensor, y: Tensor) -> Tensor:
    """Return torch's cross-entropy of scores (B, C, H, W), averaged over the pixels (B, H, W) of each sample."""
    return functional.cross_entropy(output, y, ignore_index=-1, reduction="none").mean(dim=(1, 2))


def cell_loss(output: Tensor, y: Tensor) -> Tensor:
    """Return the loss of a detector for y (B, 6, 4, 4): the presence of an object, its box, and its class number."""
    has_object, box, kind = y[:, 0], y[:, 1:5], y[:, 5:]
    presence_loss = functional.binary_cross_entropy_with_logits(output[:, 0], has_object, reduction="none")
    box_loss = functional.smooth_l1_loss(output[:, 1:5], box, reduction="none").sum(dim=1)
    is_kind = (kind == torch.arange(NUM_CLASSES, dtype=y.dtype).reshape(1, -1, 1, 1)).to(y.dtype)
    class_loss = -(is_kind * torch.log_softmax(output[:, 5:], dim=1)).sum(dim=1)
    return (presence_loss + has_object * (box_loss + class_loss)).mean(dim=(1, 2))


@dataclass(frozen=True)
class Case:
    """A model, its loss, and the data of a device."""

    module: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    x: Callable[[np.random.Generator], np.ndarray]
    y: Callable[[np.random.Generator], np.ndarray]
    num_classes: int = 0
    is_declared: bool = False
    output: str | tuple[str, ...] = ""
    class_axis: int = -1


def normal_values(*shape: int) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: rng.normal(size=(NUM, *shape)).astype(np.float32)


def labels(lowest: int, *shape: int) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: rng.integers(lowest, NUM_CLASSES, (NUM, *shape)).astype(np.int32)


def cells(rng: np.random.Generator) -> np.ndarray:
    y = rng.uniform(size=(NUM, 6, 4, 4)).astype(np.float32)
    y[:, 0] = y[:, 0] < 0.3
    y[:, 5] = rng.integers(0, NUM_CLASSES, (NUM, 4, 4))
    return y


def kinds_of(rng: np.random.Generator) -> np.ndarray:
    return np.column_stack([rng.integers(0, NUM_CLASSES, NUM), rng.normal(size=(NUM, 2))]).astype(np.float32)


def perceptron(num_outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, num_outputs))


CASES = {
    "heteroscedastic": Case(lambda: perceptron(2), gaussian_loss, normal_values(5), normal_values(1), is_declared=True),
    "quantiles": Case(lambda: perceptron(3), pinball_loss, normal_values(5), normal_values(), is_declared=True),
    "sequence labels": Case(
        lambda: nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, NUM_CLASSES)),
        next_token,
        normal_values(LENGTH, 5),
        labels(-1, LENGTH),
        NUM_CLASSES,
    ),
    "segmentation": Case(Pixels, pixel_loss, normal_values(1, 8, 8), labels(-1, 8, 8), NUM_CLASSES),
    "class axis": Case(
        ClassesFirst, class_axis_loss, normal_values(1, 8, 6), labels(-1, 8, 6), NUM_CLASSES, class_axis=1
    ),
    "detection": Case(Cells, cell_loss, normal_values(1, 8, 8), cells, is_declared=True),
    "inner classifier": Case(
        TwoClassifiers, two_classifiers_loss, normal_values(5), labels(0), NUM_CLASSES, output=("logits", "others.1")
    ),
    "two heads": Case(TwoHeads, two_heads_loss, normal_values(5), kinds_of, is_declared=True, output=("0", "1")),
}


@cache
def examples_of(name: str) -> Examples:
    rng = np.random.default_rng(5)
    return Examples(inputs={"x": CASES[name].x(rng)}, y=CASES[name].y(rng))


def targets_app(name: str) -> App:
    case, data = CASES[name], examples_of(name)
    torch.manual_seed(0)
    return App(
        name="targets",
        module=case.module(),
        calibration=data.inputs["x"],
        batch_size=BATCH_SIZE,
        num_classes=case.num_classes,
        class_axis=case.class_axis,
        loss=case.loss,
        output=case.output,
        targets=data.y if case.is_declared else None,
        validation=(data.inputs["x"], data.y),
    )


@cache
def targets_bundle(name: str, formats: tuple[str, ...]) -> Bundle:
    return export_bundle(targets_app(name), formats)


def targets_of(y: np.ndarray) -> Tensor:
    """Return targets as a loss receives them: integers are int64."""
    return torch.from_numpy(y.astype(np.int64) if y.dtype == np.int32 else y)


IN_CI = ("class axis", "detection", "two heads")
RUNS = [(name, runtime) for name in CASES for runtime in ("onnx", "litert", "tflite")]


@pytest.mark.parametrize("run", in_ci(RUNS, [(name, "onnx") for name in IN_CI]))
def test_ten_steps_are_those_of_eager_torch(run: tuple[str, str]) -> None:
    name, runtime = run
    bundle = targets_bundle(name, ("onnx",) if runtime == "onnx" else ("onnx", "tflite"))
    batches = list(batches_in_order(examples_of(name), BATCH_SIZE))
    step = runtime_of(runtime).open_train(bundle)
    state = step.begin(bundle.initial_parameters())
    app = targets_app(name)
    module, loss = app.module, app.loss
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)
    for batch in batches:
        state, value = step(state, batch, StepSettings(learning_rate=RATE))
        num = int(batch.mask.sum())
        optimizer.zero_grad()
        output = app.call(module, {"x": torch.from_numpy(batch.inputs["x"][:num])})
        expected_loss = loss(output, targets_of(batch.y[:num])).mean()
        expected_loss.backward()
        optimizer.step()
        assert value == pytest.approx(expected_loss.item(), rel=1e-4)
    expected = bundle.manifest.table.flatten({key: value.detach().numpy() for key, value in module.named_parameters()})
    assert np.all(np.abs(state.parameters - expected) <= 1e-5 * np.maximum(1.0, np.abs(expected)))
    assert np.abs(expected - bundle.initial_parameters()).max() > 0.005
    sums = runtime_of(runtime).open_evaluate(bundle)(state.parameters, batches[0])
    with torch.no_grad():
        output = app.call(module, {"x": torch.from_numpy(batches[0].inputs["x"])})
        assert sums.loss_sum == pytest.approx(loss(output, targets_of(batches[0].y)).sum().item(), rel=1e-4)
    predictions = output[app.output[0]] if isinstance(output, dict) else output
    if app.num_classes:
        assert np.mean(sums.predicted == predictions.argmax(dim=app.class_axis).numpy()) > 0.99
    else:
        np.testing.assert_allclose(sums.predicted, predictions.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", in_ci(CASES, IN_CI))
def test_a_vectorized_step_is_that_of_each_client(name: str) -> None:
    step, bundle = VectorStep(targets_app(name)), targets_bundle(name, ("onnx",))
    initial, (first, second, *_) = bundle.initial_parameters(), batches_in_order(examples_of(name), BATCH_SIZE)
    settings = VectorSettings(
        learning_rates=[RATE, RATE], proximal_weight=0.0, anchor=initial, controls=[None, None], random_keys=[0, 1]
    )
    state, _ = step(step.begin(initial, 2), [first, second], settings)
    graph_step = open_runtime("onnx").open_train(bundle)
    for batch, actual in zip((first, second), step.parameters(state), strict=True):
        expected, _ = graph_step(graph_step.begin(initial), batch, StepSettings(learning_rate=RATE))
        np.testing.assert_allclose(actual, expected.parameters, rtol=0, atol=1e-6)


def test_int8_and_a_float_file_return_the_classes_as_the_last_dimension() -> None:
    app, bundle, runtime = targets_app("class axis"), targets_bundle("class axis", ("onnx",)), open_runtime("onnx")
    initial, data = bundle.initial_parameters(), examples_of("class axis")
    with torch.no_grad():
        expected = app.module(torch.from_numpy(data.inputs["x"])).movedim(1, -1).numpy()
    np.testing.assert_allclose(runtime.open_predict(bundle, initial)(data.inputs), expected, rtol=0, atol=0.05)
    session = InferenceSession(float_models(app, bundle, initial, "onnx")["infer"])
    np.testing.assert_allclose(session.run(None, data.inputs)[0], expected, rtol=0, atol=1e-5)
    quality = measure(runtime, bundle, initial, batches_of("class axis"))
    assert quality.num_predictions == np.count_nonzero(data.y >= 0)
    assert quality.num_correct_float == np.count_nonzero(expected.argmax(-1) == data.y)


def batches_of(name: str) -> list[PaddedBatch]:
    return list(batches_in_order(examples_of(name), BATCH_SIZE))


def test_int8_is_compared_with_float_if_targets_have_another_shape() -> None:
    bundle, runtime = targets_bundle("quantiles", ("onnx",)), open_runtime("onnx")
    initial = bundle.initial_parameters()
    quality = measure(runtime, bundle, initial, batches_of("quantiles"))
    rows = examples_of("quantiles").inputs
    int8_outputs = runtime.open_predict(bundle, initial)(rows)
    with torch.no_grad():
        float_outputs = targets_app("quantiles").module(torch.from_numpy(rows["x"])).numpy()
    assert quality.squares_float == 0.0
    assert quality.squares_int8 == pytest.approx(np.square(int8_outputs - float_outputs).sum(), rel=1e-3)
    assert quality.squares_wanted == pytest.approx(np.square(float_outputs - float_outputs.mean(0)).sum(), rel=1e-3)
    values = evaluate_version(runtime, bundle, initial, batches_of("quantiles")).values
    assert values.keys() == {"loss"}
    assert math.isfinite(values["loss"])


def test_targets_of_another_shape_than_the_declared_ones_are_refused() -> None:
    step = open_runtime("onnx").open_train(bundle := targets_bundle("quantiles", ("onnx",)))
    batch = batches_of("quantiles")[0]
    with pytest.raises(ValueError, match=r"y: got float32 \(8, 1\), expected float32 \(8,\)"):
        step(
            step.begin(bundle.initial_parameters()),
            replace(batch, y=batch.y[:, None]),
            StepSettings(learning_rate=RATE),
        )


def test_a_float_file_of_a_model_of_two_heads_predicts_the_first() -> None:
    app, bundle = targets_app("two heads"), targets_bundle("two heads", ("onnx",))
    session = InferenceSession(float_models(app, bundle, bundle.initial_parameters(), "onnx")["infer"])
    x = examples_of("two heads").inputs["x"]
    (outputs,) = session.run(None, {"x": x})
    with torch.no_grad():
        np.testing.assert_allclose(outputs, app.module(torch.from_numpy(x))[0].numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"targets": None, "validation": None},
            r"y has the shape \(8, 3\).*declare another shape by targets=",
        ),
        ({"targets": np.zeros((4, 2), np.int64)}, r"targets: got torch.int64 \(4, 2\), expected float32 \(n, ...\)"),
        ({"targets": np.zeros((1, 2), np.float32)}, r"expected float32 \(n, ...\) with n of at least 2"),
        ({"targets": np.full((4,), np.nan, np.float32)}, "targets: got NaN in sample 0"),
        ({"targets": [1.0, 2.0]}, "targets: got list, expected one tensor or numpy array"),
        ({"num_classes": 3, "validation": None}, "got example targets with num_classes 3, expected them with"),
        ({"targets": np.zeros((4, 2), np.float32)}, r"validation data y \(77,\), expected the shape of targets"),
    ],
)
def test_wrong_targets_are_refused_with_a_remedy(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        export_bundle(replace(targets_app("quantiles"), **changes))  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("loss", [cross_entropy, lambda output, y: output["others"] - y], ids=["default", "other key"])
def test_a_loss_that_does_not_know_several_outputs_is_refused_with_its_argument(loss: Loss) -> None:
    with pytest.raises(UnsupportedModel, match=r"a dict of the tensors at \['logits', 'others.1'\]: write loss= as"):
        export_bundle(replace(targets_app("inner classifier"), loss=loss))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            cross_entropy,
            r"write loss= as the mean .* of F.cross_entropy\(output, y, ignore_index=-1, reduction='none'\)",
        ),
        (
            lambda output, y: functional.cross_entropy(output, y, ignore_index=-1, reduction="none"),
            r"returned \(8, 8, 6\), expected \(8,\): .*; take the mean .*: losses.flatten\(1\).mean\(1\)",
        ),
    ],
    ids=["default", "pixels"],
)
def test_a_loss_that_does_not_fit_the_class_axis_is_refused_with_its_form(loss: Loss, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        export_bundle(replace(targets_app("class axis"), loss=loss))
