"""Int8 of a Version of a model that is trained from nothing: with the ranges of the export, and with refreshed ones."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from support.models import export_bundle
from support.nightly import in_ci
from torch import Tensor, nn

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export.app.app import App
from fanin.edge.ranges import columns, counts, initial_ranges, ranges_of, ranges_of_data
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.tensors import Float32s

NUM_CLASSES, NUM_STEPS = 10, 150
STALE, FRESH = 0.1, 0.02
"""Errors of the int8 logits relative to the float ones (root mean square): the least with the ranges of the export, and
the largest with those of the Version."""
PATTERNS = torch.randn(NUM_CLASSES, 1, 28, 28, generator=torch.Generator().manual_seed(99))


class Cnn(nn.Module):
    """Two convolutions and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        )
        self.head = nn.Linear(16 * 49, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.body(x).flatten(1))


def normed(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Return a convolution and its norm."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class Inverted(nn.Module):
    """The inverted residual of MobileNetV2."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        hidden = 4 * inputs
        self.body = nn.Sequential(
            *(*normed(inputs, hidden, 1), nn.ReLU6()),
            *(*normed(hidden, hidden, 3, stride, hidden), nn.ReLU6()),
            *normed(hidden, outputs, 1),
        )
        self.is_residual = inputs == outputs and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        """The output, with the input added if both have one shape."""
        return x + self.body(x) if self.is_residual else self.body(x)


class Mobile(nn.Module):
    """A small MobileNetV2."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(*normed(1, 8, 3, 2), nn.ReLU6()),
            *(Inverted(8, 12, 2), Inverted(12, 12, 1), Inverted(12, 16, 2), Inverted(16, 16, 1)),
            *(*normed(16, 48, 1), nn.ReLU6()),
        )
        self.head = nn.Linear(48, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.body(x).mean((2, 3)))


MODELS: dict[str, Callable[[], nn.Module]] = {"cnn": Cnn, "mobile": Mobile}


def examples(num: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy images of the classes' patterns, and the classes."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(0, NUM_CLASSES, (num,), generator=rng)
    return PATTERNS[y] + 0.7 * torch.randn(num, 1, 28, 28, generator=rng), y


@cache
def trained(name: str) -> tuple[Bundle, Float32s, Float32s]:
    """Export an untrained model and train it. Return its Bundle, the trained parameters and the float logits."""
    torch.manual_seed(0)
    module, (x, y) = MODELS[name](), examples(2000, seed=7)
    bundle = export_bundle(
        App(name=name, module=module, calibration=x[:64], batch_size=16, num_classes=NUM_CLASSES), ("onnx", "tflite")
    )
    module.train()
    optimizer, rng = torch.optim.Adam(module.parameters(), 3e-3), torch.Generator().manual_seed(3)
    for _ in range(NUM_STEPS):
        rows = torch.randint(0, len(x), (32,), generator=rng)
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
        optimizer.step()
    module.eval()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    table = bundle.manifest.model_table
    parameters = table.flatten({spec.name: tensors[spec.name].detach().numpy() for spec in table.specs})
    with torch.no_grad():
        logits: Float32s = module(examples(200, seed=11)[0]).numpy()
    return bundle, parameters, logits


@pytest.mark.parametrize("runtime", ["onnx", "litert"])
@pytest.mark.parametrize("name", in_ci(tuple(MODELS), ("cnn",)))
def test_refreshed_ranges_keep_int8_close_to_float(name: str, runtime: str) -> None:
    bundle, parameters, logits = trained(name)
    engine, activations = open_runtime(runtime), bundle.manifest.activations
    lows, highs = engine.open_ranges(bundle, parameters)({"x": examples(256, seed=7)[0].numpy()})
    where, before = columns(activations, engine.graph_format), initial_ranges(activations).reshape(-1, 2)

    def error(measured: Float32s | None) -> float:
        ranges = before.copy()
        if measured is not None:
            ranges[where] = measured
        predict = engine.open_predict(bundle, parameters, ranges.reshape(-1))
        difference = predict({"x": examples(200, seed=11)[0].numpy()}) - logits
        return float(np.sqrt(np.square(difference).mean() / np.square(logits).mean()))

    assert error(None) > STALE
    assert error(ranges_of_data(lows, highs, before[where])) < FRESH
    # Histograms of four devices, in any order.
    histograms = sum(counts(lows[start::4], highs[start::4]) for start in (2, 0, 3, 1))
    assert error(ranges_of(np.asarray(histograms), before[where])) < FRESH
