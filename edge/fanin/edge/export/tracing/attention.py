"""Scaled dot-product attention as plain products, for graphs that are not traced through autograd.

``torch.export`` keeps it as one operator, which ONNX has for 4-D tensors only and TFLite not at all. Here it is
computed in its own terms (Vaswani et al. 2017, arXiv 1706.03762, equation 1), for any number of leading dimensions.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.export import ExportedProgram
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from fanin.edge.export.quiet import quiet_torch

fused = torch.ops.aten.scaled_dot_product_attention.default
CALL: Final = inspect.Signature(
    [
        *(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("query", "key", "value")),
        *(
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
            for name, default in (("attn_mask", None), ("dropout_p", 0.0), ("is_causal", False), ("scale", None))
        ),
        inspect.Parameter("enable_gqa", inspect.Parameter.KEYWORD_ONLY, default=False),
    ]
)
"""How torch's function is called; it is built in and cannot say so itself."""
FLOOR: Final = torch.finfo(torch.float32).min / 2
"""Added to a score it hides its place. Finite: minus infinity has no int8 form, and a row of nothing else is NaN."""


class PlainAttention(TorchFunctionMode):
    """While this is entered, attention that sees all or what came before is computed as here, backwards too.

    Its rows have each a place to look at, so it can do without the search for those that have none, which is a third
    of what torch's own form takes; attention with a mask of its own is left to that.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        _: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """What torch asks for every function that is called."""
        named = kwargs or {}
        if func is scaled_dot_product_attention:
            call = CALL.bind(*args, **named)
            call.apply_defaults()
            given = call.arguments
            if given["attn_mask"] is None and not given["dropout_p"]:
                return _attended(given)
        return func(*args, **named)


def _attended(given: Mapping[str, object]) -> Tensor:
    """Attention with these arguments, none of them a mask."""
    query, key, value, scale = given["query"], given["key"], given["value"], given["scale"]
    assert isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor), "torch has its types"
    if given["enable_gqa"]:
        key, value = _repeated(key, query), _repeated(value, query)
    factor = float(scale) if isinstance(scale, int | float) else 1.0 / math.sqrt(query.size(-1))
    mask = _causal(query, key) if given["is_causal"] else torch.zeros(())
    broadcast: Callable[..., Sequence[int]] = torch.broadcast_shapes
    many = broadcast(*(part.shape[:-2] for part in (query, key, value)))
    # (batch * heads, T, E): products of three dimensions are the runtimes' own.
    queries, keys, values = (_stacked(part, many) for part in (query, key, value))
    apply: Callable[..., Tensor] = _Attention.apply
    return apply(queries * factor, keys, values, mask).reshape(*many, query.size(-2), value.size(-1))


def _stacked(part: Tensor, many: Sequence[int]) -> Tensor:
    """(..., T, E), as many times as there are in ``many``, as (N, T, E)."""
    own = part.shape[-2:]
    return (part if part.shape[:-2] == many else part.expand(*many, *own)).reshape(-1, *own)


class _Attention(torch.autograd.Function):
    """(query, key, value) (N, T, E) and what is added to the scores: the values, each with its share, (N, T, E).

    The sum of a softmax's gradient times its values, over the places, is that of the result's times the result, over
    the features (Dao et al. 2022, arXiv 2205.14135, section 3.1 and appendix B.2), of which there are fewer.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        scores = torch.bmm(query, key.transpose(1, 2))
        shares = torch.softmax(scores + mask if mask.dim() else scores, dim=-1)
        found = torch.bmm(shares, value)
        ctx.save_for_backward(query, key, value, shares, found)
        return found

    @staticmethod
    def backward(ctx: torch.autograd.function.BackwardCFunction, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved: Sequence[Tensor] = ctx.saved_tensors
        query, key, value, shares, found = saved
        less = (dy * found).sum(-1, keepdim=True)
        towards = (torch.bmm(dy, value.transpose(1, 2)) - less) * shares
        return (
            torch.bmm(towards, key),
            torch.bmm(towards.transpose(1, 2), query),
            torch.bmm(shares.transpose(1, 2), dy),
            None,
        )


def with_plain_attention(program: ExportedProgram) -> ExportedProgram:
    """The program with its attention, if it has any, as products and a softmax."""
    if all(node.target is not fused for node in program.graph.nodes):
        return program
    with quiet_torch():
        plain: ExportedProgram = program.run_decompositions({fused: plain_attention})
    return plain


def plain_attention(query: Tensor, key: Tensor, value: Tensor, *rest: object, **options: object) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` (..., T, E), whose arguments these are."""
    given = dict(zip(("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"), rest, strict=False)) | options
    if given.get("enable_gqa"):
        key, value = _repeated(key, query), _repeated(value, query)
    scale = given.get("scale")
    factor = float(scale) if isinstance(scale, int | float) else 1.0 / math.sqrt(query.size(-1))
    scores = (query * factor) @ key.transpose(-2, -1)
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        scores = scores + _causal(query, key)
    elif isinstance(mask, Tensor):
        scores = scores + (torch.where(mask, 0.0, FLOOR) if mask.dtype == torch.bool else mask.clamp(min=FLOOR))
    found: Tensor = torch.softmax(scores, dim=-1) @ value
    return found


def _causal(query: Tensor, key: Tensor) -> Tensor:
    """What is added to scores (T, T of the keys) so that none looks at what comes after it."""
    return torch.where(torch.ones(query.size(-2), key.size(-2), dtype=torch.bool).tril(), 0.0, FLOOR)


def _repeated(shared: Tensor, query: Tensor) -> Tensor:
    """Keys or values with as many heads as the queries have."""
    return shared.repeat_interleave(query.size(-3) // shared.size(-3), -3)
