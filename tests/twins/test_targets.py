"""Targets and outputs of several kinds of models, in exported graphs and in a vectorized step, against eager torch."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from onnxruntime import InferenceSession
from support.models import export_bundle
from support.nightly import in_ci
from support.remote_runtime import runtime_of
from support.targets import (
    BATCH_SIZE,
    CASES,
    NUM,
    NUM_CLASSES,
    ClassesFirst,
    batches_of,
    examples_of,
    targets_app,
    targets_bundle,
    targets_of,
)
from torch import Tensor
from torch.nn import functional

from fanin.clients.data.batching import batches_in_order
from fanin.clients.data.examples import check_examples
from fanin.edge.export import cross_entropy
from fanin.edge.export.app.losses import Loss
from fanin.edge.export.standalone.floats import float_models
from fanin.edge.export.vectorized.step import VectorSettings, VectorStep
from fanin.edge.export.verification.cost import measure_app
from fanin.edge.export.verification.ready import checked
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import StepSettings, VersionValues
from fanin.edge.runtimes.measure import measure
from fanin.edge.runtimes.models import check_targets
from fanin.protos.errors import InvalidInput, UnsupportedModel
from fanin.server.evaluation.metrics import evaluate_version

RATE = 0.05
IN_CI = ("class axis", "counts", "detection", "two heads")
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
    quality = measure(runtime, bundle, VersionValues(parameters=initial), batches_of("class axis"))
    assert quality.num_predictions == np.count_nonzero(data.y >= 0)
    assert quality.num_correct_float == np.count_nonzero(expected.argmax(-1) == data.y)


def test_int8_is_compared_with_float_if_targets_have_another_shape() -> None:
    bundle, runtime = targets_bundle("quantiles", ("onnx",)), open_runtime("onnx")
    initial = bundle.initial_parameters()
    quality = measure(runtime, bundle, VersionValues(parameters=initial), batches_of("quantiles"))
    rows = examples_of("quantiles").inputs
    int8_outputs = runtime.open_predict(bundle, initial)(rows)
    with torch.no_grad():
        float_outputs = targets_app("quantiles").module(torch.from_numpy(rows["x"])).numpy()
    assert quality.squares_float == 0.0 and quality.has_other_targets
    assert quality.squares_int8 == pytest.approx(np.square(int8_outputs - float_outputs).sum(), rel=1e-3)
    assert quality.squares_wanted == pytest.approx(np.square(float_outputs - float_outputs.mean(0)).sum(), rel=1e-3)
    values = evaluate_version(runtime, bundle, VersionValues(parameters=initial), batches_of("quantiles")).values
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


def test_a_float_file_of_another_head_is_refused() -> None:
    bundle, app = targets_bundle("two heads", ("onnx",)), targets_app("two heads")
    initial = bundle.initial_parameters()
    message = r"predicts the shape \(8, 2\), expected \(8, 3\) as in the Bundle; .* the same output="
    with pytest.raises(InvalidInput, match=message):
        float_models(replace(app, output=("1", "0")), bundle, initial, "onnx")


class Negated(ClassesFirst):
    """A module with other predictions than ``ClassesFirst``. A loss of the negated output is the same."""

    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


def test_a_float_file_of_other_predictions_with_the_same_loss_is_refused() -> None:
    bundle, app = targets_bundle("class axis", ("onnx",)), targets_app("class axis")
    other = replace(app, module=Negated(), loss=lambda output, y: app.loss(-output, y))
    with pytest.raises(InvalidInput, match="FN-0795"):
        float_models(other, bundle, bundle.initial_parameters(), "onnx")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"targets": None, "validation": None},
            r"y has the shape \(8, 3\).*declare another shape by targets=",
        ),
        (
            {"targets": np.full((4, 2), -2)},
            r"targets: got torch.int32 .*, expected integers from -1 to .* targets=y.float\(\)",
        ),
        ({"targets": np.full((4, 2), 1 << 31)}, "targets: got integers from 2147483648 to .*, expected int32 numbers"),
        ({"targets": np.zeros((1, 2), np.float32)}, r"expected \(n, ...\) with n of at least 2"),
        (
            {"targets": np.zeros(4, np.int64)},
            r"validation data y: got torch.float32 \(77,\) .*, expected integers from 0 to 2147483647 as targets",
        ),
        ({"targets": np.full((4,), np.nan, np.float32)}, "targets: got NaN in sample 0"),
        ({"targets": [1.0, 2.0]}, "targets: got list, expected one tensor or numpy array"),
        ({"num_classes": 3, "validation": None}, "targets: got torch.float32 .*, expected integers from 0 to 2"),
        ({"targets": np.zeros((4, 2), np.float32)}, r"validation data y \(77,\), expected the shape of targets"),
    ],
)
def test_wrong_targets_are_refused_with_a_remedy(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        export_bundle(replace(targets_app("quantiles"), **changes))  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("loss", [cross_entropy, lambda output, y: output["others"] - y], ids=["default", "other key"])
def test_a_loss_that_does_not_know_several_outputs_is_refused_with_its_argument(loss: Loss) -> None:
    with pytest.raises(UnsupportedModel, match="FN-0778"):
        export_bundle(replace(targets_app("inner classifier"), loss=loss))


def test_declared_labels_of_a_model_of_classes_are_those_of_its_output() -> None:
    app = targets_app("sequence labels")
    y = examples_of("sequence labels").y.astype(np.int64)
    assert checked(replace(app, targets=y), ["onnx"]).app.declared_targets is None
    message = r"targets: got \(77, 2\), expected \(77, 6\); for a loss that needs others, .* num_classes=0"
    with pytest.raises(UnsupportedModel, match=message):
        checked(replace(app, targets=y[:, :2]), ["onnx"])


def test_the_loss_of_int8_is_measured_for_a_model_of_values_with_one_output() -> None:
    def failing(output: Tensor, y: Tensor) -> Tensor:
        raise ValueError("a share of 1.001")

    app, bundle, runtime = targets_app("counts"), targets_bundle("counts", ("onnx",)), open_runtime("onnx")
    data = examples_of("counts")
    outputs = runtime.open_predict(bundle, bundle.initial_parameters())(data.inputs)
    expected = app.loss(torch.from_numpy(outputs), targets_of(data.y)).sum().item()
    assert measure_app(app, bundle, runtime).loss_sum_int8 == pytest.approx(expected, rel=1e-5)
    assert measure_app(replace(app, loss=failing), bundle, runtime).loss_sum_int8 is None
    two_heads = targets_bundle("two heads", ("onnx",))
    assert measure_app(targets_app("two heads"), two_heads, runtime).loss_sum_int8 is None


@pytest.mark.parametrize(
    ("y", "remedy"),
    [
        (np.zeros((NUM, 1, 8, 6), np.int32), "squeeze(1)"),
        (np.zeros((NUM, 8, 6, 1), np.int32), "squeeze(-1)"),
        (np.zeros((NUM, NUM_CLASSES, 8, 6), np.int32), "argmax(1)"),
        (np.zeros((NUM, NUM_CLASSES, 8, 6), np.float32), "argmax(1)"),
    ],
)
def test_labels_with_one_dimension_too_many_are_refused_with_the_remedy(y: np.ndarray, remedy: str) -> None:
    app = targets_app("class axis")
    with pytest.raises(UnsupportedModel, match=re.escape(f"y.{remedy}")):
        checked(replace(app, validation=(app.inputs["x"], y)), ["onnx"])
    with pytest.raises(ValueError, match=re.escape(f"y.{remedy}")):
        check_targets(targets_bundle("class axis", ("onnx",)).manifest, y)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"class_axis": -1}, "the classes are in axis 1: set class_axis=1 in the App"),
        ({"class_axis": 2}, "the classes are in axis 1: set class_axis=1 in the App"),
        ({"num_classes": NUM_CLASSES + 1}, f"set num_classes={NUM_CLASSES} in the App, or give the last layer"),
        (
            {"num_classes": NUM_CLASSES + 1, "class_axis": 4},
            "set class_axis in the App to the axis of the classes, from 1 to 3",
        ),
    ],
)
def test_an_axis_without_the_classes_is_refused_before_the_shape_of_targets(
    changes: dict[str, int], remedy: str
) -> None:
    with pytest.raises(UnsupportedModel, match=re.escape(remedy)):
        checked(replace(targets_app("class axis"), **changes), ["onnx"])  # type: ignore[arg-type]  # numbers


def test_targets_of_another_axis_with_as_many_classes_name_the_class_axis() -> None:
    app = targets_app("class axis")
    x, y = (value[..., :NUM_CLASSES] for value in (app.inputs["x"], examples_of("class axis").y))
    square = replace(app, calibration=x, class_axis=-1, validation=(x, y))
    message = rf"expected \(77, {NUM_CLASSES}, 8\); set class_axis in the App to the axis of the classes"
    with pytest.raises(UnsupportedModel, match=message):
        checked(square, ["onnx"])


def test_integers_next_to_values_are_no_values() -> None:
    bundle, runtime, y = targets_bundle("counts", ("onnx",)), open_runtime("onnx"), examples_of("counts").y
    initial, batches = bundle.initial_parameters(), batches_of("counts")
    # Targets have the shape of the output, but are counts and numbers of classes. So int8 is compared with float.
    assert measure(runtime, bundle, VersionValues(parameters=initial), batches).squares_float == 0.0
    assert evaluate_version(runtime, bundle, VersionValues(parameters=initial), batches).values.keys() == {"loss"}
    with pytest.raises(ValueError, match=r"y: got float32 \(77, 4\), expected int32 \(n, 4\); .* y.astype\('int32'\)"):
        check_targets(bundle.manifest, y.astype(np.float32))
    examples = replace(examples_of("counts"), y=y.astype(np.float32))
    with pytest.raises(InvalidInput, match="FN-0856"):
        check_examples(examples, targets_app("counts").input_shapes, 0, "int32")


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
