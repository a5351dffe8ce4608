"""The digits' CNN and App, and modules as flat vectors."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fanin.clients.data.digits import split_digits
from fanin.datacenter.config.settings import DataSettings, LayoutSettings, ModelSettings, StopSettings
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.families.known import family_model
from fanin.datacenter.models.cnn import INPUT_SHAPE, NUM_CLASSES, DigitsCnn
from fanin.datacenter.models.decoder import DecoderConfig
from fanin.datacenter.models.digits_app import SMOOTHING, app, smoothed_cross_entropy
from fanin.datacenter.models.tiny.resnet8 import ResNet8
from fanin.datacenter.parallel.settings import TrainingSettings
from fanin.datacenter.parallel.transforms.tensor import apply_tensor_parallel
from fanin.datacenter.training.model import build_job_model
from fanin.datacenter.training.parameters import load_parameters, parameter_table, parameter_vector, trained_module
from fanin.edge.export import Adapters, App, Recipe
from fanin.edge.export.app.loading import load_app
from fanin.edge.export.module.prepare import prepare
from fanin.edge.tensors import TensorTable
from fanin.protos.errors import InvalidInput


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), other=st.integers(0, 2**31))
def test_initial_parameters_are_a_function_of_the_seed(seed: int, other: int) -> None:
    before = torch.random.get_rng_state()
    vector = parameter_vector(DigitsCnn(seed))
    assert torch.equal(torch.random.get_rng_state(), before), "torch's own generator is left as it was"
    torch.manual_seed(other)
    assert (parameter_vector(DigitsCnn(seed)) == vector).all()
    assert (seed == other) == bool((parameter_vector(DigitsCnn(other)) == vector).all())


def test_the_cnn_is_small_and_has_only_parts_that_travel() -> None:
    model = DigitsCnn()
    assert parameter_table(model).num_values == 19_946
    assert model(torch.zeros(3, *INPUT_SHAPE)).shape == (3, NUM_CLASSES)
    kinds = {type(part) for part in model.modules() if not list(part.children())}
    assert kinds == {torch.nn.Conv2d, torch.nn.ReLU, torch.nn.Flatten, torch.nn.Linear}
    assert not list(model.buffers())


def test_the_app_loads_by_its_name_and_calibrates_on_public_images_only() -> None:
    digits = load_app("fanin.datacenter.models.digits_app:app")
    assert (digits.batch_size, digits.num_classes, digits.input_shapes) == (16, 10, {"x": INPUT_SHAPE})
    assert (parameter_vector(digits.module) == parameter_vector(DigitsCnn(0))).all()
    assert (app(3).inputs["x"].numpy() == split_digits(8, 0.5, 3).public.inputs["x"]).all()


@given(logits=st.lists(st.lists(st.floats(-20, 20), min_size=10, max_size=10), min_size=1, max_size=5))
def test_the_apps_loss_is_cross_entropy_with_smoothed_labels(logits: list[list[float]]) -> None:
    z, y = torch.tensor(logits, dtype=torch.float64), torch.arange(len(logits))
    expected = torch.nn.functional.cross_entropy(z, y, reduction="none", label_smoothing=SMOOTHING)
    assert torch.allclose(smoothed_cross_entropy(z, y), expected, atol=1e-12)


@given(values=st.lists(st.floats(-10, 10, width=32), min_size=8, max_size=8))
def test_parameters_round_trip(values: list[float]) -> None:
    module = torch.nn.Linear(3, 2)
    flat = np.array(values, np.float32)
    load_parameters(module, parameter_table(module), flat)
    assert (parameter_vector(module) == flat).all()
    # Names are in ascending order, so the bias comes before the weight.
    assert (module.bias.detach().numpy() == flat[:2]).all()


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([[0, 1], [-1, 2]], [[1, 2], [2, 3]], "got tokens of x from -1 to 2, expected 0 to"),
        ([[0, 1], [1, 2]], [[1, -2], [2, 3]], "got labels from -2 to 3, expected -1 to"),
        ([[0, 1], [1, 2]], [[1, -1], [2, 4]], "got 5 tokens, expected at most the model's 4"),
    ],
)
def test_numbers_that_are_no_tokens_are_refused(
    x: list[list[int]], y: list[list[int]], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.npz"
    np.savez(path, x=np.array(x, np.int32), y=np.array(y, np.int32))
    config = TrainConfig(
        model=ModelSettings(family=family_model("decoder", DecoderConfig(vocabulary=4))),
        data=DataSettings(examples=path),
        training=TrainingSettings(batch_size=1, learning_rate=0.1),
        stop=StopSettings(steps=1),
    )
    with pytest.raises(InvalidInput, match=f"tokens.npz: {message}"):
        build_job_model(config)


def test_frozen_parameters_do_not_travel() -> None:
    module = torch.nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    assert [spec.name for spec in parameter_table(module).specs] == ["weight"]


@pytest.mark.parametrize(
    ("shapes", "value", "expected"),
    [
        ({"bias": (2,), "weight": (3, 2)}, 0.0, "got 2 tensors: 1 of another shape, such as weight"),
        ({"weight": (2, 3)}, 0.0, r"got 1 tensor: 1 missing, such as bias \[2\]"),
        ({"bias": (2,), "weight": (2, 3)}, np.inf, "got 8 values that are not finite"),
    ],
)
def test_another_models_parameters_change_nothing(
    shapes: dict[str, tuple[int, ...]], value: float, expected: str
) -> None:
    module = torch.nn.Linear(3, 2)
    before, table = parameter_vector(module), TensorTable.of(shapes)
    with pytest.raises(InvalidInput, match=expected):
        load_parameters(module, table, np.full(table.num_values, value, np.float32))
    assert (parameter_vector(module) == before).all()


def test_running_statistics_and_adapters_travel_as_in_the_bundle() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.conv(x)).mean((2, 3)))

    for trains in ("full", "head", Adapters(rank=2)):
        small_app = App(
            name="small",
            module=Small(),
            calibration=torch.rand(4, 1, 8, 8),
            batch_size=4,
            num_classes=3,
            recipe=Recipe(trains=trains),
        )
        module = trained_module(small_app)
        assert parameter_table(module) == prepare(small_app).table
        flat = np.arange(parameter_table(module).num_values, dtype=np.float32)
        load_parameters(module, parameter_table(module), flat)
        np.testing.assert_array_equal(parameter_vector(module), flat)


def test_a_batch_norm_over_ranks_of_tp_is_refused() -> None:
    layout = LayoutSettings(layers="stacks", num_layers=3, inputs=("stem",), outputs=("pool", "head")).layout
    # Nothing is sent, because the error comes before a parameter is split.
    with pytest.raises(InvalidInput, match="FN-1289"):
        apply_tensor_parallel(ResNet8(), layout, SimpleNamespace(size=lambda: 2), sequence=False)
