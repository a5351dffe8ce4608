"""Autograd within a trace: gradients as more of the same operators, and nothing left of how autograd keeps its books.

``torch.autograd`` is traced rather than ``torch.func``: that takes some operators' backward passes apart before
our own forms of them (``decompositions``) are asked.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.fx import GraphModule

from fanin.edge.export.optimizers import Tensors

ALIASES: Final = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


def backwards(function: Callable[[Tensors], tuple[Tensor, Tensors]], held: Tensors) -> tuple[Tensors, Tensor, Tensors]:
    """(gradients of what the function gives towards what it is given, that value, and what it gives beside it)."""
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in held.items()}
        value, beside = function(leaves)
        found = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
    return dict(zip(held, found, strict=True)), value.detach(), beside


def write_anew(module: torch.nn.Module) -> None:
    """Let activations write to a new tensor: in its place, the one before would not be what it was made from."""
    for layer in module.modules():
        if getattr(layer, "inplace", False):
            vars(layer)["inplace"] = False


def drop_aliases(graph: GraphModule) -> None:
    """Leave out what only autograd needs, another name for a tensor: converters do not see an image through it."""
    for node in list(graph.graph.nodes):
        if node.target in ALIASES:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
