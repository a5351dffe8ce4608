"""Bags of embeddings, and ``one_hot``.

- A bag of inputs (B, T) is a lookup and a sum, a mean or a maximum over T. torch's kernel has no gradient in a graph.
  The plain form needs memory for B x T rows, as any other model of tokens does.
- ``one_hot`` with a number of classes is a comparison. torch's own form reads the classes to check them.
"""

import inspect
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import embedding, embedding_bag

CALL: Final = inspect.signature(embedding_bag)


def bag_of_embeddings(*args: object, **named: object) -> object:
    """Compute ``embedding_bag`` without offsets, limited norm, gradients by frequency, or a maximum with padding."""
    call = CALL.bind(*args, **named)
    call.apply_defaults()
    return _reduced(call.arguments) if _has_plain_form(call.arguments) else NotImplemented


def encoded(tensor: Tensor, num_classes: int = -1) -> object:
    """Compute ``one_hot`` with a number of classes: 1 at the class and 0 elsewhere (..., num_classes)."""
    if num_classes < 1:
        return NotImplemented
    classes = torch.arange(num_classes, dtype=tensor.dtype, device=tensor.device)
    return (tensor.unsqueeze(-1) == classes).to(torch.int64)


def _has_plain_form(arguments: Mapping[str, object]) -> bool:
    words = arguments["input"]
    return (
        isinstance(words, Tensor)
        and words.dim() == 2
        and arguments["max_norm"] is None
        and not arguments["scale_grad_by_freq"]
        and (arguments["mode"] != "max" or arguments["padding_idx"] is None)
    )


def _reduced(arguments: Mapping[str, object]) -> Tensor:
    """Return the bags (B, width) of words (B, T)."""
    words, weight, factors, padding = (
        arguments[name] for name in ("input", "weight", "per_sample_weights", "padding_idx")
    )
    assert isinstance(words, Tensor) and isinstance(weight, Tensor), "torch checks the types"
    rows = embedding(words, weight)
    if arguments["mode"] == "max":
        # A word that occurs twice has half of the gradient at each position. Both halves are of the same row.
        return rows.amax(dim=1)
    visible = (words != padding % len(weight)).to(rows.dtype) if isinstance(padding, int) else None
    shares = factors if isinstance(factors, Tensor) else None
    if visible is not None:
        shares = visible if shares is None else shares * visible
    total = rows.sum(dim=1) if shares is None else (rows * shares.unsqueeze(-1)).sum(dim=1)
    if arguments["mode"] == "sum":
        return total
    num = words.shape[1] if visible is None else visible.sum(dim=1, keepdim=True).clamp(min=1.0)
    return total / num
