"""A small strided CNN for the 8 x 8 digits.

It avoids layers that do not suit training on devices:

- No max-pool: a stride replaces it, and its gradient is a plain convolution.
- No BatchNorm: its running statistics would have to be averaged over devices with different labels.
- No dropout: a device would draw random numbers for each step, and a model of this size hardly overfits.

The three weight tensors with ReLU between them quantize to int8 per output channel with hardly any loss. The forward
pass is a sequence of modules that each return one tensor, so a pipeline can be cut between them.
"""

from typing import Final

import torch
from torch import Tensor, nn

INPUT_SHAPE: Final = (1, 8, 8)
NUM_CLASSES: Final = 10


class DigitsCnn(nn.Module):
    """Convolution, strided convolution, linear head: ``x`` (B, 1, 8, 8) to logits (B, 10)."""

    def __init__(self, seed: int = 0, channels: tuple[int, int] = (16, 64)) -> None:
        """Initialize the parameters from ``seed`` alone. torch's own generator is not changed."""
        super().__init__()
        first, second = channels
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.convolutions = nn.Sequential(
                nn.Sequential(nn.Conv2d(1, first, kernel_size=5, padding=2), nn.ReLU()),
                nn.Sequential(nn.Conv2d(first, second, kernel_size=3, stride=2, padding=1), nn.ReLU()),
            )
            self.flatten = nn.Flatten()
            self.head = nn.Linear(second * 4 * 4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 10)."""
        logits: Tensor = self.head(self.flatten(self.convolutions(x)))
        return logits
