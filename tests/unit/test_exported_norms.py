"""BatchNorms of an exported Bundle: several in a row in int8, and a batch of one example in every engine."""

import copy
from typing import Final

import numpy as np
import pytest
import torch
from support.models import export_bundle
from support.remote_runtime import runtime_of
from torch import Tensor, nn

from fanin.edge.export import App, Recipe, Sgd
from fanin.edge.export.formats.graphs import FORMATS
from fanin.edge.export.vectorized.step import VectorSettings, VectorStep
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import PaddedBatch, StepSettings
from fanin.edge.tensors import Float32s
from fanin.protos.errors import UnsupportedModel

GAP: Final = 0.006
"""Mean difference of int8 and float logits as a share of their range: about one step of 256."""
BATCH_SIZE: Final = 4
RATE: Final = 0.1
CLOSE: Final = {"rtol": 1e-5, "atol": 1e-6}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def randomized(*layers: nn.Module) -> nn.Module:
    """Return layers in a row whose norms have nontrivial parameters and statistics."""
    torch.manual_seed(3)
    module = nn.Sequential(*layers)
    for norm in module:
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            tensors = [norm.running_mean, *norm.parameters()]
            with torch.no_grad():
                for value in tensors:
                    value.copy_(value + 0.2 * torch.randn_like(value))
                norm.running_var.uniform_(0.5, 2.0)
    return module


STACKS: Final = {
    "after a linear layer": (
        lambda: randomized(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.BatchNorm1d(16, affine=False), nn.ReLU(), nn.Linear(16, 3)
        ),
        random(64, 8),
    ),
    "three after a convolution": (
        lambda: randomized(
            nn.Conv2d(3, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.BatchNorm2d(8).eval(),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(128, 3),
        ),
        random(64, 3, 6, 6),
    ),
    "of a frozen backbone": (
        lambda: randomized(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)),
        random(64, 8),
    ),
}


@pytest.mark.parametrize("graph_format", FORMATS)
@pytest.mark.parametrize("case", STACKS)
def test_int8_of_norms_in_a_row_is_close_to_torch(case: str, graph_format: str) -> None:
    make, x = STACKS[case]
    module = make()
    recipe = Recipe(trains="head" if case == "of a frozen backbone" else "full")
    app = App(name="a", module=module, calibration=x, batch_size=BATCH_SIZE, num_classes=3, recipe=recipe)
    bundle = export_bundle(app, (graph_format,))
    predict = open_runtime(FORMATS[graph_format].runtime).open_predict(bundle, bundle.initial_parameters())
    with torch.no_grad():
        expected = copy.deepcopy(module).eval()(x).numpy()
    logits = np.concatenate([predict({"x": row}) for row in np.split(x.numpy(), len(x))])
    assert np.abs(logits - expected).mean() <= GAP * np.ptp(expected)


def app_of_features() -> App:
    module = randomized(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    recipe = Recipe(optimizer=Sgd(momentum=0.0))
    return App(name="a", module=module, calibration=random(16, 8), batch_size=BATCH_SIZE, num_classes=3, recipe=recipe)


def one_example() -> PaddedBatch:
    """Return a batch with one example and padding, like the last one of a device."""
    x = np.zeros((BATCH_SIZE, 8), np.float32)
    x[0] = random(1, 8).numpy()
    return PaddedBatch(
        inputs={"x": x}, y=np.full(BATCH_SIZE, 2, np.int32), mask=np.eye(1, BATCH_SIZE, dtype=np.float32)[0]
    )


def step_of_torch(module: nn.Module) -> dict[str, np.ndarray]:
    """Return the state after a step of torch on the example, with the norm in evaluation mode."""
    module = copy.deepcopy(module)
    module[1].eval()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    nn.functional.cross_entropy(module(random(1, 8)), torch.tensor([2])).backward()
    optimizer.step()
    return {name: value.numpy() for name, value in module.state_dict().items()}


def assert_step(app: App, views: dict[str, Float32s]) -> None:
    expected = step_of_torch(app.module)
    assert {name for name in expected if "num_batches" not in name} == set(views)
    for name, value in views.items():
        np.testing.assert_allclose(value, expected[name], **CLOSE, err_msg=name)


@pytest.mark.parametrize("runtime", ["onnx", "litert", "tflite"])
def test_one_example_is_normalized_by_the_running_statistics_on_a_device(runtime: str) -> None:
    app = app_of_features()
    bundle = export_bundle(app, ("onnx" if runtime == "onnx" else "tflite",))
    step = runtime_of(runtime).open_train(bundle)
    state, _ = step(step.begin(bundle.initial_parameters()), one_example(), StepSettings(learning_rate=RATE))
    assert_step(app, dict(bundle.manifest.table.views(state.parameters)))


def test_one_example_is_normalized_by_the_running_statistics_under_vmap() -> None:
    app = app_of_features()
    bundle, step = export_bundle(app, ("onnx",)), VectorStep(app)
    parameters = bundle.initial_parameters()
    settings = VectorSettings(
        learning_rates=[RATE] * 2, proximal_weight=0.0, anchor=parameters, controls=[None] * 2, random_keys=[0, 1]
    )
    state, _ = step(step.begin(parameters, 2), [one_example()] * 2, settings)
    for values in step.parameters(state):
        assert_step(app, dict(bundle.manifest.table.views(values)))


@pytest.mark.parametrize("sizes", [{"batch_size": 1}, {"batch_size": 4, "other_batch_sizes": (1,)}])
def test_batches_of_one_example_alone_are_refused_as_torch_does(sizes: dict[str, object]) -> None:
    module = app_of_features().module
    app = App(name="a", module=module, calibration=random(16, 8), num_classes=3, **sizes)
    with pytest.raises(UnsupportedModel, match="FN-0775"):
        export_bundle(app, ("onnx",))
