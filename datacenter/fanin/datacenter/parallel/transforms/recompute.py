"""Activation checkpointing: recomputes activations in the backward pass instead of keeping them.

``full``: a layer keeps only its input. ``selective``: it also keeps the outputs of matrix products and attention, which
are expensive to compute, and of collectives, which are expensive to repeat.

Reference:
    Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Final

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fanin.datacenter.parallel.draws.step import RankDraws, not_compiled
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


def keep_expensive(
    context: object, operator: torch._ops.OpOverload, *args: object, **kwargs: object
) -> CheckpointPolicy:
    """Return the policy for the outputs of an operator: keep them, or recompute them."""
    is_kept = str(operator).rpartition(".")[0].replace(".", "::") in KEPT
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def apply_recompute(layers: list[nn.Module], mode: Recompute, draws: RankDraws | None = None) -> None:
    """Make each layer recompute the activations that it does not keep. Parameter names do not change.

    Args:
        layers: the layers.
        mode: which activations are recomputed.
        draws: the random numbers of the layers, which a recomputation repeats.
    """
    if mode == "none":
        return
    for layer in layers:
        # Replaced on the instance: hooks of the layer stay outside, and no wrapper changes the parameter names.
        if draws is not None and draws.draws_in(layer):
            # It keeps the draws of its forward pass outside of tensors, which torch does not compile.
            layer.forward = not_compiled(recomputed(layer.forward, mode, draws.recomputed))
        else:
            layer.forward = recomputed(layer.forward, mode)


def recomputed(
    forward: Callable[..., object],
    mode: Recompute,
    repeated: Callable[[], Callable[[], AbstractContextManager[None]]] | None = None,
) -> Callable[..., object]:
    """Return a forward function that recomputes its activations in the backward pass.

    The result is a function of this module, because torch does not compile a layer whose forward is torch's own.

    Args:
        forward: the function.
        mode: which activations are recomputed.
        repeated: called at the start of each forward pass. It returns a function that opens the context of the
            recomputation.
    """
    if mode == "none":
        return forward
    checkpointed: Callable[..., object] = partial(checkpoint, use_reentrant=False)
    selective = partial(create_selective_checkpoint_contexts, keep_expensive)
    if repeated is not None:
        checkpointed = partial(checkpointed, context_fn=partial(_contexts, selective, mode, repeated))
    elif mode == "selective":
        checkpointed = partial(checkpointed, context_fn=selective)

    def forward_with_recomputation(*args: object, **kwargs: object) -> object:
        return checkpointed(forward, *args, **kwargs)

    return forward_with_recomputation


def _contexts(
    selective: Callable[[], tuple[AbstractContextManager[object], AbstractContextManager[object]]],
    mode: Recompute,
    repeated: Callable[[], Callable[[], AbstractContextManager[None]]],
) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Return the contexts of a forward pass and of its recomputation."""
    forward, backward = selective() if mode == "selective" else (nullcontext(), nullcontext())
    return forward, _nested(repeated(), backward)


@contextmanager
def _nested(
    repeated: Callable[[], AbstractContextManager[None]], inner: AbstractContextManager[object]
) -> Iterator[None]:
    with repeated(), inner:
        yield
