"""The slots of a quantized ONNX model.

The search for slots follows the quantized graph from the initializers of parameters::

    Conv <- DequantizeLinear <- W_quantized, W_scale                    weight and weight_scale
         <- DequantizeLinear <- b_quantized, b_quantized_scale          bias and bias_scale; input scale from
         <- DequantizeLinear <- QuantizeLinear <- activation, scale     <- here; activation_scale and zero_point
    any other operator <- parameter                                     float

The values of the quantizer are discarded: ``bundles.quantize`` alone computes the content of a slot. The grid of an
activation is fixed, without slots, if a product with it has a frozen bias as int32.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization.quant_utils import QUANT_INPUT_SUFFIX

from fanin.edge.bundles.quantize import weight_codes
from fanin.edge.bundles.slots import Slot, SlotKind
from fanin.edge.export.formats.int8.activations import activation_name
from fanin.edge.export.formats.int8.folding import Infer
from fanin.edge.runtimes.graphs import parameter_port
from fanin.edge.tensors import Array
from fanin.protos.errors import UnsupportedModel

TRANSPOSED: Final = ":transposed"
COPY: Final = ":copy"
"""Suffix of a weight or bias in its second place and later ones, before their number."""
CODES: Final = "_quantized"
"""The quantizer's suffix for the codes of an initializer."""


class SlotFinder:
    """A quantized model, indexed by producers and users of its values."""

    def __init__(self, model: onnx.ModelProto, infer: Infer) -> None:
        self._model, self._infer = model, infer
        self._parameters = {parameter_port(name): name for name in infer.values}
        self._values = {row.name: row for row in model.graph.initializer}
        self._makers = {name: node for node in model.graph.node for name in node.output}
        self._grids = {
            node.input[1]: (activation_name("onnx", node.input[0].removesuffix(QUANT_INPUT_SUFFIX)), node.input[2])
            for node in model.graph.node
            if node.op_type == "QuantizeLinear"
        }
        self._users: dict[str, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            for name in node.input:
                self._users.setdefault(name, []).append(node)

    def slots(self) -> tuple[Slot, ...]:
        """Return all slots in the order of the initializers."""
        slots: list[Slot] = []
        fixed = self._fixed_scales()
        for name, value in self._values.items():
            if self._parameter(name):
                slots.append(self._float(name))
            elif name.endswith(CODES) and self._parameter(name.removesuffix(CODES)):
                node = self._only_user(name)
                is_weight = value.data_type == TensorProto.INT8
                slots.extend(self._weight(name, node) if is_weight else self._bias(name, node, fixed))
        for scale, (activation, zero_point) in self._grids.items():
            if scale not in fixed:
                kinds = ((scale, SlotKind.ACTIVATION_SCALE), (zero_point, SlotKind.ZERO_POINT))
                slots += [
                    Slot(initializer=name, kind=kind, parameter="", shape=(), activation=activation)
                    for name, kind in kinds
                ]
        return tuple(slots)

    def _fixed_scales(self) -> set[str]:
        """Return the scales of the activations of products whose quantized bias is frozen."""
        biases = [node for node in self._model.graph.node if self._is_quantized_bias(node)]
        frozen = [node for node in biases if not self._parameter(node.input[0].removesuffix(CODES))]
        return {self._factors(node)[0].input[1] for node in frozen}

    def settle_biases(self, floats: Mapping[str, Array]) -> None:
        """Undo the quantization of biases that have no scales.

        The codes of a bias use the weight's scales, and kernels rely on that for any stored scale of the bias. So a
        bias stays quantized in two cases: it moves together with its weight, or the weight is frozen with scales from
        the manifest. The bias of a single channel becomes float, too: the quantizer gives it one scale without a
        channel axis.

        Args:
            floats: The constants before quantization.
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
        """Use the manifest's scales for the frozen weight next to a bias; False if there are none."""
        codes, scales = weight.input[:2]
        source = codes.removesuffix(CODES)
        if bias not in self._infer.scales:
            return False
        frozen_scales = self._infer.derived.constant(self._infer.scales[bias])
        frozen_codes = weight_codes(floats[source].astype(np.float32), self._axis(codes, weight), frozen_scales)
        self._values[codes].CopyFrom(numpy_helper.from_array(frozen_codes, codes))
        self._values[scales].CopyFrom(numpy_helper.from_array(frozen_scales, scales))
        return True

    def _is_quantized_bias(self, node: onnx.NodeProto) -> bool:
        value = self._values.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        return value is not None and value.data_type == TensorProto.INT32

    def _factors(self, bias: onnx.NodeProto) -> tuple[onnx.NodeProto, onnx.NodeProto]:
        """Return the nodes that dequantize the activation and the weight of a bias's product."""
        user = self._only_user(bias.output[0])
        return self._makers[user.input[0]], self._makers[user.input[1]]

    def _only_user(self, name: str) -> onnx.NodeProto:
        users = self._users[name]
        if len(users) != 1:
            raise UnsupportedModel(
                f"infer graph: {name} is used {len(users)} times, expected once; give each layer a bias of its own",
                code="FN-0786",
            )
        return users[0]

    def _parameter(self, name: str) -> str:
        """Return the parameter behind the name of a float initializer; "" if there is none."""
        return self._parameters.get(_original(name).removesuffix(TRANSPOSED), "")

    def _float(self, name: str) -> Slot:
        return Slot(
            initializer=name,
            kind=SlotKind.FLOAT,
            parameter=self._parameter(name),
            shape=tuple(self._values[name].dims),
            permutation=(1, 0) if _original(name).endswith(TRANSPOSED) else (),
        )

    def _weight(self, name: str, node: onnx.NodeProto) -> Sequence[Slot]:
        source = name.removesuffix(CODES)
        transposed, parameter = _original(source).endswith(TRANSPOSED), self._parameter(source)
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

    def _bias(self, name: str, node: onnx.NodeProto, fixed: Collection[str]) -> Sequence[Slot]:
        activation, weight = self._factors(node)
        codes, _ = self._weight(weight.input[0], weight)
        parameter = self._parameter(name.removesuffix(CODES))
        scale = activation.input[1]
        is_fixed = scale in fixed
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
                    activation="" if is_fixed else self._grids[scale][0],
                    input_scale=float(numpy_helper.to_array(self._values[scale])) if is_fixed else 0.0,
                )
            )
        return slots

    def _axis(self, name: str, node: onnx.NodeProto) -> int:
        """Return the channel axis of a quantized constant. Raises UnsupportedModel unless it is symmetric and per
        channel.
        """
        zero_point = numpy_helper.to_array(self._values[node.input[2]])
        if zero_point.ndim != 1 or zero_point.any():
            raise UnsupportedModel(
                f"infer graph: {name} has zero points {zero_point.tolist()}, expected a 0 for each channel; "
                "please report the module",
                code="FN-0787",
            )
        axes = [helper.get_attribute_value(row) for row in node.attribute if row.name == "axis"]
        rank = len(self._values[name].dims)
        return int(axes[0] if axes else 1) % rank


def _original(name: str) -> str:
    """Return the name of a float initializer without the suffix of a copy."""
    return re.sub(f"{COPY}[0-9]+$", "", name)
