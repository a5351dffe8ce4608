"""Convolutions and their gradients, as ONNX runtimes compute them best.

The gradients of a convolution are convolutions again (Dumoulin and Visin 2016, arXiv 1603.07285, section 4)::

    towards its input    the transposed convolution of dy with the same weight
    towards its weight   a convolution of x by dy, with stride and dilation exchanged, and samples as channels

The second is slow, as its kernel is all of dy. So the form is chosen by kind and shape; milliseconds of onnxruntime,
forward / towards x / towards weight, batch 16:

    depthwise, narrow   ``bands``, all three: 64 x 25 x 5 takes .88 / .63 / 1.63 as convolutions, .17 / .17 / .19 so
    1x1 beside those    products over the channels, of images as they are known: nothing is laid out anew between them
    other 1x1           convolutions, and a product of dy and x
    any other           convolutions, and a product of dy with all that the kernel sees: 16 x 32 x 32 with 3 x 3 taps
                        takes 2.4 so, 1.2 of them to gather it, and 4.6 as a convolution by dy
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fanin.edge.export.decompositions.bands import bands_of
from fanin.edge.export.decompositions.forms import ConvForm, ConvolutionBackward
from fanin.edge.export.decompositions.layouts import Images, Layout
from fanin.edge.export.decompositions.windows import window

MAX_GATHERED: Final = 1 << 22
"""Values that are gathered at a time, 16 MiB: a device's memory would hold no nine copies of a large image."""


class Convolutions:
    """The forms of one trace, which knows images by the values that they were made from."""

    def __init__(self, images: Images) -> None:
        self._images = images
        self.backward = ConvolutionBackward(
            towards_input=self._input_gradient,
            towards_weight=self._weight_gradient,
            towards_bias=self._bias_gradient,
        )

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *rest: *tuple[Sequence[int], Sequence[int], Sequence[int], bool, Sequence[int], int],
    ) -> Tensor:
        """``aten.convolution``, whose arguments these are, where another form is better."""
        stride, padding, dilation, transposed, _, groups = rest
        kept: Tensor = NotImplemented  # torch's word for: leave the operator as it is
        if transposed:
            return kept
        form = ConvForm(stride=stride, padding=padding, dilation=dilation, groups=groups)
        bands = bands_of(form, x.shape, weight.shape)
        if bands is not None:
            made = _biased(bands.forward(self._images, _two_dims(x), weight), bias)
            return _as_deep(self._images.image(made, bands.made), x)
        layout = self._images.layout(x) if form.keeps_places(weight.shape) else None
        return kept if layout is None else self._product(x, weight.flatten(1), bias, layout)

    def _product(self, x: Tensor, matrix: Tensor, bias: Tensor | None, layout: Layout) -> Tensor:
        """A product with a matrix (O, C) over the channels."""
        values = self._images.values(x, layout)
        made = (matrix @ values.flatten(1)).reshape(-1, *values.shape[1:])
        return self._images.image(_biased(made, bias), layout)

    def _input_gradient(self, form: ConvForm, dy: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
        bands = bands_of(form, shape, weight.shape)
        if bands is not None:
            return _as_deep(bands.input_gradient(self._images, _two_dims(dy), weight), dy)
        if not form.keeps_places(weight.shape):
            return form.backward(dy, weight, shape[2:])
        layout = self._images.layout(dy)
        if layout is not None:
            return self._product(dy, weight.flatten(1).t(), None, layout)
        # .24 to .17 ms: runtimes are faster at this than at the transposed convolution that it is.
        return replace(form, dilation=form.stride).forward(dy, weight.transpose(0, 1))

    def _weight_gradient(self, form: ConvForm, x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
        bands = bands_of(form, x.shape, weight.shape)
        if bands is not None:
            return bands.weight_gradient(self._images, _two_dims(x), _two_dims(dy)).reshape(weight.shape)
        if not form.is_pointwise(weight.shape):
            return _gathered(form, x, dy, weight)
        layout = self._images.layout(dy, x) if form.keeps_places(weight.shape) else None
        if layout is None:
            seen = window(x, [0] * len(form.stride), form.stride, dy.shape[2:])
            made, given = (image.transpose(0, 1).flatten(1) for image in (dy, seen))
        else:
            made, given = (self._images.values(image, layout).flatten(1) for image in (dy, x))
        return (made @ given.t()).reshape(weight.shape)

    def _bias_gradient(self, dy: Tensor) -> Tensor:
        layout = self._images.layout(dy)
        if layout is None:
            return dy.sum([0, *range(2, dy.dim())])
        return self._images.values(dy, layout).sum([1, 2])


def _gathered(form: ConvForm, x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    """The gradient towards the weight (O, C/g, ...): what each tap sees (Chellapilla et al. 2006), times dy."""
    # With samples last a place of a channel is one piece of memory, and the taps come out in the weight's order.
    rows = x.movedim(0, -1).flatten(1, -2)
    made = dy.movedim(0, -1).reshape(form.groups, weight.shape[0] // form.groups, -1)
    places = form.places(x.shape[2:], dy.shape[2:], weight.shape[2:])
    if (places == rows.shape[1]).any():
        rows = torch.nn.functional.pad(rows, (0, 0, 0, 1))
    num = min(len(places), -(-len(places) * x.shape[1] * made.shape[2] // MAX_GATHERED))
    found = [_by_taps(rows, taps, made) for taps in np.array_split(places, num)]
    return (torch.cat(found, dim=-1) if num > 1 else found[0]).reshape(weight.shape)


def _by_taps(rows: Tensor, places: npt.NDArray[np.int64], made: Tensor) -> Tensor:
    """(g, O/g, C/g, taps), for some of the taps."""
    groups, num = made.shape[0], len(places)
    seen = rows.index_select(1, torch.from_numpy(places.reshape(-1))).reshape(groups, -1, made.shape[2])
    # A product of matrices, where there are no more, is what runtimes turn over for nothing.
    found = (made[0] @ seen[0].t()).unsqueeze(0) if groups == 1 else made @ seen.transpose(1, 2)
    return found.reshape(groups, made.shape[1], -1, num)


def _biased(values: Tensor, bias: Tensor | None) -> Tensor:
    """Values (C, ..., N) with a number added for each channel."""
    return values if bias is None else values + bias.reshape(-1, 1, 1)


def _two_dims(x: Tensor) -> Tensor:
    """A signal as an image of one column."""
    return x if x.dim() == 4 else x.unsqueeze(-1)


def _as_deep(image: Tensor, like: Tensor) -> Tensor:
    """An image as the signal that it was made for, or as itself, which is known."""
    return image if like.dim() == 4 else image.squeeze(-1)
