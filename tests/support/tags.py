"""A small App that tags each word of sequences with several lengths, and data that it can learn."""

import numpy as np
import torch
from torch import Tensor, nn

from fanin.clients.data.examples import Examples
from fanin.edge.export import App, Lengths, next_token
from fanin.edge.runtimes.graphs import NO_TOKEN

SIZES = (4, 8, 16)
NUM_WORDS = 12
NUM_TAGS = 3
BATCH_SIZE = 4


class Tagger(nn.Module):
    """Attention over the words of a sequence; word 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(NUM_WORDS, 8), nn.Embedding(SIZES[-1], 8)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, NUM_TAGS)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a tag for each position."""
        hidden = self.table(x) + self.places(torch.arange(x.shape[1]))
        scores = self.query(hidden) @ self.key(hidden).transpose(1, 2) / 8**0.5
        shares = scores.masked_fill((x == 0).unsqueeze(1), -1e9).softmax(-1)
        logits: Tensor = self.head(hidden + shares @ self.value(hidden))
        return logits


def tags_app() -> App:
    """Return the App, always with the same initial parameters."""
    torch.manual_seed(3)
    return App(
        name="tags",
        module=Tagger(),
        calibration=tags_examples(32, seed=1).inputs["x"],
        batch_size=BATCH_SIZE,
        num_classes=NUM_TAGS,
        loss=next_token,
        lengths=Lengths(sizes=SIZES, axes={"x": 1, "y": 1}),
    )


def tags_examples(num: int, *, seed: int) -> Examples:
    """Return sequences of 1 to 16 words, padded at their end. The tag depends on the word alone."""
    rng = np.random.default_rng(seed)
    is_word = np.arange(SIZES[-1]) < rng.integers(1, SIZES[-1] + 1, (num, 1))
    words = np.where(is_word, rng.integers(1, NUM_WORDS, (num, SIZES[-1])), 0)
    return Examples(
        inputs={"x": words.astype(np.int32)}, y=np.where(is_word, words % NUM_TAGS, NO_TOKEN).astype(np.int32)
    )
