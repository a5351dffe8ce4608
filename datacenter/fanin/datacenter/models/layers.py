"""What the convolutional reference models share: one block, its padding, its norm and its beginning.

Padding is TensorFlow's "same", which the MLPerf Tiny models were defined with: where it is odd, the extra row goes
last. So the published weights fit these modules, and the shapes of all layers are theirs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

import torch
from torch import Tensor, nn

Norm = Literal["batch", "group"]
"""``batch`` as published; ``group`` for training on devices, as it has no running statistics."""
BATCH_NORM_EPS: Final = 1e-3
"""Keras's default, not torch's."""
GROUP_CHANNELS: Final = 8
"""Channels of a group. Wu and He 2018 (arXiv 1803.08494, table 3) find 8 to 32 alike; the narrowest layer has 8."""
Pair = tuple[int, int]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within it, initial parameters are a function of ``seed`` alone; torch's own generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class MeanPool(nn.Module):
    """The mean over height and width; a module, so that a pipeline's stage without it can hand on what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (B, channels, height, width) to (B, channels)."""
        return x.mean((2, 3))


def norm_of(kind: Norm, channels: int) -> nn.Module:
    """A norm over ``channels``."""
    if kind == "batch":
        return nn.BatchNorm2d(channels, eps=BATCH_NORM_EPS)
    return nn.GroupNorm(max(1, channels // GROUP_CHANNELS), channels)


def same_padding(size: Pair, kernel: Pair, stride: Pair) -> tuple[int, int, int, int]:
    """(left, right, top, bottom) such that ``size`` becomes ``ceil(size / stride)``."""
    totals = [
        max(0, (-(-have // step) - 1) * step + taps - have)
        for have, taps, step in zip(size, kernel, stride, strict=True)
    ]
    (top, bottom), (left, right) = ((total // 2, total - total // 2) for total in totals)
    return left, right, top, bottom


def same_conv(channels: Pair, size: Pair, kernel: Pair, stride: Pair = (1, 1), groups: int = 1) -> nn.Module:
    """A convolution from ``channels[0]`` to ``channels[1]`` of images of ``size``, padded to the same size."""
    left, right, top, bottom = same_padding(size, kernel, stride)
    if (left, top) == (right, bottom):
        return nn.Conv2d(*channels, kernel, stride, (top, left), groups=groups)
    return nn.Sequential(nn.ZeroPad2d((left, right, top, bottom)), nn.Conv2d(*channels, kernel, stride, groups=groups))


def separable(channels: Pair, size: Pair, stride: int, norm: Norm) -> nn.Sequential:
    """A depthwise 3x3 convolution and a 1x1 convolution, a norm and ReLU after each.

    Howard et al. 2017 (arXiv 1704.04861), section 3.1.
    """
    ins, outs = channels
    return nn.Sequential(
        same_conv((ins, ins), size, (3, 3), (stride, stride), groups=ins),
        norm_of(norm, ins),
        nn.ReLU(),
        nn.Conv2d(ins, outs, 1),
        norm_of(norm, outs),
        nn.ReLU(),
    )
