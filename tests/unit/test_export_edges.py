"""Edge cases of ``edge.export``: single channels, frozen products, complex functions, and objects that are no App."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.errors import raises
from support.models import BATCH_SIZE, NUM_CLASSES, app_of, batches, export_bundle
from torch import Tensor, nn
from torch.nn import functional

from fanin.edge.bundles.slots import SlotKind
from fanin.edge.export import Adam, Recipe, Sgd, load_app
from fanin.edge.export.build import check_app
from fanin.edge.export.diagnosis.parts import REAL
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.graphs import control_ports, parameter_port
from fanin.edge.signatures import Port
from fanin.edge.tensors import TensorTable
from fanin.protos.errors import UnsupportedModel


def test_a_layer_with_a_single_channel_is_quantized_but_for_its_bias() -> None:
    module = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.Flatten(), nn.Linear(64, NUM_CLASSES))
    bundle = export_bundle(replace(app_of("mlp"), module=module))
    kinds = {(slot.parameter, slot.kind) for slot in bundle.manifest.slots["onnx"]}
    assert ("0.weight", SlotKind.WEIGHT) in kinds
    assert ("0.bias", SlotKind.FLOAT) in kinds
    assert ("2.bias", SlotKind.BIAS) in kinds


def test_a_frozen_product_is_not_rounded_on_the_way() -> None:
    """By default, onnxruntime rounds activations to 8 bits before a product with an int8 weight."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, NUM_CLASSES))
    bundle = export_bundle(replace(app_of("mlp"), module=module, recipe=Recipe(trains="bias")))
    (batch, *_) = batches(BATCH_SIZE, seed=1)
    plain = open_runtime("onnx", plain=True).open_evaluate(bundle)(bundle.initial_parameters(), batch).loss_sum
    fused = open_runtime("onnx").open_evaluate(bundle)(bundle.initial_parameters(), batch).loss_sum
    assert fused == pytest.approx(plain, rel=1e-6)


def test_an_object_that_is_no_app_is_refused(tmp_path: Path) -> None:
    (tmp_path / "apps.py").write_text("from torch import nn\nmodel = nn.Linear(2, 2)\ndef needs(depth): return depth\n")
    with pytest.raises(UnsupportedModel, match="FN-0704"):
        load_app(f"{tmp_path / 'apps.py'}:model")
    with pytest.raises(UnsupportedModel, match="FN-0704"):
        load_app(f"{tmp_path / 'apps.py'}:needs")
    with pytest.raises(UnsupportedModel, match="FN-0714"):
        replace(app_of("mlp"), module=torch.relu_)


@pytest.mark.parametrize("optimizer", [Sgd(), Adam()])
def test_scaffold_needs_an_optimizer_without_state(optimizer: Sgd | Adam) -> None:
    with raises(
        UnsupportedModel,
        f"Recipe: got scaffold=True with {optimizer}, expected an optimizer without state; use Sgd(momentum=0.0)",
    ):
        Recipe(optimizer=optimizer, scaffold=True)


def test_a_layer_called_control_is_no_control_variate() -> None:
    table = TensorTable.of({"control.weight": (2,), "weight": (2,)})
    ports = [Port(name=name, dtype="float32", shape=(2,)) for name in ("weight", "parameter.control.weight")]
    assert [parameter_port(spec.name) for spec in table.specs] == ["parameter.control.weight", "weight"]
    assert control_ports(table, ports) == ()
    extra = Port(name="control.control.weight", dtype="float32", shape=(2,))
    assert control_ports(table, [*ports, extra]) == ("control.control.weight",)


@pytest.mark.parametrize("y", [torch.full((64,), NUM_CLASSES), torch.full((64,), -1), torch.zeros(64)])
def test_validation_labels_are_checked(y: Tensor) -> None:
    with pytest.raises(UnsupportedModel, match="FN-0734"):
        replace(app_of("mlp"), validation=(app_of("mlp").inputs["x"], y))


def test_validation_labels_from_1_name_the_remedy() -> None:
    x = app_of("mlp").inputs["x"]
    with pytest.raises(UnsupportedModel, match="FN-0734"):
        replace(app_of("mlp"), validation=(x, torch.arange(len(x)) % NUM_CLASSES + 1))


class Spectral(nn.Module):
    """Magnitudes of a spectrum between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 8), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        spectrum = torch.fft.rfft(self.first(x.flatten(1)))
        logits: Tensor = self.head(spectrum.abs())
        return logits


class AffineGrid(nn.Module):
    """A sampling grid of a learned affine map."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 6), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        maps = self.first(x.flatten(1)).unflatten(1, (2, 3))
        grid = functional.affine_grid(maps, [x.shape[0], 1, 2, 2], align_corners=False)
        logits: Tensor = self.head(grid.flatten(1))
        return logits


def test_a_function_of_complex_numbers_is_named_with_its_line() -> None:
    (finding,) = check_app(replace(app_of("mlp"), module=Spectral()), ["onnx"])
    assert (finding.kind, finding.call, finding.operator) == ("Spectral", "torch.fft.rfft", "torch.fft.rfft")
    assert finding.line == f"test_export_edges.py:{Spectral.forward.__code__.co_firstlineno + 2}"
    assert finding.reason == "torch.fft.rfft returns complex numbers, expected real ones"
    assert finding.advice == REAL


@pytest.mark.nightly
def test_tflite_trains_through_a_spectrum() -> None:
    assert check_app(replace(app_of("mlp"), module=Spectral()), ["tflite"]) == ()


def test_a_grid_of_an_affine_map_has_no_findings() -> None:
    assert check_app(replace(app_of("mlp"), module=AffineGrid()), ["onnx"]) == ()
