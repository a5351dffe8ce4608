"""A depthwise convolution of narrow images as one banded matrix product for each channel.

Runtimes compute a depthwise convolution image by image and channel by channel. For an image of a hundred positions that
overhead exceeds the arithmetic. Here one product computes ``num_rows`` rows of the result. Its left matrix is banded:
the taps of the kernel are on its diagonals. It is a block of the Toeplitz matrix of Dumoulin and Visin 2016, arXiv
1603.07285, section 4.1::

    (num_rows * width out, rows that a block reads * width)  @  (rows that a block reads * width, blocks * samples)

A block reads its own ``step`` rows, ``before`` rows of the previous block and ``after`` rows of the next one. These are
complete rows of the right matrix, shifted by one block (``layouts``). The zeros of the left matrix are multiplied, too.
For 25 x 5 images with 3 x 3 taps that is four times as many products, in a fifth of the time. The gradient of the input
is such a product, too. The gradient of the weight is read from the same diagonals.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from fanin.edge.export.graph.decompositions.convolution.form import ConvForm
from fanin.edge.export.graph.decompositions.convolution.layouts import BlockLayout, Images

MAX_WIDTH: Final = 24
"""Values of a block that one product computes. More rows mean more zeros; fewer rows mean more block edges."""
MAX_BANDED_WIDTH: Final = 12
"""Width of the widest image with this form: the zeros in its matrix grow with the width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One spatial dimension of a convolution: ``size`` input positions and ``out`` output positions."""

    size: int
    out: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    def hits(self, inputs: npt.NDArray[np.int64], outputs: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which tap reads which input for which output (taps, inputs, outputs)."""
        taps = np.arange(self.kernel)[:, None, None] * self.dilation - self.padding
        reads: npt.NDArray[np.bool_] = inputs[None, :, None] == outputs[None, None, :] * self.stride + taps
        return reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Images in blocks of ``step`` rows. A block reads ``before`` rows above and ``after`` rows below its own.

    Each block yields ``num_rows`` rows of the result.
    """

    num: int
    step: int
    before: int
    after: int
    num_rows: int

    @property
    def fits(self) -> bool:
        """Whether a block reads from its direct neighbours only."""
        return 0 <= self.before <= self.step and -self.step < self.after <= self.step

    @property
    def reads(self) -> npt.NDArray[np.int64]:
        """The rows that a block reads, relative to its own first row."""
        return np.arange(-self.before, self.step + self.after)

    def layout(self, size: tuple[int, int]) -> BlockLayout:
        """Return the layout of images of this size. It may have more blocks than are read."""
        return BlockLayout(size=size, num=max(self.num, -(-size[0] // self.step)), step=self.step)

    def read(self, own: Tensor, layout: BlockLayout) -> Tensor:
        """Return the input of each block (C, len(reads) * width, num * N), from values in ``layout``."""
        size, width = own.shape[1], layout.size[1]
        samples = own.shape[2] // layout.num
        num, more = self.num * samples, (layout.num - self.num) * samples
        pieces = []
        # A negative pad crops. With the same padding at the other end it shifts the blocks by one.
        if self.before:
            pieces.append(pad(own, (samples, -samples - more, self.before * width - size, 0)))
        pieces.append(own if not more and self.after >= 0 else own[:, : size + min(0, self.after) * width, :num])
        if self.after > 0:
            pieces.append(pad(own, (-samples, samples - more, 0, self.after * width - size)))
        return torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bands:
    """A depthwise convolution of 2-D images in banded form."""

    height: Side
    width: Side

    @property
    def fits(self) -> bool:
        """Whether the convolution and its gradient both have the banded form."""
        return self._forward.fits and self._backward.fits

    def forward(self, images: Images, x: Tensor, weight: Tensor) -> Tensor:
        """Convolve ``x`` (N, C, height, width) with ``weight`` (C, 1, taps, taps); values in ``output_layout``."""
        layout = self._forward.layout((self.height.size, self.width.size))
        return _banded(weight, self._forward_taps()) @ self._forward.read(images.values(x, layout), layout)

    @property
    def output_layout(self) -> BlockLayout:
        """The layout of the values that ``forward`` returns."""
        blocks = self._forward
        return BlockLayout(size=(self.height.out, self.width.out), num=blocks.num, step=blocks.num_rows)

    def input_gradient(self, images: Images, dy: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of ``x`` for ``dy`` (N, C, height out, width out)."""
        blocks = self._backward
        layout = blocks.layout((self.height.out, self.width.out))
        values = _banded(weight, self._backward_taps()) @ blocks.read(images.values(dy, layout), layout)
        return images.image(
            values, BlockLayout(size=(self.height.size, self.width.size), num=blocks.num, step=blocks.num_rows)
        )

    def weight_gradient(self, images: Images, x: Tensor, dy: Tensor) -> Tensor:
        """Return the gradient of the weight (C, taps * taps)."""
        layout = self._forward.layout((self.height.size, self.width.size))
        read = self._forward.read(images.values(x, layout), layout)
        both = images.values(dy, self.output_layout) @ read.transpose(1, 2)
        taps = self._forward_taps().to(dy.dtype)
        return both.reshape(dy.shape[1], -1) @ taps.reshape(len(taps), -1).t()

    @property
    def _forward(self) -> Blocks:
        side = self.height
        num, rows = _share(side.out, self.width.out, 1)
        if num == 1:
            return Blocks(num=1, step=side.size, before=0, after=0, num_rows=rows)
        last = (rows - 1) * side.stride + side.dilation * (side.kernel - 1) - side.padding
        step = rows * side.stride
        return Blocks(num=num, step=step, before=side.padding, after=last + 1 - step, num_rows=rows)

    @property
    def _backward(self) -> Blocks:
        side = self.height
        num, rows = _share(side.size, self.width.size, side.stride)
        if num == 1:
            return Blocks(num=1, step=side.out, before=0, after=0, num_rows=rows)
        before = (side.dilation * (side.kernel - 1) - side.padding) // side.stride
        step = rows // side.stride
        last = (rows - 1 + side.padding) // side.stride
        return Blocks(num=num, step=step, before=before, after=last + 1 - step, num_rows=rows)

    def _forward_taps(self) -> Tensor:
        rows = self.height.hits(self._forward.reads, np.arange(self._forward.num_rows))
        columns = self.width.hits(np.arange(self.width.size), np.arange(self.width.out))
        return _places(rows, columns)

    def _backward_taps(self) -> Tensor:
        rows = self.height.hits(np.arange(self._backward.num_rows), self._backward.reads)
        columns = self.width.hits(np.arange(self.width.size), np.arange(self.width.out))
        return _places(rows.swapaxes(1, 2), columns.swapaxes(1, 2))


def bands_of(form: ConvForm, shape: Sequence[int], weight: Sequence[int]) -> Bands | None:
    """Return the banded form for an input and a weight of these shapes; None where another form is faster."""
    depthwise = form.groups == shape[1] == weight[0] and form.groups > 1 and prod(weight[2:]) > 1
    # A 1-D signal is an image of one column.
    if not depthwise or len(shape) > 4 or (len(shape) == 4 and shape[3] > MAX_BANDED_WIDTH):
        return None
    outs = form.sizes(shape[2:], weight[2:])
    sides = [
        Side(size=size, out=out, kernel=taps, stride=stride, padding=padding, dilation=dilation)
        for size, out, taps, stride, padding, dilation in zip(
            shape[2:], outs, weight[2:], form.stride, form.padding, form.dilation, strict=True
        )
    ]
    one_column = Side(size=1, out=1, kernel=1, stride=1, padding=0, dilation=1)
    bands = Bands(height=sides[0], width=sides[1] if len(sides) == 2 else one_column)
    return bands if bands.fits else None


def _share(num_rows: int, width: int, unit: int) -> tuple[int, int]:
    """Return the number of blocks and the rows of each, a multiple of ``unit``.

    A block has about MAX_WIDTH values in a row, and few rows are left over.
    """
    units = -(-num_rows // unit)
    most = min(units, max(1, round(MAX_WIDTH / (width * unit))))
    num = -(-units // most)
    return num, -(-units // num) * unit


def _places(rows: npt.NDArray[np.bool_], columns: npt.NDArray[np.bool_]) -> Tensor:
    """Return (taps, outputs, inputs): 1 where the banded matrix holds a tap of the kernel."""
    both = np.einsum("iab,jvw->ijbwav", rows, columns)
    num = both.shape[0] * both.shape[1]
    flat = both.reshape(num, both.shape[2] * both.shape[3], -1)
    return torch.from_numpy(np.ascontiguousarray(flat, dtype=np.float32))


def _banded(weight: Tensor, places: Tensor) -> Tensor:
    num, outs, ins = places.shape
    flat = weight.reshape(-1, num) @ places.to(weight.dtype).reshape(num, -1)
    return flat.reshape(-1, outs, ins)
