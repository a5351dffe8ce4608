"""Norms folded into products: the arithmetic, the resulting ``infer`` graph, and its slots in ONNX."""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.layers import Normed
from support.nightly import in_ci
from torch import nn
from torch.nn.utils import fusion

from fanin.edge.bundles.derived import Derived, FoldedTensor
from fanin.edge.bundles.initializers import fill_constants
from fanin.edge.bundles.quantize import fill_slots, weight_codes, weight_scales, with_derived
from fanin.edge.bundles.slots import Slot, SlotKind
from fanin.edge.export import App, Recipe
from fanin.edge.export.formats.graphs import onnx_infer
from fanin.edge.export.formats.int8.activations import activations_of
from fanin.edge.export.formats.int8.folding import Infer, fold_norms
from fanin.edge.export.formats.onnx.int8 import Int8Model
from fanin.edge.export.graph.decompositions.tables import ONNX, TFLITE
from fanin.edge.export.graph.forward import trace_infer
from fanin.edge.export.module.prepare import Prepared, prepare
from fanin.edge.ranges import Grids, grids_of
from fanin.edge.tensors import Float32s
from fanin.protos.errors import UnsupportedModel

GAP = 0.006
"""Mean difference of int8 and float logits as a share of their range: about one step of 256."""
PRODUCTS = ("first", "deep", "second", "dense", "head")


@dataclass(frozen=True)
class FoldedCase:
    """An App with norms, exported to ONNX."""

    prepared: Prepared
    infer: Infer
    int8: Int8Model
    x: np.ndarray

    def parameters_of(self, module: nn.Module) -> Float32s:
        """Return the module's parameters in the flat form of a Version."""
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        table = self.prepared.table
        return table.flatten({spec.name: tensors[spec.name].detach().numpy() for spec in table.specs})

    @property
    def grids(self) -> Grids:
        """The grids of the activations at the export."""
        return grids_of(activations_of("onnx", self.int8.ranges, self.int8.slots))

    def fill(self, parameters: Float32s) -> onnx.ModelProto:
        """Return the int8 graph of a Version."""
        values = fill_slots(self.int8.slots, self.prepared.table, parameters, self.infer.derived, self.grids)
        return onnx.load_from_string(fill_constants(self.int8.model.SerializeToString(), values, "graph"))

    def logits(self, parameters: Float32s) -> Float32s:
        """Return the logits, computed with the exact kernels that devices use."""
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.x64quantprecision", "1")
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(self.fill(parameters).SerializeToString(), options)
        return session.run(None, {"x": self.x})[0]


RECIPES = MappingProxyType(
    {"full": Recipe(), "kept": Recipe(), "bias": Recipe(trains="bias"), "head": Recipe(trains="head")}
)
"""The module of ``kept`` is in evaluation mode: it trains, but its norms keep their statistics."""


@cache
def case_of(name: str) -> FoldedCase:
    """Return the case of this name."""
    torch.manual_seed(4)
    module, x = Normed().train(name != "kept"), torch.randn(24, 3, 8, 8)
    app = App(name=name, module=module, calibration=x, batch_size=4, num_classes=4, recipe=RECIPES[name])
    prepared = prepare(app)
    infer = fold_norms(trace_infer(prepared), prepared, ONNX)
    return FoldedCase(prepared=prepared, infer=infer, int8=onnx_infer(prepared, infer), x=x.numpy())


def later_version(module: nn.Module) -> nn.Module:
    """Return the module of a later Version: the trained parameters have changed a little."""
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for value in module.parameters():
            if value.requires_grad:
                value += 0.02 * torch.randn(value.shape, generator=generator)
        for norm in module.modules():
            if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.training:
                norm.running_mean += 0.05
                norm.running_var *= 1.1
    return module


floats = st.floats(-100.0, 100.0, width=32)
rows = st.lists(st.tuples(floats, floats, floats, floats, floats), min_size=1, max_size=4)


@given(rows=rows, x=floats, epsilon=st.floats(1e-5, 1.0), parts=st.sets(st.sampled_from(["bias", "gain", "offset"])))
def test_the_folded_product_is_the_norm_of_the_product(
    rows: list[tuple[float, ...]], x: float, epsilon: float, parts: set[str]
) -> None:
    names = ("weight", "bias", "mean", "gain", "offset")
    tensors = {name: np.array(column, np.float32) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    tensors["variance"] = np.abs(tensors["mean"]) - np.float32(0.25)
    operands = {name: name if name in parts else "" for name in ("gain", "offset")}
    options = {"variance": "variance", "epsilon": epsilon, "gain": operands["gain"]}
    derived = Derived(
        constants={"mean": tensors["mean"].astype("<f4").tobytes()},
        folded={
            "w": FoldedTensor(value="weight", **options),
            "b": FoldedTensor(
                value="bias" if "bias" in parts else "", mean="mean", offset=operands["offset"], **options
            ),
        },
    )
    result = with_derived({name: value for name, value in tensors.items() if name != "mean"}, derived)
    doubles = {name: value.astype(np.float64) for name, value in tensors.items()}
    product = doubles["weight"] * x + (doubles["bias"] if "bias" in parts else 0.0)
    deviation = np.sqrt(np.maximum(doubles["variance"], 0.0) + epsilon)
    expected = (product - doubles["mean"]) / deviation * (doubles["gain"] if "gain" in parts else 1.0)
    expected += doubles["offset"] if "offset" in parts else 0.0
    assert result["w"].dtype == result["b"].dtype == np.float32
    size = np.abs(result["w"].astype(np.float64) * x) + np.abs(result["b"])
    assert np.all(np.abs(result["w"].astype(np.float64) * x + result["b"] - expected) <= 1e-6 * size + 1e-30)


@pytest.mark.parametrize("name", in_ci(RECIPES, ("kept", "bias")))
def test_only_a_norm_with_no_product_before_it_remains(name: str) -> None:
    graph = case_of(name).infer.traced.program.graph
    assert Counter(str(node.target) for node in graph.nodes)["aten.batch_norm.default"] == 1
    types = Counter(node.op_type for node in case_of(name).int8.model.graph.node)
    assert types["BatchNormalization"] == 1


@pytest.mark.parametrize("name", in_ci(RECIPES, ("kept", "bias")))
def test_the_int8_graph_of_each_version_is_close_to_torch(name: str) -> None:
    case = case_of(name)
    module = Normed()
    module.load_state_dict(case.prepared.eager.state_dict())
    for target, source in zip(module.modules(), case.prepared.eager.modules(), strict=True):
        target.training = source.training
    for target, source in zip(module.parameters(), case.prepared.eager.parameters(), strict=True):
        target.requires_grad_(source.requires_grad)
    for version in (module, later_version(module)):
        logits = case.logits(case.parameters_of(version))
        training = [norm.training for norm in version.modules()]
        with torch.no_grad():
            expected = version.eval()(torch.from_numpy(case.x)).numpy()
        for layer, mode in zip(version.modules(), training, strict=True):
            layer.training = mode
        assert np.abs(logits - expected).mean() <= GAP * np.ptp(expected)


def slots_of(case: FoldedCase, parameter: str) -> dict[SlotKind, Slot]:
    """Return the slots of a parameter."""
    return {slot.kind: slot for slot in case.int8.slots if slot.parameter == parameter}


@pytest.mark.parametrize("name", ["full", "kept"])
def test_a_slot_is_bit_identical_to_a_quantized_fused_layer(name: str) -> None:
    case = case_of(name)
    parameters = case.parameters_of(case.prepared.eager)
    values = fill_slots(case.int8.slots, case.prepared.table, parameters, case.infer.derived, case.grids)
    layers = {name: layer.double() for name, layer in Normed().named_children()}
    tensors = case.prepared.eager.state_dict()
    for child, layer in layers.items():
        layer.load_state_dict({key: tensors[f"{child}.{key}"] for key in layer.state_dict()})
        layer.eval()
    for index, (product, norm) in enumerate((("first", "norm"), ("deep", "kept"))):
        fused_layer = fusion.fuse_conv_bn_eval(layers[product], layers[norm])
        weight, bias = (value.detach().numpy().astype(np.float32) for value in (fused_layer.weight, fused_layer.bias))
        folded_name = f"{product}.weight:folded{index or ''}"
        slots = slots_of(case, folded_name)
        scales = weight_scales(weight, 0)
        np.testing.assert_array_equal(values[slots[SlotKind.WEIGHT_SCALE].initializer], scales)
        np.testing.assert_array_equal(values[slots[SlotKind.WEIGHT].initializer], weight_codes(weight, 0, scales))
        slot = slots_of(case, f"{folded_name}.bias")[SlotKind.BIAS]
        input_scale = float(case.grids[slot.activation][0])
        codes = np.rint(bias / (scales.astype(np.float64) * input_scale).astype(np.float32).astype(np.float64))
        np.testing.assert_array_equal(values[slot.initializer], codes)


def test_a_bias_of_a_frozen_weight_uses_its_scales() -> None:
    case = case_of("bias")
    kinds = Counter(slot.kind for slot in case.int8.slots if slot.parameter)
    assert kinds == {SlotKind.BIAS: 5, SlotKind.BIAS_SCALE: 5, SlotKind.FLOAT: 1}
    model = case.fill(case.parameters_of(case.prepared.eager))
    constants = {value.name: onnx.numpy_helper.to_array(value) for value in model.graph.initializer}
    producers = {node.output[0]: node for node in model.graph.node}
    for slot in case.int8.slots:
        if slot.kind is not SlotKind.BIAS:
            continue
        (product,) = (
            node
            for node in model.graph.node
            if node.op_type in ("Conv", "Gemm") and producers[node.input[2]].input[0] == slot.initializer
        )
        scales = case.infer.derived.constant(slot.weight)
        np.testing.assert_array_equal(constants[producers[product.input[1]].input[1]], scales)
        grid = scales.astype(np.float64) * float(case.grids[slot.activation][0])
        np.testing.assert_array_equal(constants[producers[product.input[2]].input[1]], grid.astype(np.float32))


def test_a_frozen_product_is_a_constant_of_the_graph() -> None:
    slots = case_of("head").int8.slots
    assert {slot.parameter for slot in slots} - {""} == {"head.weight", "head.bias"}
    # The codes of a frozen bias are on the grid of its input, which is fixed. The head has no frozen bias.
    fixed = set(case_of("head").int8.ranges) - {slot.activation.removeprefix("onnx:") for slot in slots}
    assert fixed and {slot.activation for slot in slots if slot.kind is SlotKind.BIAS} <= set(case_of("head").grids)
    assert not case_of("head").infer.derived.folded


class SharedBias(nn.Module):
    """A frozen bias of two layers, and a weight that is computed from a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.bias = self.first.bias
        self.first.bias.requires_grad_(False)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        y = nn.functional.linear(self.second(self.first(x)), self.third.weight.clamp(0.0), self.third.bias)
        return self.head(self.norm(y))


def test_a_frozen_bias_of_two_layers_is_one_input_and_a_computed_weight_is_unchanged() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 8)
    prepared = prepare(App(name="shared", module=SharedBias(), calibration=x, batch_size=4, num_classes=4))
    infer = fold_norms(trace_infer(prepared), prepared, ONNX)
    (bias,) = infer.derived.constants  # under one of its two names
    assert bias in ("first.bias", "second.bias")
    assert Counter(infer.traced.inputs)[bias] == 1
    assert not infer.derived.folded
    int8 = onnx_infer(prepared, infer)
    case = FoldedCase(prepared=prepared, infer=infer, int8=int8, x=x.numpy())
    with torch.no_grad():
        expected = prepared.eager.eval()(x).numpy()
    logits = case.logits(case.parameters_of(prepared.eager))
    assert np.abs(logits - expected).mean() <= GAP * np.ptp(expected)


def test_a_norm_whose_statistics_are_not_finite_is_refused() -> None:
    module = Normed().eval()
    module.norm.running_mean[0] = torch.nan
    app = App(name="nan", module=module, calibration=torch.randn(8, 3, 8, 8), batch_size=4, num_classes=4)
    prepared = prepare(app)
    with pytest.raises(UnsupportedModel, match="FN-0763"):
        fold_norms(trace_infer(prepared), prepared, ONNX)


class UnfoldedNorms(nn.Module):
    """Norms that are not folded: of a shared product, trained after a frozen weight, over another dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.frozen, self.moves = nn.Conv2d(4, 4, 1).requires_grad_(False), nn.BatchNorm2d(4)
        self.linear, self.along = nn.Linear(8, 8), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        y = self.shared(x)
        y = self.moves(self.frozen(self.norm(y) + y))
        return self.along(self.linear(y.flatten(2)[:, :, :8])).mean(2)


def test_a_norm_that_cannot_be_part_of_a_product_is_not_folded() -> None:
    torch.manual_seed(0)
    app = App(name="kept", module=UnfoldedNorms(), calibration=torch.randn(8, 3, 4, 4), batch_size=4, num_classes=4)
    prepared = prepare(app)
    infer = fold_norms(trace_infer(prepared), prepared, ONNX)
    kinds = Counter(str(node.target) for node in infer.traced.program.graph.nodes)
    assert kinds["aten.batch_norm.default"] == 3
    assert not infer.derived.folded


def test_a_norm_is_folded_next_to_an_operator_that_is_decomposed() -> None:
    torch.manual_seed(4)
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 2))
    app = App(name="pooled", module=module, calibration=torch.randn(8, 1, 6, 6), batch_size=4, num_classes=2)
    prepared = prepare(app)
    graph = fold_norms(trace_infer(prepared, 1), prepared, TFLITE).traced.program.graph
    assert torch.ops.aten.batch_norm.default not in {node.target for node in graph.nodes}
