"""Modules and data in any memory format are exported like contiguous ones: a graph has no strides.

The export itself compares each graph with eager torch. The tests also compare the files of both, or the outputs.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
import pytest
import torch
from support.models import export_bundle
from support.nightly import in_ci
from torch import Tensor, nn

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export import App, Recipe
from fanin.edge.export.formats.graphs import FORMATS
from fanin.edge.export.module.prepare import prepare
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import PaddedBatch

LAST: Final = torch.channels_last
BATCH_SIZE: Final = 4
ROUNDING: Final = 1e-5


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


IMAGES: Final = random(16, 3, 6, 6)
ROWS: Final = random(16, 8)


class Own(nn.Module):
    """A layer that calls a function of x (B, ...), a parameter, a buffer and a plain attribute."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], value: Tensor, kind: str = "parameter") -> None:
        super().__init__()
        self.function = function
        match kind:
            case "parameter":
                self.value: Tensor = nn.Parameter(value)
            case "buffer":
                self.register_buffer("value", value)
            case _:
                self.value = value

    def forward(self, x: Tensor) -> Tensor:
        """Return the function's result."""
        return self.function(x, self.value)


def network(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    body = (nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
    return nn.Sequential(*body, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def perceptron(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *layers, nn.Linear(8, 3))


def app(module: nn.Module, data: Tensor | np.ndarray, **others: object) -> App:
    return replace(
        App(name="m", module=module, calibration=data, batch_size=BATCH_SIZE, num_classes=3),
        **others,
    )


def strided(module: nn.Module, name: str, dims: tuple[int, ...]) -> nn.Module:
    """Return a module with a parameter stored in another order of its dimensions."""
    value = module.get_parameter(name)
    order = sorted(range(len(dims)), key=dims.__getitem__)
    value.data = value.data.permute(dims).contiguous().permute(order)
    assert not value.is_contiguous()
    return module


PLANES: Final = random(16, 2, 4, 4, 4)


def volumes() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 3))


SAME: dict[str, tuple[Callable[[], App], Callable[[], App]]] = {
    "a channels-last module": (lambda: app(network().to(memory_format=LAST), IMAGES), lambda: app(network(), IMAGES)),
    "channels-last data": (lambda: app(network(), IMAGES.to(memory_format=LAST)), lambda: app(network(), IMAGES)),
    "channels-last module, data and validation data": (
        lambda: app(
            network().to(memory_format=LAST),
            IMAGES.to(memory_format=LAST),
            validation=(IMAGES.to(memory_format=LAST), torch.zeros(16, dtype=torch.int64)),
        ),
        lambda: app(network(), IMAGES, validation=(IMAGES, torch.zeros(16, dtype=torch.int64))),
    ),
    "channels-last volumes": (
        lambda: app(
            volumes().to(memory_format=torch.channels_last_3d), PLANES.to(memory_format=torch.channels_last_3d)
        ),
        lambda: app(volumes(), PLANES),
    ),
    "expanded data": (
        lambda: app(network(), IMAGES[:, :1].expand(-1, 3, -1, -1)),
        lambda: app(network(), IMAGES[:, :1].repeat(1, 3, 1, 1)),
    ),
    "an array in Fortran order": (
        lambda: app(network(), np.asfortranarray(IMAGES.numpy())),
        lambda: app(network(), IMAGES),
    ),
    "a reversed array": (
        lambda: app(network(), IMAGES.numpy()[::-1]),
        lambda: app(network(), IMAGES.flip(0)),
    ),
    "a transposed weight": (
        lambda: app(strided(perceptron(), "0.weight", (1, 0)), ROWS),
        lambda: app(perceptron(), ROWS),
    ),
    "a permuted kernel": (
        lambda: app(strided(network(), "0.weight", (2, 3, 0, 1)), IMAGES),
        lambda: app(network(), IMAGES),
    ),
    "a frozen permuted kernel": (
        lambda: app(strided(network(), "0.weight", (2, 3, 0, 1)), IMAGES, recipe=Recipe(trains="head")),
        lambda: app(network(), IMAGES, recipe=Recipe(trains="head")),
    ),
    **{
        f"a transposed {kind}": (
            lambda kind=kind: app(perceptron(Own(torch.matmul, random(8, 8).t(), kind)), ROWS),
            lambda kind=kind: app(perceptron(Own(torch.matmul, random(8, 8).t().contiguous(), kind)), ROWS),
        )
        for kind in ("parameter", "buffer", "attribute")
    },
    **{
        f"an expanded {kind}": (
            lambda kind=kind: app(perceptron(Own(torch.mul, random(1).expand(8), kind)), ROWS),
            lambda kind=kind: app(perceptron(Own(torch.mul, random(1).repeat(8), kind)), ROWS),
        )
        for kind in ("parameter", "buffer")
    },
}
CI: Final = ("a channels-last module", "channels-last data", "a transposed buffer")
WITHOUT: Final = {"tflite": ("channels-last volumes",)}
"""Cases whose layers a format lacks: a 3-D convolution."""


@pytest.mark.parametrize("case", in_ci(SAME, CI))
@pytest.mark.parametrize("graph_format", in_ci(FORMATS, ("tflite",)))
def test_the_files_of_every_memory_format_are_those_of_contiguous_tensors(graph_format: str, case: str) -> None:
    if case in WITHOUT.get(graph_format, ()):
        pytest.skip(f"{graph_format} has no form of a layer")
    one, other = (export_bundle(make(), (graph_format,)).manifest.artifacts for make in SAME[case])
    assert one == other


STRANGE: Final = random(1, 1, 8, 4).transpose(2, 3)
"""A constant of the shape (1, 1, 4, 8) whose memory has another order, as in litert-torch#1238."""
WITHIN: dict[str, Callable[[], App]] = {
    "to": lambda: app(network(Own(lambda x, _: x.to(memory_format=LAST), random(1))), IMAGES),
    "contiguous": lambda: app(network(Own(lambda x, _: x.contiguous(memory_format=LAST), random(1))), IMAGES),
    "clone": lambda: app(network(Own(lambda x, _: x.clone(memory_format=LAST), random(1)), nn.MaxPool2d(2)), IMAGES),
    "permute": lambda: app(
        network(Own(lambda x, w: (x.permute(0, 2, 3, 1).contiguous() * w).permute(0, 3, 1, 2), random(4))), IMAGES
    ),
    "a constant of the code": lambda: app(
        perceptron(
            Own(lambda x, w: (x[:, None, None] * STRANGE * w).flatten(1), random(8)), nn.Linear(32, 8), nn.ReLU()
        ),
        ROWS,
    ),
}


def _losses(bundle: Bundle, graph_format: str) -> tuple[float, np.ndarray]:
    runtime, parameters = open_runtime(FORMATS[graph_format].runtime), bundle.initial_parameters()
    (port,) = bundle.manifest.signatures["infer"].inputs
    x = (IMAGES if len(port.shape) == 4 else ROWS)[:BATCH_SIZE].numpy()
    batch = PaddedBatch(
        inputs={"x": x}, y=np.arange(BATCH_SIZE, dtype=np.int32) % 3, mask=np.ones(BATCH_SIZE, np.float32)
    )
    return runtime.open_evaluate(bundle)(parameters, batch).loss_sum, x


@pytest.mark.parametrize("case", in_ci(WITHIN, ("permute", "a constant of the code")))
@pytest.mark.parametrize("graph_format", in_ci(FORMATS, ("onnx",)))
def test_a_forward_may_use_any_memory_format(graph_format: str, case: str) -> None:
    own = WITHIN[case]()
    loss, x = _losses(export_bundle(own, (graph_format,)), graph_format)
    with torch.no_grad():
        logits = own.module(torch.from_numpy(x))
        expected = nn.functional.cross_entropy(logits, torch.arange(BATCH_SIZE) % 3, reduction="sum")
    assert abs(loss - float(expected)) <= ROUNDING * abs(float(expected))


def depthwise(*layers: nn.Module) -> nn.Module:
    """Return layers after a depthwise convolution, whose form stores images in another order."""
    torch.manual_seed(0)
    body = (nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8))
    return nn.Sequential(*body, *layers, nn.Flatten(), nn.LazyLinear(3))


VIEWS: dict[str, Callable[[], nn.Module]] = {
    "a pool after a norm": lambda: depthwise(nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(2)),
    "an uneven pool after a frozen norm": lambda: depthwise(nn.BatchNorm2d(8).eval(), nn.AdaptiveAvgPool2d((4, 5))),
    "a pool of a signal": lambda: nn.Sequential(
        nn.Flatten(2),
        nn.Conv1d(3, 8, 1),
        nn.Conv1d(8, 8, 3, groups=8),
        nn.BatchNorm1d(8),
        nn.AdaptiveAvgPool1d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    ),
    "a linear layer along rows": lambda: depthwise(nn.BatchNorm2d(8), nn.Linear(6, 3)),
    "a view of samples and channels": lambda: depthwise(
        Own(lambda x, _: x.view(x.shape[0] * 8, -1).cumsum(1).view(x.shape[0], 8, 36), random(1))
    ),
    "a view after a norm and permute": lambda: depthwise(
        nn.BatchNorm2d(8), Own(lambda x, _: x.permute(0, 2, 3, 1).contiguous().view(x.shape[0], -1), random(1))
    ),
}


@pytest.mark.parametrize("case", in_ci(VIEWS, ("a pool after a norm",)))
@pytest.mark.parametrize("graph_format", in_ci(FORMATS, ("tflite",)))
def test_a_view_after_a_depthwise_convolution_is_exported(graph_format: str, case: str) -> None:
    module = VIEWS[case]().train()
    module(IMAGES)
    loss, x = _losses(export_bundle(app(module, IMAGES), (graph_format,)), graph_format)
    with torch.no_grad():
        logits = module.eval()(torch.from_numpy(x))
        expected = nn.functional.cross_entropy(logits, torch.arange(BATCH_SIZE) % 3, reduction="sum")
    assert abs(loss - float(expected)) <= ROUNDING * abs(float(expected))


def test_an_app_keeps_the_memory_format_of_its_module() -> None:
    module = network().to(memory_format=LAST)
    prepared = prepare(app(module, IMAGES))
    assert all(value.is_contiguous() for value in prepared.module.parameters())
    assert module.get_parameter("0.weight").is_contiguous(memory_format=LAST)
