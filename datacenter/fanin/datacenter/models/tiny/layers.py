"""The layers that the MLPerf Tiny models share: padding, norms, pooling and the separable block.

Padding is TensorFlow's "same", with which these models were defined. If the padding is odd, the extra row comes last.
The published weights therefore fit these modules, and all layers have the published shapes.
"""

from typing import Final, Literal

from torch import Tensor, nn

Norm = Literal["batch", "group"]
"""``batch`` is the published norm. ``group`` has no running statistics, which suits training on devices."""
BATCH_NORM_EPS: Final = 1e-3
"""The default of Keras, not of torch."""
GROUP_CHANNELS: Final = 8
"""Channels of a group. Wu and He 2018 (arXiv 1803.08494, table 3) find 8 to 32 equal; the narrowest layer has 8."""
IntPair = tuple[int, int]


class MeanPool(nn.Module):
    """The mean over height and width. It is a module so that a pipeline stage can skip it."""

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (B, channels, height, width) to (B, channels)."""
        return x.mean((2, 3))


def norm_of(kind: Norm, channels: int) -> nn.Module:
    """Return a norm over ``channels``."""
    if kind == "batch":
        return nn.BatchNorm2d(channels, eps=BATCH_NORM_EPS)
    return nn.GroupNorm(max(1, channels // GROUP_CHANNELS), channels)


def same_padding(size: IntPair, kernel: IntPair, stride: IntPair) -> tuple[int, int, int, int]:
    """Return the padding (left, right, top, bottom) after which ``size`` becomes ``ceil(size / stride)``."""
    totals = [
        max(0, (-(-have // step) - 1) * step + taps - have)
        for have, taps, step in zip(size, kernel, stride, strict=True)
    ]
    (top, bottom), (left, right) = ((total // 2, total - total // 2) for total in totals)
    return left, right, top, bottom


def same_conv(
    channels: IntPair, size: IntPair, kernel: IntPair, stride: IntPair = (1, 1), groups: int = 1
) -> nn.Module:
    """Return a convolution from ``channels[0]`` to ``channels[1]`` channels, padded for images of ``size``."""
    left, right, top, bottom = same_padding(size, kernel, stride)
    if (left, top) == (right, bottom):
        return nn.Conv2d(*channels, kernel, stride, (top, left), groups=groups)
    return nn.Sequential(nn.ZeroPad2d((left, right, top, bottom)), nn.Conv2d(*channels, kernel, stride, groups=groups))


def separable(channels: IntPair, size: IntPair, stride: int, norm: Norm) -> nn.Sequential:
    """Return a depthwise 3x3 convolution and a 1x1 convolution, each followed by a norm and ReLU.

    Reference:
        Howard et al. 2017, MobileNets, arXiv 1704.04861, section 3.1.
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
