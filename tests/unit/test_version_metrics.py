"""The metrics of a Version: the float model and the int8 model have separate names."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from support.models import app_of, bundle_of, export_bundle, samples

from fanin.clients.data.batching import batches_in_order
from fanin.clients.data.examples import Examples
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export import App, squared_error
from fanin.edge.metrics.metric import metrics_of
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import VersionValues
from fanin.server.evaluation.metrics import VersionMetrics, evaluate_version
from fanin.simulation.rows import initial_row

NUM = 600


@cache
def values_app() -> App:
    """Return an App of a regression model."""
    return replace(app_of("mlp"), name="values", num_classes=0, loss=squared_error)


@cache
def values_bundle() -> Bundle:
    return export_bundle(values_app())


def metrics_of_module(app: App, bundle: Bundle, *names: str) -> VersionMetrics:
    """Return the metrics of Version 0. The targets are torch's outputs of the module."""
    x, _ = samples(NUM, seed=9)
    # The noise exceeds the range of the calibration, so int8 is sometimes wrong.
    x = (3.0 * np.random.default_rng(5).standard_normal(x.shape)).astype(np.float32)
    with torch.no_grad():
        outputs = app.module(torch.from_numpy(x)).numpy()
    y = outputs.argmax(axis=1).astype(np.int32) if app.num_classes else outputs
    batches = batches_in_order(Examples(inputs={"x": x}, y=y), bundle.manifest.batch_size)
    parameters = bundle.initial_parameters()
    return evaluate_version(
        open_runtime("onnx"), bundle, VersionValues(parameters=parameters), batches, metrics_of(names)
    )


def test_the_float_model_alone_matches_torch() -> None:
    metrics = metrics_of_module(app_of("mlp"), bundle_of("mlp"), "macro_f1", "balanced_accuracy")
    values = metrics.values
    assert metrics.num_examples == NUM
    assert (values["accuracy"], values["macro_f1"], values["balanced_accuracy"]) == (1.0, 1.0, 1.0)
    assert 0.5 < values["accuracy_int8"] < 1.0
    assert values["accuracy_int8"] == values["int8_agreement"]
    assert 0.5 < values["macro_f1_int8"] < 1.0
    assert 0.5 < values["balanced_accuracy_int8"] < 1.0


def test_the_float_model_alone_has_no_error_of_values() -> None:
    values = metrics_of_module(values_app(), values_bundle(), "absolute_error").values
    assert values["squared_error"] < 1e-9 < 1e-6 < values["squared_error_int8"]
    assert values["absolute_error"] < 1e-5 < 1e-3 < values["absolute_error_int8"]


def test_a_row_of_a_simulation_keeps_float_and_int8_apart() -> None:
    values = {"loss": 0.5, "accuracy": 0.75, "accuracy_int8": 0.25, "macro_f1": 0.625, "macro_f1_int8": 0.125}
    row = initial_row(VersionMetrics(num_examples=8, values=values))
    assert (row.test_loss, row.test_accuracy, row.test_accuracy_int8) == (0.5, 0.75, 0.25)
    assert dict(row.metrics) == {"macro_f1": 0.625, "macro_f1_int8": 0.125}


@pytest.mark.parametrize("evaluation", [None, VersionMetrics(num_examples=0, values={})])
def test_a_version_without_an_evaluation_has_no_numbers(evaluation: VersionMetrics | None) -> None:
    row = initial_row(evaluation)
    assert all(math.isnan(value) for value in (row.test_loss, row.test_accuracy, row.test_accuracy_int8))
