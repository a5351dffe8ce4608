"""DS-CNN, the keyword spotting model of MLPerf Tiny (Banbury et al. 2021, arXiv 2106.07597, section 4.1).

The small depthwise separable CNN of Zhang et al. 2017 (arXiv 1711.07128, section 3.5). It has a 10x4 convolution and
four separable blocks of 64 channels over 49 frames of 10 cepstral coefficients. As in the benchmark, convolutions have
a bias. Dropout is omitted: the benchmark measures inference, where it is off.
"""

from typing import Final

from torch import Tensor, nn

from fanin.datacenter.models.seeding import seeded
from fanin.datacenter.models.tiny.layers import MeanPool, Norm, norm_of, same_conv, separable

INPUT_SHAPE: Final = (1, 49, 10)
NUM_CLASSES: Final = 12
NUM_BLOCKS: Final = 4
CHANNELS: Final = 64


class DsCnn(nn.Module):
    """A classifier of ``x`` (B, 1, 49, 10); returns logits (B, 12)."""

    def __init__(self, seed: int = 0, norm: Norm = "batch") -> None:
        super().__init__()
        with seeded(seed):
            self.stem = nn.Sequential(
                same_conv((1, CHANNELS), (49, 10), (10, 4), (2, 2)), norm_of(norm, CHANNELS), nn.ReLU()
            )
            self.blocks = nn.Sequential(*(separable((CHANNELS, CHANNELS), (25, 5), 1, norm) for _ in range(NUM_BLOCKS)))
            self.pool = MeanPool()
            self.head = nn.Linear(CHANNELS, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 12)."""
        logits: Tensor = self.head(self.pool(self.blocks(self.stem(x))))
        return logits
