"""Frozen BatchNorm taken into the convolution before it, where that learns: in a train step the norm costs nothing.

A BatchNorm in ``eval()`` is one affine map for each channel (Ioffe and Szegedy 2015, arXiv 1502.03167, algorithm 2),
so that a convolution and the norm after it are one convolution::

    scale * (w x + b - mean) + shift  =  (scale * w) x + (scale * (b - mean) + shift)

The norm's passes over the images, one forward and six back, become sums over the weight: autograd finds the gradient
towards ``scale`` in the product of ``w`` with the gradient of ``scale * w``. A frozen weight is left as it is: what is
computed from its int8 codes is float32, and is not to stand in a graph.
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
    """A convolution's result, how often that had been written to, and what it was made of."""

    y: Tensor
    version: int
    operator: Callable[..., object]
    operands: tuple[Tensor, Tensor, Tensor | None]
    form: Sequence[object]

    def normed(self, norm: Mapping[str, object]) -> Tensor | None:
        """The result after a norm with these arguments; None if that is not frozen."""
        mean, variance, epsilon = norm["running_mean"], norm["running_var"], norm["eps"]
        if norm["training"] or not (isinstance(mean, Tensor) and isinstance(variance, Tensor)):
            return None
        assert isinstance(epsilon, float), "that is what a norm has"
        x, weight, bias = self.operands
        scale, offset = torch.rsqrt(variance + epsilon), -mean if bias is None else bias - mean
        if isinstance(norm["weight"], Tensor):
            scale = norm["weight"] * scale
        offset = scale * offset
        if isinstance(norm["bias"], Tensor):
            offset = offset + norm["bias"]
        # As a matrix: of four dimensions, the TFLite converter mixes up the layouts of the sums on the way back.
        scaled = (scale.unsqueeze(1) * weight.flatten(1)).reshape(weight.shape)
        found = self.operator(x, scaled, offset, *self.form)
        assert isinstance(found, Tensor), "that is what convolutions give"
        return found


class FoldedNorms(TorchFunctionMode):
    """While it is entered, a frozen BatchNorm is computed by the convolution whose result it is given.

    That result is then computed for nobody, and the tracer drops it, unless something else takes it as well.
    """

    def __init__(self) -> None:
        super().__init__()
        # By identity, and held: when a tensor is gone, its id is another's.
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
            # Written to since, by an addition in place for one, it is another convolution's no more.
            if before is not None and before.y._version == before.version:
                found = before.normed(norm.arguments)
                if found is not None:
                    return found
        y = func(*args, **named)
        if func in CONVOLUTIONS:
            self._keep(func, y, args if not named else ())
        return y

    def _keep(self, operator: Callable[..., object], y: object, given: Sequence[object]) -> None:
        """Remember a convolution that learns, called as torch's layers call it."""
        match given:
            case (Tensor() as x, Tensor() as weight, (None | Tensor()) as bias, *form) if weight.requires_grad:
                assert isinstance(y, Tensor), "that is what convolutions give"
                self._convolved[id(y)] = _Convolved(
                    y=y, version=y._version, operator=operator, operands=(x, weight, bias), form=form
                )
