"""A module whose parameters and layers are named like ports: it trains in both formats as in torch."""

from functools import cache

import numpy as np
import pytest
import torch
from support.models import BATCH_SIZE, NUM_CLASSES, app_of, batches, export_bundle
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export import App
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import StepSettings
from fanin.edge.runtimes.graphs import parameter_port

SCALES = ("x", "mask", "learning_rate", "proximal_weight", "predicted")
SHIFTS = ("y", "step", "loss", "loss_sum", "logits")
LAYERS = ("next", "momentum", "parameter")
LEARNING_RATE = 0.05


class PortNames(nn.Module):
    """Parameters and layers named like ports."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Linear(64, 8)
        for number, name in enumerate((*SCALES, *SHIFTS)):
            self.register_parameter(name, nn.Parameter(torch.full((8,), (name in SCALES) + 0.01 * number)))
        for name in LAYERS:
            self.add_module(name, nn.Linear(8, 8))
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        values = relu(self.transposed(x.flatten(1)))
        for scale, shift in zip(SCALES, SHIFTS, strict=True):
            values = values * getattr(self, scale) + getattr(self, shift)
        for name in LAYERS:
            values = values + 0.1 * relu(self.get_submodule(name)(values))
        return self.head(values)


def app() -> App:
    """Return the App, always with the same initial parameters."""
    torch.manual_seed(3)
    return App(
        name="named",
        module=PortNames(),
        calibration=app_of("mlp").inputs["x"],
        batch_size=BATCH_SIZE,
        num_classes=NUM_CLASSES,
    )


@cache
def bundle(graph_format: str) -> Bundle:
    """Return the App's Bundle in one format."""
    return export_bundle(app(), (graph_format,))


# In CI, test_export_tflite checks the port names of a TFLite file.
@pytest.mark.parametrize(
    ("graph_format", "runtime"), [("onnx", "onnx"), pytest.param("tflite", "litert", marks=pytest.mark.nightly)]
)
def test_parameters_named_like_ports_train_like_torch(graph_format: str, runtime: str) -> None:
    app_bundle, module, rows = bundle(graph_format), app().module, list(batches(60, seed=7))
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=0.9)
    step = open_runtime(runtime).open_train(app_bundle)
    state = step.begin(app_bundle.initial_parameters())
    for row in rows:
        state, loss = step(state, row, StepSettings(learning_rate=LEARNING_RATE))
        num = int(row.mask.sum())
        optimizer.zero_grad()
        expected_loss = cross_entropy(
            module(torch.from_numpy(row.inputs["x"][:num])), torch.from_numpy(row.y[:num]).long()
        )
        expected_loss.backward()
        optimizer.step()
        assert loss == pytest.approx(expected_loss.item(), rel=1e-5)
    tensors = {name: value.detach().numpy() for name, value in module.named_parameters()}
    expected = app_bundle.manifest.table.flatten(tensors)
    np.testing.assert_allclose(state.parameters, expected, rtol=0, atol=1e-5)
    # Predict on the calibration data: the activation scales are valid for no other values.
    x = app().inputs["x"].numpy()
    logits, trained_logits = (
        open_runtime(runtime).open_predict(app_bundle, parameters)({"x": x})
        for parameters in (app_bundle.initial_parameters(), state.parameters)
    )
    with torch.no_grad():
        floats = app().module(torch.from_numpy(x)).numpy()
    assert np.abs(logits - floats).max() < 0.1 * np.ptp(floats)
    assert not np.array_equal(logits, trained_logits)


def test_ports_have_a_namespace_of_their_own() -> None:
    names = [spec.name for spec in bundle("onnx").manifest.table.specs]
    assert {*SCALES, *SHIFTS, "next.weight", "momentum.weight", "parameter.weight"} <= set(names)
    inputs = [port.name for port in bundle("onnx").manifest.signatures["train"].inputs]
    assert len(set(inputs)) == len(inputs)
    assert {parameter_port(name) for name in names} < set(inputs)
    assert [parameter_port(name) for name in ("head.weight", "mask")] == ["head.weight", "parameter.mask"]
