"""``PlainFunctions``, under which the functions of this room are computed by plain operators."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import signature
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fanin.edge.export.module.plain import alignments, arithmetic, contractions, embeddings, images


def written(form: Callable[..., object]) -> Callable[..., object]:
    """Return the form of a function in place: the result of a form, written into its input."""

    @wraps(form)
    def into(x: Tensor, *args: object, **kwargs: object) -> object:
        # The gradient needs the values of before.
        result = form(x.clone(), *args, **kwargs)
        return x.copy_(result) if isinstance(result, Tensor) else NotImplemented

    return into


FORMS: Final[Mapping[Callable[..., object], Callable[..., object]]] = MappingProxyType(
    {
        F.embedding_bag: embeddings.bag_of_embeddings,
        F.one_hot: embeddings.encoded,
        torch.prod: arithmetic.product,
        Tensor.prod: arithmetic.product,
        torch.cumprod: arithmetic.running_product,
        Tensor.cumprod: arithmetic.running_product,
        Tensor.cumprod_: written(arithmetic.running_product),
        torch.erfc: arithmetic.erfc,
        Tensor.erfc: arithmetic.erfc,
        torch.erfc_: written(arithmetic.erfc),
        Tensor.erfc_: written(arithmetic.erfc),
        torch.special.erfc: arithmetic.erfc,
        torch.matrix_exp: arithmetic.matrix_exp,
        torch.linalg.matrix_exp: arithmetic.matrix_exp,
        Tensor.matrix_exp: arithmetic.matrix_exp,
        torch.cdist: arithmetic.distances,
        torch.bilinear: arithmetic.bilinear,
        torch.einsum: contractions.contraction,
        F.ctc_loss: alignments.ctc_loss,
        F.softshrink: arithmetic.softshrink,
        torch.hardshrink: arithmetic.hardshrink,
        F.pad: images.circular_pad,
        F.unfold: images.patches,
        F.fold: images.summed_patches,
        F.avg_pool3d: images.avg_pool3d,
        F.max_pool3d: images.max_pool3d,
        F.adaptive_avg_pool1d: images.adaptive_avg_pool1d,
        F.adaptive_avg_pool2d: images.adaptive_avg_pool2d,
        F.adaptive_avg_pool3d: images.adaptive_avg_pool3d,
        F.local_response_norm: images.local_response_norm,
        F.grid_sample: images.grid_sample,
    }
)
"""The plain form of each function."""


class PlainFunctions(TorchFunctionMode):
    """While active, the functions of ``FORMS`` are computed by plain operators where they can be."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        _: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Intercept calls of the functions."""
        named = dict(kwargs or {})
        form = FORMS.get(func)
        if form is not None:
            first = [named["input"]] if "input" in named else []
            try:
                call = signature(form).bind(*first, *args, **{key: named[key] for key in named if key != "input"})
            except TypeError:  # arguments that the form does not have, such as `out`
                return func(*args, **named)
            result = form(*call.args, **call.kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **named)
