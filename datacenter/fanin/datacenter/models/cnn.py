"""A small strided CNN for the 8 x 8 digits.

What it leaves out is what does not travel well: no max-pool (a stride does its work, and its gradient is a plain
convolution), no BatchNorm (its running statistics would have to be averaged over devices that see different
labels), no dropout (a graph has no random numbers). Three weight tensors with ReLU between them quantize to int8
per output channel with hardly a loss.
"""

from typing import Final

import torch
from torch import Tensor, nn

INPUT_SHAPE: Final = (1, 8, 8)
NUM_CLASSES: Final = 10


class DigitsCnn(nn.Module):
    """Convolution, strided convolution, linear head: ``x`` (B, 1, 8, 8) to logits (B, 10)."""

    def __init__(self, seed: int = 0, channels: tuple[int, int] = (16, 64)) -> None:
        """The initial parameters are a function of ``seed`` alone; torch's own generator is left as it was."""
        super().__init__()
        first, second = channels
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.conv1 = nn.Conv2d(1, first, kernel_size=5, padding=2)
            self.conv2 = nn.Conv2d(first, second, kernel_size=3, stride=2, padding=1)
            self.head = nn.Linear(second * 4 * 4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, 10)."""
        hidden = torch.relu(self.conv2(torch.relu(self.conv1(x))))
        logits: Tensor = self.head(hidden.flatten(start_dim=1))
        return logits
