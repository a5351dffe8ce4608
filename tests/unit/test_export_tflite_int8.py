"""The int8 ``infer`` graph of a TFLite file: its int8 operators, and slots that accept any Version."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from types import MappingProxyType

import numpy as np
import pytest
import torch
from ai_edge_litert import schema_py_generated as schema
from support.layers import Normed
from support.nightly import in_ci
from support.remote_runtime import runtime_of
from torch import Tensor, nn
from torch.nn import functional as F

from fanin.datacenter.models.transformer import DecoderShape, DecoderTransformer
from fanin.edge.bundles.formats import fill_offsets
from fanin.edge.bundles.quantize import fill_slots, with_derived
from fanin.edge.bundles.slots import SlotKind
from fanin.edge.export import Adapters, App, Recipe, next_token
from fanin.edge.export.formats.int8.activations import activation_name, activations_of
from fanin.edge.export.formats.int8.folding import Infer, fold_norms
from fanin.edge.export.formats.tflite.flatgraph import FlatGraph
from fanin.edge.export.formats.tflite.int8 import INFER, Int8File, build_infer, emptied, infer_spans, quantize_infer
from fanin.edge.export.formats.tflite.operators import check_operators
from fanin.edge.export.formats.tflite.ranges import Range
from fanin.edge.export.formats.tflite.writer import to_tflite
from fanin.edge.export.graph.decompositions.tables import TFLITE
from fanin.edge.export.graph.forward import trace_infer
from fanin.edge.export.module.prepare import Prepared, prepare
from fanin.edge.ranges import Activation, grids_of, initial_ranges
from fanin.edge.tensors import Float32s
from fanin.protos.errors import UnsupportedModel

GAP = 0.006
"""Mean difference of int8 and float logits as a share of their range: about one step of 256."""


class PlainCnn(nn.Module):
    """A CNN that is int8 throughout: every kind of kernel, SAME and other padding, a residual, both pools."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.strided = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.point = nn.Conv2d(8, 8, 1, bias=False)
        self.single = nn.Conv2d(8, 1, (1, 2))
        self.spread = nn.Conv2d(1, 4, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        y = F.relu(F.max_pool2d(self.stem(x), 2))
        y = F.relu(self.strided(y))
        y = F.relu(self.point(F.relu6(self.deep(y))) + y)
        pooled = F.avg_pool2d(F.pad(y, (1, 0, 1, 0)), 2, 1)
        return self.head(pooled.mean((2, 3))) + self.spread(self.single(pooled)).mean((2, 3))


class SharedLayers(nn.Module):
    """Layers that share parameters, that use an input twice, and whose sum is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.tied, self.turned = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.tied.weight = self.once.weight
        self.less, self.more = nn.Linear(8, 8), nn.Linear(8, 8)
        with torch.no_grad():
            for value in (self.once.bias, self.tied.bias):
                value.zero_()
            for target, source in zip(self.more.parameters(), self.less.parameters(), strict=True):
                target.copy_(-source)
        self.fixed = nn.Linear(8, 8)
        self.fixed.bias.requires_grad_(False)
        self.register_buffer("table", torch.linspace(-1.0, 1.0, 40).reshape(5, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        y = F.relu(self.once(x)) + x
        y = 3.0 * F.relu(self.once(y)) + self.tied(y * y)
        y = self.fixed(y) + self.turned(y) @ self.turned.weight + self.once(self.table).mean(0)
        return self.head(y) + self.head(self.less(x) + self.more(x))


class ReshapedOperators(nn.Module):
    """Operators that TFLite has in another form or not at all: transposed convolutions, uneven or dilated windows."""

    def __init__(self) -> None:
        super().__init__()
        self.wider = nn.ConvTranspose2d(3, 6, 3, stride=2, padding=1, output_padding=1)
        self.grouped = nn.ConvTranspose2d(6, 4, 2, groups=2, bias=False)
        self.pools = nn.ModuleList(
            [
                nn.AdaptiveMaxPool2d((5, 3)),
                nn.AdaptiveMaxPool2d((17, 1)),
                nn.MaxPool2d(2, 1, dilation=2),
                nn.AvgPool2d(3, 2, 1, count_include_pad=False),
            ]
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        y = self.grouped(F.relu(self.wider(x)))
        return self.head(torch.cat([pool(y).mean((2, 3)) for pool in self.pools], dim=1))


def decoder() -> nn.Module:
    """One block over sequences of four tokens."""
    return DecoderTransformer(shape=DecoderShape(vocabulary=11, context=4, width=8, num_heads=2, num_blocks=1))


def images() -> Tensor:
    """Return random images."""
    return torch.randn(24, 3, 8, 8)


@dataclass(frozen=True)
class Case:
    """A module, its inputs and its Recipe."""

    module: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    recipe: Recipe = field(default_factory=Recipe)


CASES = MappingProxyType(
    {
        "plain": Case(PlainCnn, images),
        "odd": Case(SharedLayers, lambda: torch.randn(24, 8)),
        "tokens": Case(decoder, lambda: torch.randint(0, 11, (24, 4), dtype=torch.int32)),
        "norm": Case(Normed, images),
        "shaped": Case(ReshapedOperators, images),
        "bias": Case(Normed, images, Recipe(trains="bias")),
        "adapters": Case(Normed, images, Recipe(trains=Adapters(rank=2))),
    }
)


@dataclass(frozen=True)
class CaseFiles:
    """A case's float file and its exported int8 file."""

    prepared: Prepared
    infer: Infer
    data: bytes
    empty: Int8File
    calibration: np.ndarray

    @property
    def first(self) -> dict[str, Float32s]:
        """Version 0."""
        return {name: value.numpy() for name, value in self.prepared.parameters.items()}

    @property
    def second(self) -> dict[str, Float32s]:
        """Another Version, in which some channels have zero weights but keep their biases."""
        rng = np.random.default_rng(5)
        values = {
            name: (value + np.float32(0.1) * rng.standard_normal(value.shape)).astype(np.float32)
            for name, value in self.first.items()
        }
        for name, value in values.items():
            if value.ndim > 1 and name.replace("weight", "bias") in values:
                value[: len(value) // 3] = 0.0
            elif name.endswith("var"):
                np.abs(value, out=value)
        return values

    @property
    def activations(self) -> tuple[Activation, ...]:
        """The activations whose grids are slots."""
        return activations_of("tflite", self.empty.ranges, self.empty.slots)

    @property
    def wider(self) -> Float32s:
        """Other ranges of the activations."""
        return initial_ranges(self.activations) * np.float32(1.75) + np.tile(
            np.float32([-0.25, 0.125]), len(self.activations)
        )

    def build(self, parameters: Mapping[str, Float32s], ranges: Float32s | None = None) -> Int8File:
        """Build a new file from these parameters, and from the ranges of Version 0 or others."""
        model = schema.ModelT.InitFromPackedBuf(self.data)
        spans = infer_spans(model, self.infer, {"x": self.calibration})
        if ranges is not None:
            bounds = dict(zip((row.name for row in self.activations), ranges.reshape(-1, 2).tolist(), strict=True))
            names = {tensor: activation_name("tflite", name) for tensor, name in spans.names.items()}
            changed = {tensor: Range(*bounds[name]) for tensor, name in names.items() if name in bounds}
            spans = replace(spans, grids={**spans.grids, **changed})
        values = with_derived(parameters, self.infer.derived)
        return build_infer(model, self.infer, values, spans, self.prepared.kept_float)

    def fill(self, parameters: Mapping[str, Float32s], ranges: Float32s | None = None) -> bytes:
        """Return the exported file, filled with these parameters and ranges."""
        table, slots = self.prepared.table, self.empty.slots
        grids = grids_of(self.activations, ranges)
        values = fill_slots(slots, table, table.flatten(parameters), self.infer.derived, grids)
        return fill_offsets(self.empty.data, slots, values, "graph")

    def torch_logits(self, parameters: Mapping[str, Float32s]) -> Float32s:
        """Return torch's logits for these parameters."""
        tensors = {name: torch.from_numpy(value.copy()) for name, value in parameters.items()}
        with torch.no_grad():
            x = torch.from_numpy(self.calibration)
            return torch.func.functional_call(self.prepared.eager.eval(), tensors, (x,)).numpy()

    def rows(self) -> Iterator[tuple[str, list[bool]]]:
        """Yield each operator, with a flag for each operand and result: True if it is float."""
        graph = FlatGraph(schema.ModelT.InitFromPackedBuf(self.empty.data), INFER)
        for row in graph.operators:
            yield graph.kind(row), [graph.is_float(int(index)) for index in (*row.inputs, *row.outputs) if index >= 0]


@cache
def files_of(name: str) -> CaseFiles:
    """Return the files of the case."""
    case = CASES[name]
    torch.manual_seed(2)
    module, x = case.module(), case.inputs()
    if name != "tokens":
        loss, num_classes = {}, 4
    else:
        loss, num_classes = {"loss": next_token}, 11
    app = App(
        name=name, module=module, calibration=x, batch_size=4, num_classes=num_classes, recipe=case.recipe, **loss
    )
    prepared = prepare(app)
    infer = fold_norms(trace_infer(prepared, 1), prepared, TFLITE)
    data = to_tflite({INFER: infer.traced}, name)
    empty = quantize_infer(data, infer, {"x": x.numpy()}, prepared.kept_float)
    return CaseFiles(prepared=prepared, infer=infer, data=data, empty=empty, calibration=x.numpy())


def logits_of(data: bytes, runtime: str, x: np.ndarray) -> Float32s:
    """Return the file's logits for each sample."""
    model = runtime_of(runtime).open_model(data, "infer graph", INFER)
    return np.concatenate([model({"x": x[index : index + 1]})["logits"] for index in range(len(x))])


CI_CASES = ("plain", "odd", "tokens", "norm", "adapters")
"""Cases that CI converts. The nightly suite converts all."""


@pytest.mark.parametrize("name", in_ci(CASES, ("plain",)))
def test_a_filled_file_is_bit_identical_to_a_new_one(name: str) -> None:
    files = files_of(name)
    built_files = [files.build(parameters) for parameters in (files.first, files.second)]
    assert files.fill(files.first) == built_files[0].data
    assert files.fill(files.second) == built_files[1].data
    assert built_files[0].slots == built_files[1].slots == files.empty.slots
    assert built_files[0].data != built_files[1].data
    assert emptied(built_files[1]) == files.empty
    assert files.fill(files.second, files.wider) == files.build(files.second, files.wider).data != built_files[1].data


@pytest.mark.parametrize("name", in_ci(("plain", "odd", "tokens", "norm", "bias", "shaped"), ("plain",)))
@pytest.mark.parametrize("runtime", ["litert", "tflite"])
def test_logits_of_every_version_equal_those_of_a_new_file_and_are_close_to_torch(name: str, runtime: str) -> None:
    files = files_of(name)
    for parameters in (files.first, files.second):
        logits = logits_of(files.fill(parameters), runtime, files.calibration)
        repeat = logits_of(files.build(parameters).data, runtime, files.calibration)
        assert logits.tobytes() == repeat.tobytes()
    expected = files.torch_logits(files.first)
    logits = logits_of(files.fill(files.first), runtime, files.calibration)
    assert np.abs(logits - expected).mean() <= GAP * np.ptp(expected)


@pytest.mark.nightly
def test_logits_with_adapters_are_close_to_torch() -> None:
    files = files_of("adapters")
    expected = files.torch_logits(files.first)
    logits = logits_of(files.fill(files.first), "litert", files.calibration)
    assert np.abs(logits - expected).mean() <= GAP * np.ptp(expected)


def test_a_plain_network_is_int8_between_one_quantize_and_one_dequantize() -> None:
    rows = list(files_of("plain").rows())
    kinds = [kind for kind, _ in rows]
    assert Counter(kinds)["QUANTIZE"] == Counter(kinds)["DEQUANTIZE"] == 1
    begin, end = kinds.index("QUANTIZE"), kinds.index("DEQUANTIZE")
    assert kinds[begin - 1 :: -1] in ([], ["TRANSPOSE"])
    assert kinds[end + 1 :] == []
    assert not any(any(floats) for _, floats in rows[begin + 1 : end])
    expected = {"CONV_2D", "DEPTHWISE_CONV_2D", "MAX_POOL_2D", "AVERAGE_POOL_2D", "ADD", "MEAN", "PAD", "RESHAPE"}
    assert expected <= set(kinds)


def test_linear_layers_on_sequences_are_int8_and_attention_is_not() -> None:
    products = [(kind, any(floats)) for kind, floats in files_of("tokens").rows() if "CONV" in kind or "MATMUL" in kind]
    # The products: queries, keys and values in one; the output; two of the perceptron; the head.
    assert Counter(products) == {("CONV_2D", False): 5, ("BATCH_MATMUL", True): 2}


def test_only_trained_tensors_are_slots() -> None:
    kinds = {name: Counter(slot.kind for slot in files_of(name).empty.slots if slot.parameter) for name in CASES}
    product_kinds = {SlotKind.WEIGHT: 1, SlotKind.WEIGHT_SCALE: 1, SlotKind.BIAS: 1, SlotKind.BIAS_SCALE: 1}
    # A bias of a frozen weight uses the weight's scales. The bias of the norm without a product is float.
    assert kinds["bias"] == {SlotKind.BIAS: 5, SlotKind.BIAS_SCALE: 5, SlotKind.FLOAT: 1}
    # A BatchNorm is part of the product before it. Without a product its weight, bias and statistics stay float.
    assert kinds["norm"] == dict.fromkeys(product_kinds, 5) | {SlotKind.FLOAT: 4}
    # A kernel without a bias gets a bias of zeros, with the kernel's scales.
    assert kinds["plain"] == dict.fromkeys(product_kinds, 7) | {SlotKind.BIAS: 6}


def test_frozen_products_are_int8_next_to_float_adapters() -> None:
    products = Counter(any(floats) for kind, floats in files_of("adapters").rows() if "CONV" in kind or "FULLY" in kind)
    assert products == {False: 5, True: 10}


@pytest.mark.parametrize("name", in_ci(CASES, CI_CASES))
def test_slots_do_not_overlap_within_the_file(name: str) -> None:
    int8_file = files_of(name).empty
    sizes = {SlotKind.WEIGHT: 1, SlotKind.ZERO_POINT64: 8}
    ranges = sorted(
        (slot.offset, slot.offset + int(np.prod(slot.shape)) * sizes.get(slot.kind, 4)) for slot in int8_file.slots
    )
    assert ranges[0][0] > 0 and ranges[-1][1] <= len(int8_file.data)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))
    assert all(begin % 4 == 0 for begin, _ in ranges)
    derived = files_of(name).infer.derived
    origins = {origin for slot in int8_file.slots if slot.parameter for origin in derived.origins(slot.parameter)}
    assert origins == set(files_of(name).first) | origins & set(derived.constants)


@pytest.mark.parametrize("name", in_ci(("norm", "bias"), ("norm",)))
def test_no_product_next_to_a_norm_is_float(name: str) -> None:
    products = Counter(any(floats) for kind, floats in files_of(name).rows() if "CONV" in kind or "FULLY" in kind)
    assert products == {False: 5}


def test_a_frozen_bias_is_a_constant_of_the_manifest() -> None:
    (bias,) = (
        slot for slot in files_of("odd").empty.slots if slot.parameter == "fixed.bias" and slot.kind is SlotKind.BIAS
    )
    assert bias.weight == "fixed.weight"
    value = files_of("odd").infer.derived.constant("fixed.bias")
    np.testing.assert_array_equal(value, files_of("odd").prepared.eager.fixed.bias.detach().numpy())


def test_a_trained_tensor_without_a_slot_is_refused() -> None:
    files = files_of("bias")
    # A frozen weight whose scales are no constant.
    wrong_infer = replace(files.infer, scales={"second.bias": "norm.bias"})
    with pytest.raises(UnsupportedModel, match="FN-0787"):
        quantize_infer(files.data, wrong_infer, {"x": files.calibration}, ())


def test_a_kernel_of_several_products_is_written_once() -> None:
    slots = files_of("odd").empty.slots
    weights = Counter(slot.parameter for slot in slots if slot.kind is SlotKind.WEIGHT)
    assert weights["head.weight"] == 1
    assert set(weights.values()) == {1}
    # The bias has one slot for the scale of each input.
    biases = Counter(slot.parameter for slot in slots if slot.kind is SlotKind.BIAS)
    assert (biases["once.bias"], biases["tied.bias"]) == (2, 1)


def test_a_product_that_is_constant_over_the_calibration_data_stays_float() -> None:
    kinds = {slot.kind for slot in files_of("odd").empty.slots if slot.parameter == "head.bias"}
    assert kinds == {SlotKind.BIAS, SlotKind.BIAS_SCALE, SlotKind.FLOAT}


@pytest.mark.parametrize("name", in_ci(CASES, CI_CASES))
def test_every_runtime_has_the_operators(name: str) -> None:
    model = schema.ModelT.InitFromPackedBuf(files_of(name).empty.data)
    names = {code: key for key, code in vars(schema.BuiltinOperator).items() if not key.startswith("_")}
    check_operators({(names[row.builtinCode], row.version) for row in model.operatorCodes}, name)
    assert all(row.deprecatedBuiltinCode == min(row.builtinCode, 127) for row in model.operatorCodes)


def test_ranges_beyond_float_keep_a_product_float() -> None:
    files = files_of("plain")
    model = schema.ModelT.InitFromPackedBuf(files.data)
    spans = infer_spans(model, files.infer, {"x": files.calibration})
    infinite = {tensor: replace(row, high=float("inf")) for tensor, row in spans.ranges.items()}
    int8_file = build_infer(model, files.infer, files.first, replace(spans, ranges=infinite, grids=infinite), ())
    graph = FlatGraph(schema.ModelT.InitFromPackedBuf(int8_file.data), INFER)
    assert not {"QUANTIZE", "DEQUANTIZE"} & {graph.kind(row) for row in graph.operators}
    assert {slot.kind for slot in int8_file.slots} == {SlotKind.FLOAT}
    logits = logits_of(int8_file.data, "litert", files.calibration)
    np.testing.assert_allclose(logits, files.torch_logits(files.first), rtol=0, atol=1e-5)
