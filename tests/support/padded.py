"""A small App of sequences of any length with one graph: a mask hides the padding, which is a word like any other."""

import numpy as np
import torch
from torch import Tensor, nn

from fanin.clients.data.examples import Examples
from fanin.edge.export import App, Lengths, next_token
from fanin.edge.runtimes.graphs import NO_TOKEN

LONGEST = 6
NUM_WORDS = 12
NUM_TAGS = 3
BATCH_SIZE = 4
PADDING = NUM_WORDS - 1


class Masked(nn.Module):
    """A tag for each word, from the word and the mean of all visible ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(NUM_WORDS, 8), nn.Linear(16, NUM_TAGS)

    def forward(self, ids: Tensor, seen: Tensor) -> Tensor:
        """Logits of a tag for each position."""
        visible, words = seen.unsqueeze(-1).float(), self.table(ids)
        mean = (words * visible).sum(1, keepdim=True) / visible.sum(1, keepdim=True)
        logits: Tensor = self.head(torch.cat([words, mean.expand_as(words)], -1))
        return logits


def padded_app() -> App:
    """Return the App, always with the same initial parameters."""
    torch.manual_seed(3)
    return App(
        name="padded",
        module=Masked(),
        calibration=dict(padded_examples(32, LONGEST, seed=1).inputs),
        batch_size=BATCH_SIZE,
        num_classes=NUM_TAGS,
        loss=next_token,
        lengths=Lengths(sizes=(LONGEST,), axes={"ids": 1, "seen": 1, "y": 1}, padding={"ids": PADDING}),
    )


def padded_examples(num: int, width: int, *, seed: int) -> Examples:
    """Return arrays (num, width) of sequences of 1 to ``width`` words, padded at their end."""
    rng = np.random.default_rng(seed)
    is_word = np.arange(width) < rng.integers(1, width + 1, (num, 1))
    words = np.where(is_word, rng.integers(0, NUM_WORDS, (num, width)), PADDING)
    return Examples(
        inputs={"ids": words.astype(np.int32), "seen": is_word.astype(np.int32)},
        y=np.where(is_word, words % NUM_TAGS, NO_TOKEN).astype(np.int32),
    )
