"""A recurrent classifier of token sequences.

A gated recurrent unit (Cho et al. 2014, arXiv 1406.1078, section 2.3) or a long short-term memory (Hochreiter and
Schmidhuber 1997), unrolled over the sequence when it is traced: the length is a constant of the graph.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from fanin.datacenter.models.layers import seeded


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentShape:
    """The sizes of a recurrent classifier."""

    vocabulary: int = 256
    width: int = 32
    hidden: int = 64
    num_classes: int = 10
    cell: Literal["gru", "lstm"] = "gru"


class RecurrentClassifier(nn.Module):
    """Tokens ``x`` (B, T) int32 to logits (B, num_classes), read off the last step."""

    def __init__(self, seed: int = 0, shape: RecurrentShape | None = None) -> None:
        super().__init__()
        shape = shape or RecurrentShape()
        cell = nn.GRU if shape.cell == "gru" else nn.LSTM
        with seeded(seed):
            self.tokens = nn.Embedding(shape.vocabulary, shape.width)
            self.cell = cell(shape.width, shape.hidden, batch_first=True)
            self.head = nn.Linear(shape.hidden, shape.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, num_classes)."""
        states, _ = self.cell(self.tokens(x))
        logits: Tensor = self.head(states[:, -1])
        return logits
