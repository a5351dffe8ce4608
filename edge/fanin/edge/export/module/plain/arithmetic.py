"""Products, exponentials of matrices, distances, bilinear forms and shrinkage."""

from typing import Final

import torch
from torch import Tensor


def product(x: Tensor, dim: object = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> object:
    """Compute ``torch.prod`` of floating-point values as a tree of products of halves."""
    if not (dim is None or isinstance(dim, int)) or not x.is_floating_point() or not x.numel() or dtype is not None:
        return NotImplemented
    if dim is not None and not x.dim():
        return NotImplemented
    if dim is None:
        dim, x = 0, x.flatten()
    while (num := x.shape[dim]) > 1:
        half = num // 2
        pairs = x.narrow(dim, 0, half) * x.narrow(dim, half, half)
        x = torch.cat([pairs, x.narrow(dim, num - 1, 1)], dim) if num % 2 else pairs
    return x if keepdim else x.squeeze(dim)


def running_product(x: Tensor, dim: object, *, dtype: torch.dtype | None = None) -> object:
    """Compute ``torch.cumprod``: each pass multiplies by the products that end 1, 2, 4, ... positions before."""
    if not isinstance(dim, int) or not x.is_floating_point() or not x.dim() or dtype is not None:
        return NotImplemented
    num, step = x.shape[dim], 1
    while step < num:
        longer = x.narrow(dim, step, num - step) * x.narrow(dim, 0, num - step)
        x = torch.cat([x.narrow(dim, 0, step), longer], dim)
        step *= 2
    return x


def erfc(x: Tensor) -> Tensor:
    """Compute ``torch.erfc`` as ``1 - erf(x)``, which is exact to a rounding of 1."""
    return 1.0 - torch.erf(x)


SQUARINGS: Final = 6
"""The series is one of a matrix divided by 2^6: its norm is below 1 for a norm of the matrix below 64."""
NUM_TERMS: Final = 12


def matrix_exp(x: Tensor) -> Tensor:
    """Compute ``torch.matrix_exp`` by scaling and squaring, for matrices of a norm below 64.

    Reference:
        Moler and Van Loan 2003, Nineteen dubious ways to compute the exponential of a matrix, section 3.
    """
    scaled, identity = x * 2.0**-SQUARINGS, torch.eye(x.shape[-1], dtype=x.dtype)
    result = identity.expand(x.shape)
    for number in range(NUM_TERMS, 0, -1):
        result = identity + scaled @ result / number
    for _ in range(SQUARINGS):
        result = result @ result
    return result


def distances(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> object:
    """Compute ``torch.cdist`` for p of 1 and 2; (..., P, M) and (..., R, M) to (..., P, R).

    It needs memory for all differences (..., P, R, M). As in torch, the gradient of a distance of 0 is 0.
    """
    if p not in (1.0, 2.0):
        return NotImplemented
    apart = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    if p == 1.0:
        return apart.abs().sum(-1)
    squares = (apart * apart).sum(-1)
    same = squares == 0.0
    return torch.where(same, 0.0, torch.where(same, 1.0, squares).sqrt())


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``torch.bilinear``: (..., I), (..., J) and (O, I, J) to (..., O)."""
    num_outputs, num_first, num_second = weight.shape
    mixed = input1 @ weight.permute(1, 0, 2).reshape(num_first, -1)
    result = (mixed.reshape(*input1.shape[:-1], num_outputs, num_second) * input2.unsqueeze(-2)).sum(-1)
    return result if bias is None else result + bias


def softshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    """Compute ``softshrink``: ``x`` without its part between the bounds."""
    return x - x.clamp(-lambd, lambd)


def hardshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    """Compute ``hardshrink``: 0 between the bounds."""
    return torch.where((x >= -lambd) & (x <= lambd), 0.0, x)
