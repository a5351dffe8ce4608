"""A multilayer perceptron: linear layers with ReLU between them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from torch import Tensor, nn

from fanin.datacenter.models.seeding import seeded

INPUT_SHAPE: Final = (1, 28, 28)
NUM_CLASSES: Final = 10


class Mlp(nn.Module):
    """``x`` (B, ...) of ``sizes[0]`` values a sample to logits (B, sizes[-1])."""

    def __init__(self, seed: int = 0, sizes: Sequence[int] = (784, 128, 64, NUM_CLASSES)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        with seeded(seed):
            for ins, outs in pairwise(sizes):
                layers += [nn.ReLU(), nn.Linear(ins, outs)]
        self.body = nn.Sequential(nn.Flatten(), *layers[1:])

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, sizes[-1])."""
        logits: Tensor = self.body(x)
        return logits
