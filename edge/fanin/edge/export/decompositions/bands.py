"""A depthwise convolution of small images as one matrix product for each channel.

Runtimes take a depthwise convolution image by image and channel by channel, and where an image has a hundred
places their bookkeeping costs more than the sums. So ``num_rows`` rows of the result are computed at a time, by a
product with a banded matrix that has the kernel's taps on its diagonals (a block of the Toeplitz matrix of Dumoulin
and Visin 2016, arXiv 1603.07285, section 4.1)::

    (num_rows * width out, rows that a block reads * width)  @  (rows that a block reads * width, blocks * samples)

What a block reads is its own ``step`` rows with ``before`` rows of the last block and ``after`` of the next one: whole
rows of the matrix on the right, moved by one block (``layouts``). Zeros in the matrix on the left are multiplied, too:
in 25 x 5 images with 3 x 3 taps four times as many products take a fifth of the time. The gradient towards the input
is such a map as well, and the one towards the weight is read off the same diagonals.
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

from fanin.edge.export.decompositions.forms import ConvForm
from fanin.edge.export.decompositions.layouts import Images, Layout

MAX_WIDTH: Final = 24
"""Values of a block that one product gives: more rows at a time mean more zeros, fewer mean more edges."""
MAX_BANDED_WIDTH: Final = 12
"""The widest image whose depthwise convolution is taken so: zeros in its matrix grow with the width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One spatial dimension of a convolution: ``size`` places in, ``out`` places out."""

    size: int
    out: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    def hits(self, seen: npt.NDArray[np.int64], made: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """(taps, len(seen), len(made)): which tap takes which place in to which place out."""
        taps = np.arange(self.kernel)[:, None, None] * self.dilation - self.padding
        found: npt.NDArray[np.bool_] = seen[None, :, None] == made[None, None, :] * self.stride + taps
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Rows taken ``step`` at a time, with ``before`` and ``after`` more; each block gives ``num_rows`` rows."""

    num: int
    step: int
    before: int
    after: int
    num_rows: int

    @property
    def fits(self) -> bool:
        """Whether a block reads of its neighbours only."""
        return 0 <= self.before <= self.step and -self.step < self.after <= self.step

    @property
    def reads(self) -> npt.NDArray[np.int64]:
        """The rows that a block reads, counted from its own first one."""
        return np.arange(-self.before, self.step + self.after)

    def layout(self, size: tuple[int, int]) -> Layout:
        """How images of this size lie in blocks; there may be more of them than are read."""
        return Layout(size=size, num=max(self.num, -(-size[0] // self.step)), step=self.step)

    def read(self, own: Tensor, layout: Layout) -> Tensor:
        """Values in this layout to what the blocks read (C, len(reads) * width, num * N)."""
        size, width = own.shape[1], layout.size[1]
        samples = own.shape[2] // layout.num
        num, more = self.num * samples, (layout.num - self.num) * samples
        pieces = []
        # A pad below zero takes away: with as much at the other end it moves the blocks by one.
        if self.before:
            pieces.append(pad(own, (samples, -samples - more, self.before * width - size, 0)))
        pieces.append(own if not more and self.after >= 0 else own[:, : size + min(0, self.after) * width, :num])
        if self.after > 0:
            pieces.append(pad(own, (-samples, samples - more, 0, self.after * width - size)))
        return torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bands:
    """A depthwise convolution of images of two dimensions."""

    height: Axis
    width: Axis

    @property
    def fits(self) -> bool:
        """Whether both directions have the form of this module."""
        return self._forward.fits and self._backward.fits

    def forward(self, images: Images, x: Tensor, weight: Tensor) -> Tensor:
        """``x`` (N, C, height, width) convolved with ``weight`` (C, 1, taps, taps), as values of ``made``."""
        layout = self._forward.layout((self.height.size, self.width.size))
        return _banded(weight, self._forward_taps()) @ self._forward.read(images.values(x, layout), layout)

    @property
    def made(self) -> Layout:
        """The layout of what ``forward`` gives."""
        blocks = self._forward
        return Layout(size=(self.height.out, self.width.out), num=blocks.num, step=blocks.num_rows)

    def input_gradient(self, images: Images, dy: Tensor, weight: Tensor) -> Tensor:
        """The gradient towards ``x``, of ``dy`` (N, C, height out, width out)."""
        blocks = self._backward
        layout = blocks.layout((self.height.out, self.width.out))
        made = _banded(weight, self._backward_taps()) @ blocks.read(images.values(dy, layout), layout)
        return images.image(
            made, Layout(size=(self.height.size, self.width.size), num=blocks.num, step=blocks.num_rows)
        )

    def weight_gradient(self, images: Images, x: Tensor, dy: Tensor) -> Tensor:
        """The gradient towards the weight (C, taps * taps)."""
        layout = self._forward.layout((self.height.size, self.width.size))
        read = self._forward.read(images.values(x, layout), layout)
        both = images.values(dy, self.made) @ read.transpose(1, 2)
        taps = self._forward_taps().to(dy.dtype)
        return both.reshape(dy.shape[1], -1) @ taps.reshape(len(taps), -1).t()

    @property
    def _forward(self) -> Blocks:
        axis = self.height
        num, rows = _share(axis.out, self.width.out, 1)
        if num == 1:
            return Blocks(num=1, step=axis.size, before=0, after=0, num_rows=rows)
        last = (rows - 1) * axis.stride + axis.dilation * (axis.kernel - 1) - axis.padding
        step = rows * axis.stride
        return Blocks(num=num, step=step, before=axis.padding, after=last + 1 - step, num_rows=rows)

    @property
    def _backward(self) -> Blocks:
        axis = self.height
        num, rows = _share(axis.size, self.width.size, axis.stride)
        if num == 1:
            return Blocks(num=1, step=axis.out, before=0, after=0, num_rows=rows)
        before = (axis.dilation * (axis.kernel - 1) - axis.padding) // axis.stride
        step = rows // axis.stride
        last = (rows - 1 + axis.padding) // axis.stride
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
    """The banded form for an input and a weight of these shapes, where it is the better one."""
    depthwise = form.groups == shape[1] == weight[0] and form.groups > 1 and prod(weight[2:]) > 1
    # A signal of one dimension is an image of one column.
    if not depthwise or len(shape) > 4 or (len(shape) == 4 and shape[3] > MAX_BANDED_WIDTH):
        return None
    outs = form.sizes(shape[2:], weight[2:])
    axes = [
        Axis(size=size, out=out, kernel=taps, stride=stride, padding=padding, dilation=dilation)
        for size, out, taps, stride, padding, dilation in zip(
            shape[2:], outs, weight[2:], form.stride, form.padding, form.dilation, strict=True
        )
    ]
    column = Axis(size=1, out=1, kernel=1, stride=1, padding=0, dilation=1)
    found = Bands(height=axes[0], width=axes[1] if len(axes) == 2 else column)
    return found if found.fits else None


def _share(num_rows: int, width: int, unit: int) -> tuple[int, int]:
    """(blocks, rows of each), rows a multiple of ``unit``: about MAX_WIDTH values of a row, and little left over."""
    units = -(-num_rows // unit)
    most = min(units, max(1, round(MAX_WIDTH / (width * unit))))
    num = -(-units // most)
    return num, -(-units // num) * unit


def _places(rows: npt.NDArray[np.bool_], columns: npt.NDArray[np.bool_]) -> Tensor:
    """(taps, values made, values read): 1 where the tap of the kernel stands in the banded matrix."""
    both = np.einsum("iab,jvw->ijbwav", rows, columns)
    num = both.shape[0] * both.shape[1]
    flat = both.reshape(num, both.shape[2] * both.shape[3], -1)
    return torch.from_numpy(np.ascontiguousarray(flat, dtype=np.float32))


def _banded(weight: Tensor, places: Tensor) -> Tensor:
    num, outs, ins = places.shape
    flat = weight.reshape(-1, num) @ places.to(weight.dtype).reshape(num, -1)
    return flat.reshape(-1, outs, ins)
