"""The gradient of weight normalization, which torch decomposes in the forward direction alone.

A weight is ``w = g v / |v|``, with one norm for each index of one dimension (Salimans and Kingma 2016,
arXiv 1602.07868, equation 2). Equation 3 gives both gradients::

    dg = sum(dw v) / |v|,        dv = g / |v| (dw - dg v / |v|)
"""

from torch import Tensor


def weight_norm_backward(dw: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Compute ``aten._weight_norm_interface_backward``: the gradients of v and g.

    Args:
        dw: Gradient of the weight, of any shape.
        v: Direction, in the shape of the weight.
        g: Lengths: the shape of the weight with 1 for each dimension but ``dim``.
        norms: The norms of v, in the shape of ``g``.
        dim: The dimension that has one norm for each index: the first or the last.
    """
    others = [each for each in range(v.dim()) if each != dim % v.dim()]
    # torch takes a sum over no dimension as one over all.
    dg = ((dw * v).sum(others, keepdim=True) if others else dw * v) / norms
    return g / norms * (dw - dg / norms * v), dg
