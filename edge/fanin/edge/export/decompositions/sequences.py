"""Operators of transformers in ONNX with fewer passes over their tensors than torch's own forms take.

A runtime runs one operator after the other, and each reads and writes all of its tensor; so a form is as good as it
has few operators on large tensors, and what a forward and a backward pass have in common is written alike in both,
for the runtime to compute it once. Cases that are not written here are torch's own.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch._ops import OpOverload

aten = torch.ops.aten


def table() -> dict[OpOverload, Callable[..., object]]:
    """These forms, by operator."""
    return {
        aten.gelu.default: gelu,
        aten.gelu_backward.default: gelu_backward,
        aten._softmax_backward_data.default: softmax_backward,
        aten.native_layer_norm_backward.default: layer_norm_backward,
        aten.embedding_dense_backward.default: embedding_backward,
    }


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """``aten.gelu``, whose arguments these are."""
    # NotImplemented keeps the operator as it is.
    return NotImplemented if approximate != "none" else x * _share_below(x)


def gelu_backward(dy: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """``aten.gelu_backward``, whose arguments these are: the derivative of x P(x) is P(x) + x p(x)."""
    if approximate != "none":
        return _torchs(aten.gelu_backward.default)(dy, x, approximate=approximate)
    root = x * math.sqrt(0.5)
    # x p(x) = x exp(-x^2 / 2) / sqrt(2 pi), its factors in the exponent.
    return dy * (_share_below(x) + root * torch.exp(-0.5 * math.log(math.pi) - root * root))


def _share_below(x: Tensor) -> Tensor:
    """How much of the normal distribution lies below x."""
    return (torch.erf(x * math.sqrt(0.5)) + 1.0) * 0.5


def softmax_backward(dy: Tensor, y: Tensor, dim: int, _: torch.dtype) -> Tensor:
    """``aten._softmax_backward_data``, whose arguments these are."""
    return (dy - (dy * y).sum(dim, keepdim=True)) * y


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    *rest: *tuple[Tensor, Tensor | None, Tensor | None, Sequence[bool]],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``aten.native_layer_norm_backward``, whose arguments these are."""
    spread, weight, bias, wanted = rest
    num = math.prod(shape)
    # ``spread`` is one over the deviation. (rows, num), and a number for each row (rows, 1).
    flat, seen = dy.reshape(-1, num), x.reshape(-1, num)
    per_row = spread.reshape(-1, 1)
    normed = (seen - mean.reshape(-1, 1)) * per_row
    product = flat * normed
    # Sums along a row, times the weight, are products with a column: one pass each, and nothing in between is kept.
    column = (torch.ones(num, dtype=dy.dtype) if weight is None else weight.reshape(-1)).unsqueeze(-1) / num
    scaled = flat if weight is None else flat * weight.reshape(-1)
    dx = (scaled - flat @ column - normed * (product @ column)) * per_row
    return (
        dx.reshape(x.shape) if wanted[0] else None,
        product.sum(0).reshape(weight.shape) if wanted[1] and weight is not None else None,
        flat.sum(0).reshape(bias.shape) if wanted[2] and bias is not None else None,
    )


def embedding_backward(dy: Tensor, indices: Tensor, num: int, padding: int, by_frequency: bool) -> Tensor:
    """``aten.embedding_dense_backward``, whose arguments these are."""
    if padding >= 0 or by_frequency:
        found: Tensor = _torchs(aten.embedding_dense_backward.default)(dy, indices, num, padding, by_frequency)
        return found
    # Indices are in range, or the forward pass had failed: there is nothing to leave out.
    return dy.new_zeros(num, dy.shape[-1]).index_put((indices.to(torch.int64),), dy, accumulate=True)


def _torchs(operator: OpOverload) -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = get_decompositions([operator])[operator]
    return found
