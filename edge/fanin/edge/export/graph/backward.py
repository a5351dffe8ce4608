"""Autograd inside a trace: gradients become plain operators, and autograd's bookkeeping is removed.

``torch.autograd`` is traced and not ``torch.func``: the latter decomposes some backward operators before our own forms
(``decompositions``) can replace them.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.fx import GraphModule

from fanin.edge.export.app.optimizers.optimizer import Tensors

ALIASES: Final = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


def gradients_of(
    function: Callable[[Tensors], tuple[Tensor, Tensors]], parameters: Tensors
) -> tuple[Tensors, Tensor, Tensors]:
    """Return the gradients of a function's value.

    Args:
        function: parameters by name -> (scalar value, auxiliary tensors by name).
        parameters: The tensors to differentiate by.

    Returns:
        (gradients by name, the value, the auxiliary tensors).
    """
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        value, auxiliary = function(leaves)
        gradients = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True)), value.detach(), auxiliary


def disable_inplace(module: torch.nn.Module) -> None:
    """Turn in-place activations off: they would overwrite a tensor that the gradient needs."""
    for layer in module.modules():
        if getattr(layer, "inplace", False):
            vars(layer)["inplace"] = False


def drop_aliases(graph: GraphModule) -> None:
    """Remove aliases and detaches, which only autograd needs: converters do not recognize an image behind one."""
    for node in list(graph.graph.nodes):
        if node.target in ALIASES:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
