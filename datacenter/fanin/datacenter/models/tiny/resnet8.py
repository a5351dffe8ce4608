"""ResNet8, the image classification model of MLPerf Tiny (Banbury et al. 2021, arXiv 2106.07597, section 4.1).

The first three stacks of a ResNet (He et al. 2015, arXiv 1512.03385) for CIFAR-10 with 16, 32 and 64 filters, one
block each. As in the benchmark, convolutions have a bias, and the 1x1 convolution of a shortcut has no norm.
"""

from typing import Final

import torch
from torch import Tensor, nn

from fanin.datacenter.models.seeding import seeded
from fanin.datacenter.models.tiny.layers import MeanPool, Norm, norm_of, same_conv

INPUT_SHAPE: Final = (3, 32, 32)
NUM_CLASSES: Final = 10
FILTERS: Final = (16, 32, 64)


class Block(nn.Module):
    """Two 3x3 convolutions with a shortcut: the input, or its 1x1 convolution if the shape changes."""

    def __init__(self, ins: int, outs: int, size: int, norm: Norm) -> None:
        super().__init__()
        stride = 1 if ins == outs else 2
        after = size // stride
        self.body = nn.Sequential(
            same_conv((ins, outs), (size, size), (3, 3), (stride, stride)),
            norm_of(norm, outs),
            nn.ReLU(),
            same_conv((outs, outs), (after, after), (3, 3)),
            norm_of(norm, outs),
        )
        self.shortcut = nn.Identity() if ins == outs else nn.Conv2d(ins, outs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (B, ins, size, size) to (B, outs, size / stride, size / stride)."""
        return torch.relu(self.body(x) + self.shortcut(x))


class ResNet8(nn.Module):
    """A classifier of ``x`` (B, 3, 32, 32); returns logits (B, 10)."""

    def __init__(self, seed: int = 0, norm: Norm = "batch") -> None:
        super().__init__()
        first, second, third = FILTERS
        with seeded(seed):
            self.stem = nn.Sequential(same_conv((3, first), (32, 32), (3, 3)), norm_of(norm, first), nn.ReLU())
            self.stacks = nn.Sequential(
                Block(first, first, 32, norm), Block(first, second, 32, norm), Block(second, third, 16, norm)
            )
            self.pool = MeanPool()
            self.head = nn.Linear(third, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 10)."""
        logits: Tensor = self.head(self.pool(self.stacks(self.stem(x))))
        return logits
