"""A depthwise convolution of small images as one matrix product for each channel.

Runtimes take a depthwise convolution image by image and channel by channel, and where an image has a hundred
places their bookkeeping costs more than the sums. So ``num_rows`` rows of the result are computed at a time, by a
product with a banded matrix that has the kernel's taps on its diagonals (a block of the Toeplitz matrix of Dumoulin
and Visin 2016, arXiv 1603.07285, section 4.1)::

    (samples * blocks, rows that a block reads * width)  @  (rows that a block reads * width, num_rows * width out)

What a block reads is its own ``step`` rows with ``before`` rows of the last block and ``after`` of the next one, so
nothing is padded and only the edges are copied. Zeros in the matrix are multiplied, too: in 25 x 5 images with
3 x 3 taps four times as many products take a third of the time. The gradient towards the input is such a map as well,
and the one towards the weight is read off the same diagonals.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

MAX_WIDTH: Final = 24
"""Columns of a block that one product gives: more rows at a time mean more zeros, fewer mean more edges."""


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

    def read(self, rows: Tensor, width: int) -> Tensor:
        """Images (C, N, rows * width) to what the blocks read (C, N * num, len(reads) * width)."""
        channels, samples, values = rows.shape
        size = self.step * width
        have = max(self.num, -(-values // size))
        own = pad(rows, (0, have * size - values)) if have * size != values else rows
        own = own.reshape(channels, samples, have, size)
        pieces = []
        # A pad of -1 takes away: with one more at the other end it moves the blocks by one, edges cut out of them.
        if self.before:
            pieces.append(pad(own, (self.before * width - size, 0, 1, self.num - 1 - have)))
        pieces.append(
            own if have == self.num and self.after >= 0 else own[:, :, : self.num, : size + min(0, self.after) * width]
        )
        if self.after > 0:
            pieces.append(pad(own, (0, self.after * width - size, -1, self.num + 1 - have)))
        return torch.cat(pieces, dim=-1).reshape(channels, samples * self.num, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bands:
    """A depthwise convolution of images of two dimensions."""

    height: Axis
    width: Axis

    @property
    def fits(self) -> bool:
        """Whether both directions have the form of this module."""
        return self._forward.fits and self._backward.fits

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x`` (N, C, height, width) convolved with ``weight`` (C, 1, taps, taps)."""
        blocks = self._forward
        read = blocks.read(_flat(x), self.width.size)
        made = read @ _banded(weight, self._forward_taps())
        return _images(made, x.shape[0], (self.height.out, self.width.out))

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """The gradient towards ``x``, of ``dy`` (N, C, height out, width out)."""
        read = self._backward.read(_flat(dy), self.width.out)
        made = read @ _banded(weight, self._backward_taps())
        return _images(made, dy.shape[0], (self.height.size, self.width.size))

    def weight_gradient(self, x: Tensor, dy: Tensor) -> Tensor:
        """The gradient towards the weight (C, taps * taps)."""
        blocks, made = self._forward, _flat(dy)
        missing = blocks.num * blocks.num_rows * self.width.out - made.shape[2]
        if missing:
            made = pad(made, (0, missing))
        made = made.reshape(dy.shape[1], dy.shape[0] * blocks.num, blocks.num_rows * self.width.out)
        both = blocks.read(_flat(x), self.width.size).transpose(1, 2) @ made
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


def _share(num_rows: int, width: int, unit: int) -> tuple[int, int]:
    """(blocks, rows of each), rows a multiple of ``unit``: about MAX_WIDTH values of a row, and little left over."""
    units = -(-num_rows // unit)
    most = min(units, max(1, round(MAX_WIDTH / (width * unit))))
    num = -(-units // most)
    return num, -(-units // num) * unit


def _places(rows: npt.NDArray[np.bool_], columns: npt.NDArray[np.bool_]) -> Tensor:
    """(taps, values read, values made): 1 where the tap of the kernel stands in the banded matrix."""
    both = np.einsum("iab,jvw->ijavbw", rows, columns)
    num = both.shape[0] * both.shape[1]
    flat = both.reshape(num, both.shape[2] * both.shape[3], -1)
    return torch.from_numpy(np.ascontiguousarray(flat, dtype=np.float32))


def _banded(weight: Tensor, places: Tensor) -> Tensor:
    num, ins, outs = places.shape
    flat = weight.reshape(-1, num) @ places.to(weight.dtype).reshape(num, -1)
    return flat.reshape(-1, ins, outs)


def _flat(images: Tensor) -> Tensor:
    """(N, C, height, width) to (C, N, height * width)."""
    return images.transpose(0, 1).reshape(images.shape[1], images.shape[0], -1)


def _images(made: Tensor, num: int, size: tuple[int, int]) -> Tensor:
    """What the blocks made, (C, N * blocks, values), as ``num`` images (N, C, height, width)."""
    rows = made.reshape(made.shape[0], num, -1, size[1])
    return (rows if rows.shape[2] == size[0] else rows[:, :, : size[0]]).transpose(0, 1)
