"""The gradient of weight normalization, which torch decomposes in the forward direction alone.

A weight is ``w = g v / |v|``, with one norm for each index of one dimension (Salimans and Kingma 2016,
arXiv 1602.07868, equation 2). Equation 3 gives both gradients::

    dg = sum(dw v) / |v|,        dv = g / |v| (dw - dg v / |v|)
"""

from torch import Tensor


def weight_norm_backward(
    grad_w: Tensor, saved_v: Tensor, saved_g: Tensor, saved_norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """Compute ``aten._weight_norm_interface_backward``: the gradients of v and g.

    Args:
        grad_w: Gradient of the weight, of any shape.
        saved_v: Direction, in the shape of the weight.
        saved_g: Lengths: the shape of the weight with 1 for each dimension but ``dim``.
        saved_norms: The norms of v, in the shape of g.
        dim: The dimension that has one norm for each index: the first or the last.
    """
    others = [each for each in range(saved_v.dim()) if each != dim % saved_v.dim()]
    product = grad_w * saved_v
    # torch takes a sum over no dimension as one over all.
    grad_g = (product.sum(others, keepdim=True) if others else product) / saved_norms
    return saved_g / saved_norms * (grad_w - grad_g / saved_norms * saved_v), grad_g
