"""Convolutions and their gradients, in the forms that ONNX runtimes compute fastest.

The gradients of a convolution are convolutions again (Dumoulin and Visin 2016, arXiv 1603.07285, section 4)::

    gradient of the input     the transposed convolution of dy with the same weight
    gradient of the weight    a convolution of x by dy, with stride and dilation exchanged, and samples as channels

The second one is slow, because its kernel is all of dy. So kind and shape choose the form. Times are milliseconds of
onnxruntime at batch size 16, for forward, gradient of the input and gradient of the weight:

    narrow depthwise    ``bands`` for all three: 0.17, 0.17 and 0.19 instead of 0.88, 0.63 and 1.63 for 64 x 25 x 5
    1x1 between those   products over the channels, in the layout that is already known: no image changes its order
    other 1x1           convolutions, and a product of dy and x for the weight
    any other           convolutions, and for the weight a product of dy with the input that each tap reads: 2.4
                        instead of 4.6 for 16 x 32 x 32 with 3 x 3 taps; 1.2 of the 2.4 gather that input
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fanin.edge.export.graph.decompositions.convolution.bands import bands_of
from fanin.edge.export.graph.decompositions.convolution.form import ConvForm, ConvolutionBackward
from fanin.edge.export.graph.decompositions.convolution.layouts import BlockLayout, Images
from fanin.edge.export.graph.decompositions.windows import window

MAX_GATHERED: Final = 1 << 22
"""Most values gathered at a time (16 MiB): nine copies of a large image would not fit into a device's memory."""


class Convolutions:
    """The forms of one trace, which share the images whose layout is known."""

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
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
    ) -> Tensor:
        """Compute ``aten.convolution`` where another form is faster; keep the operator otherwise."""
        keep: Tensor = NotImplemented
        if transposed:
            return keep
        form = ConvForm(stride=stride, padding=padding, dilation=dilation, groups=groups)
        bands = bands_of(form, x.shape, weight.shape)
        if bands is not None:
            values = _biased(bands.forward(self._images, _two_dims(x), weight), bias)
            return _as_deep(self._images.image(values, bands.output_layout), x)
        layout = self._images.layout(x) if form.keeps_places(weight.shape) else None
        return keep if layout is None else self._product(x, weight.flatten(1), bias, layout)

    def _product(self, x: Tensor, matrix: Tensor, bias: Tensor | None, layout: BlockLayout) -> Tensor:
        """Multiply the channels of an image by a matrix (O, C)."""
        values = self._images.values(x, layout)
        product = (matrix @ values.flatten(1)).reshape(-1, *values.shape[1:])
        return self._images.image(_biased(product, bias), layout)

    def _input_gradient(self, form: ConvForm, dy: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
        bands = bands_of(form, shape, weight.shape)
        if bands is not None:
            return _as_deep(bands.input_gradient(self._images, _two_dims(dy), weight), dy)
        if not form.keeps_places(weight.shape):
            return form.backward(dy, weight, shape[2:])
        layout = self._images.layout(dy)
        if layout is not None:
            return self._product(dy, weight.flatten(1).t(), None, layout)
        # 0.17 ms instead of 0.24: runtimes compute this faster than the equal transposed convolution.
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
            rows, columns = (image.transpose(0, 1).flatten(1) for image in (dy, seen))
        else:
            rows, columns = (self._images.values(image, layout).flatten(1) for image in (dy, x))
        return (rows @ columns.t()).reshape(weight.shape)

    def _bias_gradient(self, dy: Tensor) -> Tensor:
        layout = self._images.layout(dy)
        if layout is None:
            return dy.sum([0, *range(2, dy.dim())])
        return self._images.values(dy, layout).sum([1, 2])


def _gathered(form: ConvForm, x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    """Compute the gradient of the weight (O, C/g, ...): the input that each tap reads, times dy.

    Reference:
        Chellapilla et al. 2006, High performance convolutional neural networks for document processing.
    """
    # With samples last, a position of a channel is contiguous, and the taps are in the order of the weight.
    rows = x.movedim(0, -1).flatten(1, -2)
    dy_rows = dy.movedim(0, -1).reshape(form.groups, weight.shape[0] // form.groups, -1)
    places = form.places(x.shape[2:], dy.shape[2:], weight.shape[2:])
    if (places == rows.shape[1]).any():
        rows = torch.nn.functional.pad(rows, (0, 0, 0, 1))
    num = min(len(places), -(-len(places) * x.shape[1] * dy_rows.shape[2] // MAX_GATHERED))
    gradients = [_by_taps(rows, taps, dy_rows) for taps in np.array_split(places, num)]
    return (torch.cat(gradients, dim=-1) if num > 1 else gradients[0]).reshape(weight.shape)


def _by_taps(rows: Tensor, places: npt.NDArray[np.int64], dy_rows: Tensor) -> Tensor:
    """Return the gradient for some of the taps (g, O/g, C/g, taps)."""
    groups, num = dy_rows.shape[0], len(places)
    seen = rows.index_select(1, torch.from_numpy(places.reshape(-1))).reshape(groups, -1, dy_rows.shape[2])
    # For a single group use a product of two matrices: runtimes transpose its operands for free.
    gradient = (dy_rows[0] @ seen[0].t()).unsqueeze(0) if groups == 1 else dy_rows @ seen.transpose(1, 2)
    return gradient.reshape(groups, dy_rows.shape[1], -1, num)


def _biased(values: Tensor, bias: Tensor | None) -> Tensor:
    """Add one number for each channel to values (C, ..., N)."""
    return values if bias is None else values + bias.reshape(-1, 1, 1)


def _two_dims(x: Tensor) -> Tensor:
    """Return a signal as an image of one column."""
    return x if x.dim() == 4 else x.unsqueeze(-1)


def _as_deep(image: Tensor, like: Tensor) -> Tensor:
    """Return an image of one column as a signal again; a 2-D image unchanged, so that it stays known."""
    return image if like.dim() == 4 else image.squeeze(-1)
