"""Frozen BatchNorm folded into a trainable convolution before it. The norm then costs nothing in a train step.

A BatchNorm in ``eval()`` is one affine map for each channel, so a convolution and the norm after it are one
convolution::

    scale * (w x + b - mean) + shift  =  (scale * w) x + (scale * (b - mean) + shift)

The norm's passes over the images, one forward and six backward, become sums over the weight. Autograd finds the
gradient of ``scale`` in the product of ``w`` with the gradient of ``scale * w``. A frozen weight is not folded: the
product with its int8 codes would be a float32 constant of the graph.

Reference:
    Ioffe and Szegedy 2015, arXiv 1502.03167, algorithm 2.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

CONVOLUTIONS: Final = (functional.conv1d, functional.conv2d, functional.conv3d)
NORM: Final = inspect.signature(functional.batch_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Convolved:
    """The result of a convolution, its version counter at that time, and the arguments of the convolution."""

    y: Tensor
    version: int
    operator: Callable[..., object]
    operands: tuple[Tensor, Tensor, Tensor | None]
    form: Sequence[object]

    def normed(self, norm: Mapping[str, object]) -> Tensor | None:
        """Return the result after a norm with these arguments; None if the norm is not frozen."""
        mean, variance, epsilon = norm["running_mean"], norm["running_var"], norm["eps"]
        if norm["training"] or not (isinstance(mean, Tensor) and isinstance(variance, Tensor)):
            return None
        assert isinstance(epsilon, float), "eps of a norm is a float"
        x, weight, bias = self.operands
        scale, offset = torch.rsqrt(variance + epsilon), -mean if bias is None else bias - mean
        if isinstance(norm["weight"], Tensor):
            scale = norm["weight"] * scale
        offset = scale * offset
        if isinstance(norm["bias"], Tensor):
            offset = offset + norm["bias"]
        # As a matrix: for four dimensions the TFLite converter confuses the layouts of the sums in the gradient.
        scaled = (scale.unsqueeze(1) * weight.flatten(1)).reshape(weight.shape)
        y = self.operator(x, scaled, offset, *self.form)
        assert isinstance(y, Tensor), "a convolution returns a tensor"
        return y


class FoldedNorms(TorchFunctionMode):
    """While active, computes a frozen BatchNorm in the convolution whose result it receives.

    The tracer drops the original convolution, unless another operator uses its result.
    """

    def __init__(self) -> None:
        super().__init__()
        # By identity. The record keeps the tensor alive, so its id cannot be reused.
        self._convolved: dict[int, _Convolved] = {}

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        named = kwargs or {}
        if func is functional.batch_norm:
            norm = NORM.bind(*args, **named)
            norm.apply_defaults()
            before = self._convolved.get(id(norm.arguments["input"]))
            # After a write in place (an addition, for example) it is no longer the result of the convolution.
            if before is not None and before.y._version == before.version:
                y = before.normed(norm.arguments)
                if y is not None:
                    return y
        result = func(*args, **named)
        if func in CONVOLUTIONS:
            self._keep(func, result, args if not named else ())
        return result

    def _keep(self, operator: Callable[..., object], y: object, arguments: Sequence[object]) -> None:
        """Remember a convolution that learns, if it is called with positional arguments as torch's layers do."""
        match arguments:
            case (Tensor() as x, Tensor() as weight, (None | Tensor()) as bias, *form) if weight.requires_grad:
                assert isinstance(y, Tensor), "a convolution returns a tensor"
                self._convolved[id(y)] = _Convolved(
                    y=y, version=y._version, operator=operator, operands=(x, weight, bias), form=form
                )
