"""The float ``infer`` model made int8, and its slots found.

Quantization is static, per channel and in the QDQ form, int8 for weights and activations: onnxruntime's own
quantizer calibrates the activation scales on the App's data. Only products with a weight are quantized: they are
where time and bytes go. A norm's or an addition's constants keep their precision, and so does the attention
between activations, whose quantized softmax overflows in onnxruntime where no probability is large.

The quantizer's weights are thrown away: ``edge.quantize`` alone says what a slot holds. A slot is found by
walking the quantized graph from the parameters' initializers::

    Conv <- DequantizeLinear <- W_quantized, W_scale                    weight and weight_scale
         <- DequantizeLinear <- b_quantized, b_quantized_scale          bias and bias_scale; input scale from
         <- DequantizeLinear <- QuantizeLinear <- activation, scale     <- here
    anything else <- parameter                                          float
"""

import logging
import re
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

from fanin.edge.bundles.quantize import weight_codes
from fanin.edge.bundles.slots import Slot, SlotKind
from fanin.edge.export.int8.folding import Infer
from fanin.edge.export.refusals import REPLACE, first_line
from fanin.edge.runtimes.base import Inputs
from fanin.edge.tensors import Array
from fanin.protos.errors import UnsupportedModel

QUANTIZED: Final = ("Conv", "Gemm", "MatMul")
TRANSPOSED: Final = ".transposed"
COPY: Final = ":copy"
"""Follows the name of a bias in its second place and later ones, before their number."""
CODES: Final = "_quantized"
"""The quantizer's suffix for the codes of an initializer."""
OUTSIDE: Final = "slot"
"""Where a slot's data is said to lie: no such file exists, a runtime puts the data in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Model:
    """The quantized model, whose slots are empty, and its slots."""

    model: onnx.ModelProto
    slots: tuple[Slot, ...]


def to_int8(model: onnx.ModelProto, infer: Infer, reader: "Calibration", kept_float: Collection[str]) -> Int8Model:
    """Quantize a float model (what moves as initializers, input ``x``), but not the products with ``kept_float``.

    Raises UnsupportedModel if something that moves becomes neither a float constant nor a known slot.
    """
    parameters = set(infer.values)
    _fold_transposes(model, parameters)
    _part_biases(model)
    used = {name for node in model.graph.node for name in node.input}
    # The quantizer empties the model that it is given.
    floats = {found.name: numpy_helper.to_array(found) for found in model.graph.initializer}
    quantized = _quantize(model, reader, {*kept_float, *(name + TRANSPOSED for name in kept_float)})
    _Walk(quantized, infer).settle_biases(floats)
    slots = _Walk(quantized, infer).slots()
    covered = {slot.parameter for slot in slots}
    lost = sorted(name for name in parameters if name not in covered and {name, name + TRANSPOSED} & used)
    if lost:
        raise UnsupportedModel(f"infer graph: parameters {lost} are no slots after quantization, expected them to be")
    _empty_slots(quantized, slots)
    return Int8Model(model=quantized, slots=slots)


def _fold_transposes(model: onnx.ModelProto, parameters: set[str]) -> None:
    """A matrix that is transposed before its use becomes an initializer of its own, so that it can be quantized."""
    graph = model.graph
    values = {found.name: found for found in graph.initializer if found.name in parameters}
    folded: dict[str, str] = {}
    for node in [node for node in graph.node if node.op_type == "Transpose" and node.input[0] in values]:
        source = node.input[0]
        if len(values[source].dims) != 2:
            continue
        if source + TRANSPOSED not in folded.values():
            turned = numpy_helper.to_array(values[source]).T.copy()
            graph.initializer.append(numpy_helper.from_array(turned, source + TRANSPOSED))
        folded[node.output[0]] = source + TRANSPOSED
        graph.node.remove(node)
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = folded.get(name, name)
    used = {name for node in graph.node for name in node.input}
    for found in [found for found in graph.initializer if found.name not in used]:
        graph.initializer.remove(found)


def _part_biases(model: onnx.ModelProto) -> None:
    """A bias that is added in several places becomes an initializer for each: its codes follow the input's scale."""
    graph = model.graph
    values = {found.name: found for found in graph.initializer}
    num_uses: Counter[str] = Counter()
    for node in graph.node:
        name = node.input[2] if node.op_type in QUANTIZED and len(node.input) > 2 else ""
        if name not in values:
            continue
        num_uses[name] += 1
        if num_uses[name] > 1:
            node.input[2] = f"{name}{COPY}{num_uses[name]}"
            graph.initializer.append(numpy_helper.from_array(numpy_helper.to_array(values[name]), node.input[2]))


class Calibration:
    """The calibration data (n, ...) in batches, as the quantizer reads it."""

    def __init__(self, calibration: Inputs, batch_size: int) -> None:
        starts = range(0, len(calibration), batch_size)
        self._batches = iter([{"x": calibration[start : start + batch_size]} for start in starts])

    def get_next(self) -> dict[str, Inputs] | None:
        return next(self._batches, None)


def _quantize(model: onnx.ModelProto, reader: Calibration, kept_float: Collection[str]) -> onnx.ModelProto:
    with tempfile.TemporaryDirectory(prefix="fanin-int8-") as folder, _quiet_quantizer():
        path = Path(folder) / "infer.onnx"
        try:
            quantize_static(
                model,
                path,
                reader,
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                op_types_to_quantize=list(QUANTIZED),
                nodes_to_exclude=_kept_float(model, kept_float),
                activation_type=QuantType.QInt8,
                weight_type=QuantType.QInt8,
                extra_options={"WeightSymmetric": True},
            )
        except Exception as exc:  # it runs the graph, and raises what the runtime's classes are
            raise UnsupportedModel(
                f"infer graph: onnxruntime cannot run it on the calibration data ({first_line(exc)}); {REPLACE}"
            ) from exc
        quantized = onnx.load(path)
    del quantized.graph.value_info[:]
    del quantized.metadata_props[:]
    return quantized


def _kept_float(model: onnx.ModelProto, names: Collection[str]) -> list[str]:
    """Names of the products whose second factor is no constant matrix, or one of those named."""
    matrices = {value.name for value in model.graph.initializer if len(value.dims) > 1 and value.name not in names}
    products = [node for node in model.graph.node if node.op_type in QUANTIZED]
    return [node.name for node in products if node.input[1] not in matrices]


@contextmanager
def _quiet_quantizer() -> Iterator[None]:
    """Hide the advice to run another tool first: it would fold parameters into each other."""

    def is_ours(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Please consider")

    logger = logging.getLogger()
    logger.addFilter(is_ours)
    try:
        yield
    finally:
        logger.removeFilter(is_ours)


class _Walk:
    """The quantized graph from its initializers on."""

    def __init__(self, model: onnx.ModelProto, infer: Infer) -> None:
        self._model, self._infer = model, infer
        self._values = {found.name: found for found in model.graph.initializer}
        self._makers = {name: node for node in model.graph.node for name in node.output}
        self._users: dict[str, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            for name in node.input:
                self._users.setdefault(name, []).append(node)

    def slots(self) -> tuple[Slot, ...]:
        """All slots, in the graph's order of initializers."""
        found: list[Slot] = []
        for name, value in self._values.items():
            if self._parameter(name):
                found.append(self._float(name))
            elif name.endswith(CODES) and self._parameter(name.removesuffix(CODES)):
                node = self._only_user(name)
                is_weight = value.data_type == TensorProto.INT8
                found.extend(self._weight(name, node) if is_weight else self._bias(name, node))
        return tuple(found)

    def settle_biases(self, floats: Mapping[str, Array]) -> None:
        """Undo the quantization of biases that have no scales to stand on; ``floats`` are the constants as they were.

        A bias's codes stand on the weight's scales, and kernels take them as such whatever scale is written beside
        them: the two are filled together, or the weight is frozen, on scales that the manifest tells. The bias of a
        single channel stays float too: the quantizer gives it one scale and no channel.
        """
        graph = self._model.graph
        for node in [node for node in graph.node if self._is_quantized_bias(node)]:
            source = node.input[0].removesuffix(CODES)
            _, weight = self._factors(node)
            bias_moves = bool(self._parameter(source))
            if self._values[node.input[2]].dims and (
                bias_moves == bool(self._parameter(weight.input[0].removesuffix(CODES)))
                or (bias_moves and self._freeze_scales(self._parameter(source), weight, floats))
            ):
                continue
            self._only_user(node.output[0]).input[2] = source
            graph.node.remove(node)
            for name in node.input:
                graph.initializer.remove(self._values[name])
            graph.initializer.append(numpy_helper.from_array(floats[source], source))

    def _freeze_scales(self, bias: str, weight: onnx.NodeProto, floats: Mapping[str, Array]) -> bool:
        """Put a frozen weight on the scales that are told for the bias beside it; False if there are none."""
        codes, scales = weight.input[:2]
        source = codes.removesuffix(CODES)
        # Another bias on this weight has the quantizer's scales.
        if bias not in self._infer.scales or len(self._users[codes]) > 1 or len(self._users[weight.output[0]]) > 1:
            return False
        told = self._infer.derived.constant(self._infer.scales[bias])
        found = weight_codes(floats[source].astype(np.float32), self._axis(codes, weight), told)
        self._values[codes].CopyFrom(numpy_helper.from_array(found, codes))
        self._values[scales].CopyFrom(numpy_helper.from_array(told, scales))
        return True

    def _is_quantized_bias(self, node: onnx.NodeProto) -> bool:
        value = self._values.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        return value is not None and value.data_type == TensorProto.INT32

    def _factors(self, bias: onnx.NodeProto) -> tuple[onnx.NodeProto, onnx.NodeProto]:
        """What dequantizes the activation and the weight to whose product a bias is added."""
        user = self._only_user(bias.output[0])
        return self._makers[user.input[0]], self._makers[user.input[1]]

    def _only_user(self, name: str) -> onnx.NodeProto:
        users = self._users[name]
        if len(users) != 1:
            raise UnsupportedModel(
                f"infer graph: {name} is used {len(users)} times, expected once; give each layer a bias of its own"
            )
        return users[0]

    def _parameter(self, name: str) -> str:
        """The parameter behind a float initializer's name, or ""."""
        plain = re.sub(f"{COPY}[0-9]+$", "", name).removesuffix(TRANSPOSED)
        return plain if plain in self._infer.values else ""

    def _float(self, name: str) -> Slot:
        return Slot(
            initializer=name,
            kind=SlotKind.FLOAT,
            parameter=self._parameter(name),
            shape=tuple(self._values[name].dims),
            permutation=(1, 0) if name.endswith(TRANSPOSED) else (),
        )

    def _weight(self, name: str, node: onnx.NodeProto) -> Sequence[Slot]:
        source = name.removesuffix(CODES)
        transposed, parameter = source.endswith(TRANSPOSED), self._parameter(source)
        axis = self._axis(name, node)
        codes = Slot(
            initializer=name,
            kind=SlotKind.WEIGHT,
            parameter=parameter,
            shape=tuple(self._values[name].dims),
            axis=1 - axis if transposed else axis,
            permutation=(1, 0) if transposed else (),
        )
        scale = Slot(
            initializer=node.input[1],
            kind=SlotKind.WEIGHT_SCALE,
            parameter=parameter,
            shape=tuple(self._values[node.input[1]].dims),
            axis=codes.axis,
        )
        return codes, scale

    def _bias(self, name: str, node: onnx.NodeProto) -> Sequence[Slot]:
        activation, weight = self._factors(node)
        codes, _ = self._weight(weight.input[0], weight)
        parameter = self._parameter(name.removesuffix(CODES))
        input_scale = float(numpy_helper.to_array(self._values[activation.input[1]]))
        self._axis(name, node)
        slots = []
        for initializer, kind in ((name, SlotKind.BIAS), (node.input[1], SlotKind.BIAS_SCALE)):
            slots.append(
                Slot(
                    initializer=initializer,
                    kind=kind,
                    parameter=parameter,
                    shape=tuple(self._values[initializer].dims),
                    weight=codes.parameter or self._infer.scales[parameter],
                    axis=codes.axis if codes.parameter else 0,
                    input_scale=input_scale,
                )
            )
        return slots

    def _axis(self, name: str, node: onnx.NodeProto) -> int:
        """The channel axis in the graph of a quantized constant that must be symmetric and per channel."""
        zero_point = numpy_helper.to_array(self._values[node.input[2]])
        if zero_point.ndim != 1 or zero_point.any():
            raise UnsupportedModel(f"infer graph: {name} is not quantized per channel and symmetrically as expected")
        axes = [helper.get_attribute_value(row) for row in node.attribute if row.name == "axis"]
        rank = len(self._values[name].dims)
        return int(axes[0] if axes else 1) % rank


def _empty_slots(model: onnx.ModelProto, slots: Sequence[Slot]) -> None:
    """Take the slots' values out of the file and mark their data as lying outside."""
    wanted = {slot.initializer for slot in slots}
    for value in [value for value in model.graph.initializer if value.name in wanted]:
        size = numpy_helper.to_array(value).nbytes
        empty = TensorProto(name=value.name, data_type=value.data_type, dims=value.dims)
        empty.data_location = TensorProto.EXTERNAL
        for key, text in (("location", OUTSIDE), ("offset", "0"), ("length", str(size))):
            empty.external_data.add(key=key, value=text)
        value.CopyFrom(empty)
