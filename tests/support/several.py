"""A small App of three inputs with dropout, whose output is a dict, and data that it can learn."""

import numpy as np
import torch
from torch import Tensor, nn

from fanin.clients.data.examples import Examples
from fanin.edge.export import App

NUM_CLASSES = 4
NUM_WORDS = 20
LENGTH = 6
NUM_NUMBERS = 3
BATCH_SIZE = 8


class Reader(nn.Module):
    """A model of the mean of the visible words and of some numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_WORDS, 8)
        self.first = nn.Linear(8 + NUM_NUMBERS, 16)
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, ids: Tensor, attention_mask: Tensor, numbers: Tensor) -> dict[str, object]:
        """Return the logits among other outputs."""
        visible = attention_mask.unsqueeze(-1).float()
        words = (self.table(ids) * visible).sum(1) / visible.sum(1)
        hidden = self.dropout(torch.relu(self.first(torch.cat([words, numbers], -1))))
        return {"states": (words, hidden), "logits": self.head(hidden)}


def several_app() -> App:
    """Return the App, always with the same initial parameters."""
    torch.manual_seed(3)
    return App(
        name="several",
        module=Reader(),
        calibration=dict(several_examples(64, seed=1).inputs),
        batch_size=BATCH_SIZE,
        num_classes=NUM_CLASSES,
        output="logits",
    )


def several_examples(num: int, *, seed: int) -> Examples:
    """Return examples whose label depends on the visible words and the numbers. Hidden words are misleading."""
    rng = np.random.default_rng(seed)
    family, sign = rng.integers(0, 2, (2, num))
    visible = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (num, 1))
    words = rng.integers(0, NUM_WORDS // 2, (num, LENGTH)) + NUM_WORDS // 2 * np.where(visible, family[:, None], 1)
    numbers = 0.5 * rng.standard_normal((num, NUM_NUMBERS)) + (2 * sign - 1)[:, None]
    inputs = {
        "ids": words.astype(np.int32),
        "attention_mask": visible.astype(np.int32),
        "numbers": numbers.astype(np.float32),
    }
    return Examples(inputs=inputs, y=(2 * family + sign).astype(np.int32))
