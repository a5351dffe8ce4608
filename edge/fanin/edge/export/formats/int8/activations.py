"""The ranges of an int8 graph's activations, and the weights whose products stay float.

Ranges are measured once, on the calibration data in the graph of the longest length, which holds every row. The graphs
of all lengths share them. Two graphs share ranges if both have the same quantized tensors.

A Version may change the range of an activation: the scale and the zero point of its grid are slots. One kind of grid is
fixed. A product whose weight and bias are both frozen has the codes of the bias in the file, and their step depends on
the scale of the input.

A quantizer leaves a product in float if its format has no int8 form of it. Examples are a weight of three dimensions,
one matrix for each head or expert, and a weight that is the first factor.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import torch
from torch.fx import Node

from fanin.edge.bundles.slots import Slot, SlotKind
from fanin.edge.export.formats.int8.folding import PRODUCTS, Infer
from fanin.edge.ranges import Activation
from fanin.edge.runtimes.graphs import parameter_port
from fanin.protos.errors import UnsupportedModel

Ranges = Mapping[str, tuple[float, float]]
"""The lowest and the highest value of each quantized tensor. Its name is the same in the graphs of all lengths."""


def check_names(actual: Collection[str], expected: Collection[str]) -> None:
    """Raise UnsupportedModel unless a graph has quantized tensors of the expected names."""
    if others := sorted({*actual} ^ {*expected}):
        raise UnsupportedModel(
            f"infer graph: {len(others)} activations such as {others[0]!r} are quantized otherwise than in the "
            "graph of the longest length, expected the same operators for all lengths; remove what depends on the "
            "length from forward, or export an App for each length",
            code="FN-0742",
        )


def activation_name(graph_format: str, tensor: str) -> str:
    """Return the name of an activation in a manifest."""
    return f"{graph_format}:{tensor}"


def activations_of(graph_format: str, ranges: Ranges, slots: Sequence[Slot]) -> tuple[Activation, ...]:
    """Return the activations whose grids are slots, in the order of the slots."""
    names = {activation_name(graph_format, tensor): tensor for tensor in ranges}
    rows = [slot.activation for slot in slots if slot.kind is SlotKind.ACTIVATION_SCALE]
    return tuple(
        Activation(name=name, graph_format=graph_format, low=ranges[names[name]][0], high=ranges[names[name]][1])
        for name in dict.fromkeys(rows)
    )


aten = torch.ops.aten
MULTIPLYING: Final = frozenset(
    {*PRODUCTS, aten.matmul.default, aten.mm.default, aten.bmm.default, aten.baddbmm.default, aten.einsum.default}
)
MOVING: Final = frozenset(
    {
        *(aten.permute.default, aten.transpose.int, aten.t.default, aten.numpy_T.default, aten.mT.default),
        *(aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default),
        *(aten.slice.Tensor, aten.select.int, aten.contiguous.default, aten.clone.default),
    }
)
"""Operators that only move the elements of a weight before its product."""
MAX_SHOWN: Final = 8


def notes_on_float(graph_format: str, infer: Infer, slots: Sequence[Slot], kept_float: Collection[str]) -> list[str]:
    """Return a note on the weights of products that stay float; none for those that the App keeps so.

    Args:
        graph_format: Name of the format.
        infer: The graph before its quantization.
        slots: The slots of the quantized graph.
        kept_float: Parameters whose products stay float by the recipe.
    """
    quantized = {slot.parameter for slot in slots if slot.kind is not SlotKind.FLOAT}
    ports = {parameter_port(name): name for name, value in infer.values.items() if value.ndim > 1}
    nodes = [node for node in infer.traced.program.graph.nodes if node.op == "placeholder"]
    # Constants of the graph are placeholders, too, before the inputs.
    inputs = zip(infer.traced.inputs, nodes[-len(infer.traced.inputs) :], strict=True)
    factors = sorted(ports[port] for port, node in inputs if port in ports and _is_factor(node))
    names = [name for name in factors if name not in quantized and name not in kept_float]
    if not names:
        return []
    shown = ", ".join(names[:MAX_SHOWN]) + (f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else "")
    reason = "because their products have no int8 form, or values almost zero on the calibration data"
    return [f"{graph_format}: these weights stay float32, {reason}: {shown}"]


def _is_factor(node: Node) -> bool:
    """Return whether a product uses a node, or what is only moved of it."""
    return any(user.target in MULTIPLYING or (user.target in MOVING and _is_factor(user)) for user in node.users)
