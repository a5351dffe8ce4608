"""Scaled dot-product attention as matrix products and a softmax.

``torch.export`` keeps attention as one operator. ONNX has that operator for 4-D tensors only, and TFLite lacks it. Here
it is computed from its definition for any number of leading dimensions. ``PlainAttention`` is used while a step is
traced through autograd, ``with_plain_attention`` in a program that was traced without autograd.

Reference:
    Vaswani et al. 2017, arXiv 1706.03762, equation 1.
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
"""The signature of torch's function, which is built in and cannot be inspected."""
FLOOR: Final = torch.finfo(torch.float32).min / 2
"""Added to a score to hide its position. It is finite: minus infinity has no int8 form, and a row of it is NaN."""


class PlainAttention(TorchFunctionMode):
    """Replaces full and causal attention by ``_Attention``, forward and backward, while it is active.

    Each of its rows has at least one visible position. So it omits torch's search for rows without one, which takes a
    third of the time of torch's own form. Attention with a mask argument is left to torch.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        _: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Intercept calls of torch's attention function."""
        named = kwargs or {}
        if func is scaled_dot_product_attention:
            call = CALL.bind(*args, **named)
            call.apply_defaults()
            arguments = call.arguments
            if arguments["attn_mask"] is None and not arguments["dropout_p"]:
                return _attended(arguments)
        return func(*args, **named)


def _attended(arguments: Mapping[str, object]) -> Tensor:
    """Compute attention with these arguments, which have no mask."""
    query, key, value, scale = (arguments[name] for name in ("query", "key", "value", "scale"))
    assert isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor), "torch checks the types"
    if arguments["enable_gqa"]:
        key, value = _repeated(key, query), _repeated(value, query)
    factor = float(scale) if isinstance(scale, int | float) else 1.0 / math.sqrt(query.size(-1))
    mask = _causal(query, key) if arguments["is_causal"] else torch.zeros(())
    broadcast: Callable[..., Sequence[int]] = torch.broadcast_shapes
    batch = broadcast(*(part.shape[:-2] for part in (query, key, value)))
    # (batch * heads, T, E): runtimes have kernels for products of three dimensions.
    queries, keys, values = (_stacked(part, batch) for part in (query, key, value))
    apply: Callable[..., Tensor] = _Attention.apply
    return apply(queries * factor, keys, values, mask).reshape(*batch, query.size(-2), value.size(-1))


def _stacked(part: Tensor, batch: Sequence[int]) -> Tensor:
    """Expand (..., T, E) to the leading dimensions ``batch`` and flatten them: (N, T, E)."""
    own = part.shape[-2:]
    return (part if part.shape[:-2] == batch else part.expand(*batch, *own)).reshape(-1, *own)


class _Attention(torch.autograd.Function):
    """Attention of query, key and value (N, T, E) with a mask that is added to the scores; the result is (N, T, E).

    The gradient of a softmax needs the sum over positions of the gradient times the shares. It equals the sum over
    features of dy times the result, which has fewer terms.

    Reference:
        Dao et al. 2022, arXiv 2205.14135, section 3.1 and appendix B.2.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        scores = torch.bmm(query, key.transpose(1, 2))
        shares = torch.softmax(scores + mask if mask.dim() else scores, dim=-1)
        result = torch.bmm(shares, value)
        ctx.save_for_backward(query, key, value, shares, result)
        return result

    @staticmethod
    def backward(ctx: torch.autograd.function.BackwardCFunction, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved: Sequence[Tensor] = ctx.saved_tensors
        query, key, value, shares, result = saved
        mean = (dy * result).sum(-1, keepdim=True)
        d_scores = (torch.bmm(dy, value.transpose(1, 2)) - mean) * shares
        return (
            torch.bmm(d_scores, key),
            torch.bmm(d_scores.transpose(1, 2), query),
            torch.bmm(shares.transpose(1, 2), dy),
            None,
        )


def with_plain_attention(program: ExportedProgram) -> ExportedProgram:
    """Return the program with its attention, if any, as products and a softmax."""
    if all(node.target is not fused for node in program.graph.nodes):
        return program
    with quiet_torch():
        plain: ExportedProgram = program.run_decompositions({fused: plain_attention})
    return plain


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute ``aten.scaled_dot_product_attention`` (..., T, E) without dropout; the arguments are the operator's."""
    if enable_gqa:
        key, value = _repeated(key, query), _repeated(value, query)
    factor = 1.0 / math.sqrt(query.size(-1)) if scale is None else float(scale)
    scores = (query * factor) @ key.transpose(-2, -1)
    if is_causal:
        scores = scores + _causal(query, key)
    elif attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        scores = scores + (torch.where(attn_mask, 0.0, FLOOR) if is_bool else attn_mask.clamp(min=FLOOR))
    attended: Tensor = torch.softmax(scores, dim=-1) @ value
    return attended


def _causal(query: Tensor, key: Tensor) -> Tensor:
    """Return the causal mask (T, T of the keys), to be added to the scores."""
    return torch.where(torch.ones(query.size(-2), key.size(-2), dtype=torch.bool).tril(), 0.0, FLOOR)


def _repeated(shared: Tensor, query: Tensor) -> Tensor:
    """Repeat keys or values until they have as many heads as the queries."""
    return shared.repeat_interleave(query.size(-3) // shared.size(-3), -3)
