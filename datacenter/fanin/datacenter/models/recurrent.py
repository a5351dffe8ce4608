"""A recurrent classifier of token sequences.

The cell is a gated recurrent unit or a long short-term memory. Tracing unrolls it over the sequence, so the length is a
constant of the graph.

Reference:
    Cho et al. 2014, arXiv 1406.1078, section 2.3, for the gated recurrent unit.
    Hochreiter and Schmidhuber 1997 for the long short-term memory.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from fanin.datacenter.models.seeding import seeded


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentShape:
    """The sizes of a recurrent classifier."""

    vocabulary: int = 256
    width: int = 32
    hidden: int = 64
    num_classes: int = 10
    cell: Literal["gru", "lstm"] = "gru"


class RecurrentClassifier(nn.Module):
    """A classifier of tokens ``x`` (B, T) int32; returns logits (B, num_classes) of the last step."""

    def __init__(self, seed: int = 0, shape: RecurrentShape | None = None) -> None:
        super().__init__()
        shape = shape or RecurrentShape()
        cell = nn.GRU if shape.cell == "gru" else nn.LSTM
        with seeded(seed):
            self.tokens = nn.Embedding(shape.vocabulary, shape.width)
            self.cell = cell(shape.width, shape.hidden, batch_first=True)
            self.head = nn.Linear(shape.hidden, shape.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, num_classes)."""
        states, _ = self.cell(self.tokens(x))
        logits: Tensor = self.head(states[:, -1])
        return logits
