"""MobileNetV1 with a quarter of the width: the visual wake words model of MLPerf Tiny.

It has width multiplier 0.25, 96 x 96 images and two classes. As in the benchmark, convolutions have a bias.

Reference:
    Banbury et al. 2021, MLPerf Tiny Benchmark, arXiv 2106.07597, section 4.1.
    Howard et al. 2017, MobileNets, arXiv 1704.04861, table 1.
"""

from typing import Final

from torch import Tensor, nn

from fanin.datacenter.models.seeding import seeded
from fanin.datacenter.models.tiny.layers import MeanPool, Norm, norm_of, same_conv, separable

INPUT_SHAPE: Final = (3, 96, 96)
NUM_CLASSES: Final = 2
FULL_CHANNELS: Final = 32
"""Channels of the first layer at width 1."""
FULL_BLOCKS: Final = (
    (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1),
)  # fmt: skip
"""(channels out, stride) of each separable block at width 1."""


class MobileNetV1(nn.Module):
    """A classifier of ``x`` (B, 3, 96, 96); returns logits (B, 2)."""

    def __init__(self, seed: int = 0, norm: Norm = "batch", width: float = 0.25) -> None:
        super().__init__()
        channels, size = int(FULL_CHANNELS * width), 48
        blocks = []
        with seeded(seed):
            self.stem = nn.Sequential(
                same_conv((3, channels), (96, 96), (3, 3), (2, 2)), norm_of(norm, channels), nn.ReLU()
            )
            for full, stride in FULL_BLOCKS:
                blocks.append(separable((channels, int(full * width)), (size, size), stride, norm))
                channels, size = int(full * width), size // stride
            self.blocks = nn.Sequential(*blocks)
            self.pool = MeanPool()
            self.head = nn.Linear(channels, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 2)."""
        logits: Tensor = self.head(self.pool(self.blocks(self.stem(x))))
        return logits
