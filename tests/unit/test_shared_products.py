"""A layer that a module calls several times: its int8 ``infer`` graph runs with exact kernels in onnxruntime."""

import logging
from collections import Counter
from collections.abc import Iterable
from functools import cache

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from support.models import export_bundle
from support.nightly import in_ci
from torch import Tensor, nn

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.quantize import fill_slots
from fanin.edge.bundles.slots import SlotKind
from fanin.edge.export import Adapters, App, Recipe
from fanin.edge.export.app.inputs.named import numpy_inputs
from fanin.edge.export.standalone.quantized import int8_models
from fanin.edge.ranges import grids_of
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.models import run_rows
from fanin.edge.tensors import Float32s

LOGGER = "fanin.edge.runtimes"
RECIPES = {"full": Recipe(), "head": Recipe(trains="head"), "bias": Recipe(trains="bias")}


class Siamese(nn.Module):
    """One net for two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.net(left) - self.net(right))


class Recurrent(nn.Module):
    """A recurrent cell that runs three steps. Its products use matrices without a bias, in torch's layout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell, self.head = nn.Linear(4, 12), nn.GRUCell(12, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        state = torch.zeros_like(self.first(x[:, 0]))
        for step in range(3):
            state = self.cell(self.first(x[:, step]), state)
        return self.head(state)


class Convolved(nn.Module):
    """A convolution at two scales, and heads of one channel, whose zero points are equal constants."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 4, 3, padding=1)
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        large, small = (torch.relu(self.body(each)) for each in (x, x[:, :, ::2, ::2]))
        pooled = large.mean((2, 3)) - small.mean((2, 3))
        return torch.cat([head(pooled) for head in self.heads], dim=1)


def app_of(name: str) -> App:
    """Return the App of a case, always with the same weights and data."""
    torch.manual_seed(0)
    module, x = {
        "siamese": lambda: (Siamese(), {"left": torch.randn(64, 16), "right": torch.randn(64, 16)}),
        "recurrent": lambda: (Recurrent(), torch.randn(64, 3, 4)),
        "convolved": lambda: (Convolved(), torch.randn(64, 1, 8, 8)),
    }[name.partition("-")[0]]()
    recipe = RECIPES[name.partition("-")[2] or "full"]
    return App(name=name, module=module, calibration=x, batch_size=8, num_classes=3, recipe=recipe)


@cache
def bundle_of(name: str) -> Bundle:
    """Return the Bundle of a case."""
    return export_bundle(app_of(name))


def later_parameters(bundle: Bundle) -> Float32s:
    """Return the parameters of a later Version."""
    first = bundle.initial_parameters()
    return first + np.random.default_rng(4).normal(0.0, 0.02, first.shape).astype(np.float32)


CASES = ("siamese", "siamese-head", "siamese-bias", "recurrent", "convolved")


@pytest.mark.parametrize("name", in_ci(CASES, ("siamese", "convolved")))
def test_onnxruntime_matches_the_reference_evaluator(name: str, caplog: pytest.LogCaptureFixture) -> None:
    bundle, inputs = bundle_of(name), numpy_inputs(app_of(name).inputs)
    runtime = open_runtime("onnx")
    logits = runtime.open_predict(bundle, later_parameters(bundle))(inputs)
    runtime.open_train(bundle)
    runtime.open_evaluate(bundle)
    expected = open_runtime("reference").open_predict(bundle, later_parameters(bundle))(inputs)
    # One step of an activation's grid in a single sample is allowed: kernels round a tie in float32.
    assert np.abs(logits - expected).mean() <= 2e-3 * np.ptp(expected)
    assert [record.getMessage() for record in caplog.records if record.name == LOGGER] == []


@pytest.mark.parametrize("name", in_ci(CASES, ("siamese", "convolved")))
def test_the_standalone_file_opens_with_exact_kernels_and_matches_the_bundle(name: str) -> None:
    bundle, inputs = bundle_of(name), numpy_inputs(app_of(name).inputs)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(int8_models(bundle, later_parameters(bundle), "onnx")["infer"], options)
    expected = open_runtime("onnx").open_predict(bundle, later_parameters(bundle))(inputs)
    np.testing.assert_array_equal(session.run(["logits"], inputs)[0], expected)


def test_each_product_has_a_weight_of_its_own_and_their_values_share_memory() -> None:
    bundle = bundle_of("siamese")
    graph = onnx.load_from_string(bundle.graph("infer", "onnx")).graph
    weights = [node.input[0] for node in graph.node if node.op_type == "DequantizeLinear"]
    constants = {row.name for row in graph.initializer}
    assert set(Counter(name for name in weights if name in constants).values()) == {1}

    manifest = bundle.manifest
    slots = manifest.slots["onnx"]
    values = fill_slots(
        slots, manifest.model_table, later_parameters(bundle), manifest.derived, grids_of(manifest.activations)
    )
    codes = [slot for slot in slots if slot.kind is SlotKind.WEIGHT]
    assert Counter(slot.parameter for slot in codes) == {"net.0.weight": 2, "net.2.weight": 2, "head.weight": 1}
    assert len({id(values[slot.initializer]) for slot in codes}) == 3


def test_a_shared_weight_that_stays_float_has_no_copies() -> None:
    app = app_of("siamese")
    bundle = export_bundle(
        App(
            name="adapted",
            module=app.module,
            calibration=app.calibration,
            batch_size=8,
            num_classes=3,
            recipe=Recipe(trains=Adapters(rank=2)),
        )
    )
    slots = bundle.manifest.slots["onnx"]
    assert {slot.kind for slot in slots if slot.parameter} == {SlotKind.FLOAT}
    assert set(Counter(slot.parameter for slot in slots if slot.parameter).values()) == {1}


def quantized_file(factors: Iterable[str]) -> bytes:
    """Return a file that fanin did not export: products of x with int8 weights of these names."""
    helper, rng = onnx.helper, np.random.default_rng(1)
    names, nodes, y = list(factors), [], "x"
    constants = {"scale": np.array(0.02, np.float32), "zero": np.array(0, np.int8)}
    for index, name in enumerate(names):
        constants[name] = rng.integers(-127, 128, (16, 16)).astype(np.int8)
        constants[f"{name}_scale"], constants[f"{name}_zero"] = np.full(16, 0.01, np.float32), np.zeros(16, np.int8)
        last = "y" if index == len(names) - 1 else f"y{index}"
        nodes += [
            helper.make_node("QuantizeLinear", [y, "scale", "zero"], [f"q{index}"]),
            helper.make_node("DequantizeLinear", [f"q{index}", "scale", "zero"], [f"d{index}"]),
            helper.make_node("DequantizeLinear", [name, f"{name}_scale", f"{name}_zero"], [f"w{index}"], axis=1),
            helper.make_node("MatMul", [f"d{index}", f"w{index}"], [f"p{index}"]),
            helper.make_node("QuantizeLinear", [f"p{index}", "scale", "zero"], [f"r{index}"]),
            helper.make_node("DequantizeLinear", [f"r{index}", "scale", "zero"], [last]),
        ]
        y = last
    ports = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 16]) for name in ("x", "y")]
    rows = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "other", ports[:1], ports[1:], rows)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    data: bytes = model.SerializeToString()
    return data


@pytest.mark.parametrize(("factors", "num_warnings"), [(("a", "b"), 0), (("a", "a"), 1)])
def test_a_file_of_another_origin_whose_products_share_a_weight_opens_with_a_warning(
    factors: tuple[str, ...], num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, LOGGER):
        model = open_runtime("onnx").open_model(quantized_file(factors), "the file")
    assert run_rows(model, {"x": np.ones((2, 16), np.float32)})["y"].shape == (2, 16)
    assert len(caplog.records) == num_warnings
    if num_warnings:
        assert "the file: onnxruntime cannot open it with exact int8 kernels" in caplog.text
        assert "may saturate" in caplog.text
