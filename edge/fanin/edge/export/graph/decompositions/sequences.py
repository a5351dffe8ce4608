"""Operators of transformers in ONNX, with fewer passes over their tensors than torch's own decompositions.

A runtime executes one operator after the other, and each reads and writes a full tensor. A form is therefore as fast as
it has few operators on large tensors. The forward and the backward form of an operator share the same subexpressions,
so that the runtime computes these once. All cases that are not listed here use torch's decomposition.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch._ops import OpOverload

aten = torch.ops.aten


def table() -> dict[OpOverload, Callable[..., object]]:
    """Return the form of each of these operators."""
    return {
        aten.gelu.default: gelu,
        aten.gelu_backward.default: gelu_backward,
        aten._softmax_backward_data.default: softmax_backward,
        aten.native_layer_norm_backward.default: layer_norm_backward,
        aten.embedding_dense_backward.default: embedding_backward,
    }


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """Compute the exact ``aten.gelu``; keep the operator for an approximation."""
    return NotImplemented if approximate != "none" else x * _share_below(x)


def gelu_backward(dy: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """Compute ``aten.gelu_backward``: the derivative of x P(x) is P(x) + x p(x)."""
    if approximate != "none":
        return _core_form(aten.gelu_backward.default)(dy, x, approximate=approximate)
    root = x * math.sqrt(0.5)
    # x p(x) = x exp(-x^2 / 2) / sqrt(2 pi), its factors in the exponent.
    return dy * (_share_below(x) + root * torch.exp(-0.5 * math.log(math.pi) - root * root))


def _share_below(x: Tensor) -> Tensor:
    """Return P(x), the probability that a standard normal variable is below x."""
    return (torch.erf(x * math.sqrt(0.5)) + 1.0) * 0.5


def softmax_backward(dy: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """Compute ``aten._softmax_backward_data``."""
    return (dy - (dy * y).sum(dim, keepdim=True)) * y


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute ``aten.native_layer_norm_backward``: the gradients of x, weight and bias."""
    needs_x, needs_weight, needs_bias = output_mask
    num = math.prod(normalized_shape)
    # (rows, num), and one number for each row (rows, 1).
    flat, seen = dy.reshape(-1, num), x.reshape(-1, num)
    per_row = rstd.reshape(-1, 1)
    normed = (seen - mean.reshape(-1, 1)) * per_row
    product = flat * normed
    # Sums along a row, times the weight, are products with a column: one pass each, without intermediate tensors.
    column = (torch.ones(num, dtype=dy.dtype) if weight is None else weight.reshape(-1)).unsqueeze(-1) / num
    scaled = flat if weight is None else flat * weight.reshape(-1)
    dx = (scaled - flat @ column - normed * (product @ column)) * per_row
    return (
        dx.reshape(x.shape) if needs_x else None,
        product.sum(0).reshape(weight.shape) if needs_weight and weight is not None else None,
        flat.sum(0).reshape(bias.shape) if needs_bias and bias is not None else None,
    )


def embedding_backward(
    dy: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    """Compute ``aten.embedding_dense_backward``."""
    if padding_idx >= 0 or scale_grad_by_freq:
        core = _core_form(aten.embedding_dense_backward.default)
        return core(dy, indices, num_weights, padding_idx, scale_grad_by_freq)
    # The indices are in range, otherwise the forward pass would have failed: none is left out.
    return dy.new_zeros(num_weights, dy.shape[-1]).index_put((indices.to(torch.int64),), dy, accumulate=True)


def _core_form(operator: OpOverload) -> Callable[..., Tensor]:
    """Return torch's own decomposition of an operator."""
    form: Callable[..., Tensor] = get_decompositions([operator])[operator]
    return form
