"""Bags of embeddings as lookups and a reduction: torch's kernel has no gradient in a graph.

``nn.EmbeddingBag`` with inputs (B, T) is an ``Embedding`` and a sum, a mean or a maximum over T. The plain form needs
memory for B x T rows. A device looks up as many for any other model of tokens.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from torch import Tensor
from torch.nn.functional import embedding, embedding_bag
from torch.overrides import TorchFunctionMode

CALL: Final = inspect.signature(embedding_bag)


class PlainBags(TorchFunctionMode):
    """While active, bags of one length are looked up and reduced by plain operators.

    Bags with offsets, a norm that is limited, gradients by frequency, or a maximum with padding are left to torch.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        _: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Intercept calls of torch's function."""
        named = kwargs or {}
        if func is embedding_bag:
            call = CALL.bind(*args, **named)
            call.apply_defaults()
            if _has_plain_form(call.arguments):
                return _reduced(call.arguments)
        return func(*args, **named)


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
        # Of words that are there twice, each has half of the gradient, and both are the same row.
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
