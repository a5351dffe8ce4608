"""The weights whose products stay float in an int8 graph, for the notes of an export.

A quantizer leaves a product in float if its format has no int8 form of it. Examples are a weight of three dimensions,
one matrix for each head or expert, and a weight that is the first factor.
"""

from collections.abc import Collection, Sequence
from typing import Final

import torch
from torch.fx import Node

from fanin.edge.bundles.slots import Slot, SlotKind
from fanin.edge.export.formats.int8.folding import PRODUCTS, Infer
from fanin.edge.runtimes.graphs import parameter_port

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
    return [f"{graph_format}: these weights stay float32, because their products have no int8 form: {shown}"]


def _is_factor(node: Node) -> bool:
    """Return whether a product uses a node, or what is only moved of it."""
    return any(user.target in MULTIPLYING or (user.target in MOVING and _is_factor(user)) for user in node.users)
