"""Activations that are computed again in the backward pass, instead of being kept from the forward one.

Chen et al. 2016 (arXiv 1604.06174). ``full``: a layer keeps its input alone. ``selective``: it keeps the outputs of
matrix products and of attention as well, which are dear to compute, and of collectives, which are dear to repeat.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fanin.datacenter.parallel.settings import Recompute

KEPT: Final = frozenset(
    {
        "aten::mm",
        "aten::bmm",
        "aten::addmm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_attention_math",
        "_c10d_functional::all_reduce",
        "_c10d_functional::all_gather_into_tensor",
        "_c10d_functional::reduce_scatter_tensor",
    }
)


def keep_dear(context: object, operator: torch._ops.OpOverload, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Whether the outputs of an operator are kept."""
    kept = str(operator).rpartition(".")[0].replace(".", "::") in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def apply_recompute(layers: list[nn.Module], mode: Recompute) -> None:
    """Make each layer compute again what it does not keep. Names of parameters stay as they are."""
    if mode == "none":
        return
    for layer in layers:
        # On the instance: hooks that others put around a layer stay outside, and no wrapper changes its names.
        layer.forward = recomputed(layer.forward, mode)


def recomputed(forward: Callable[..., object], mode: Recompute) -> Callable[..., object]:
    """A layer's forward that is computed again, as a function of our own: torch compiles no layer whose forward is
    torch's."""
    if mode == "none":
        return forward
    again: Callable[..., object] = partial(checkpoint, use_reentrant=False)
    if mode == "selective":
        again = partial(again, context_fn=partial(create_selective_checkpoint_contexts, keep_dear))

    def computed(*args: object, **kwargs: object) -> object:
        return again(forward, *args, **kwargs)

    return computed
