"""From committed Updates to the next parameters: what the coordinator does and ``fanin verify`` repeats.

Every function here is a pure function of the record: the parent's parameters, the closed set, its grid, the
Plan. That is why a Version can be computed again anywhere, and why a restart ends in the same bits.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fanin.edge.codecs import codec_named
from fanin.edge.grid import next_grid
from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos.messages import SATURATED, UpdateHeader
from fanin.protos.plans import Plan
from fanin.server.aggregation import Contribution, PartialSum, blocks_within, finish_part
from fanin.server.outer import apply_fedavg
from fanin.server.store.rounds import RoundRecord
from fanin.server.validation import weight_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a fold ends in."""

    next_grid: tuple[int, ...]
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """How far the Round that an Update was made for is from the one that it is folded in.

    ``staleness`` in Versions; ``shifts`` have for each block the exponent of its grid minus the one here.
    """

    staleness: int
    shifts: tuple[int, ...]


def lag_of(made_for: RoundRecord, folded_in: RoundRecord) -> Lag:
    """Nothing for an Update of the Round itself."""
    return Lag(
        staleness=folded_in.base_version - made_for.base_version,
        shifts=tuple(there - here for there, here in zip(made_for.grid, folded_in.grid, strict=True)),
    )


def contribution_of(header: UpdateHeader, payload: Iterable[memoryview], plan: Plan, lag: Lag) -> Contribution:
    """A committed Update as the fold sees it."""
    codec = codec_named(header.codec)
    return Contribution(
        weight=weight_of(header, plan.aggregation.max_examples, lag.staleness),
        fresh_weight=weight_of(header, plan.aggregation.max_examples),
        shifts=tuple(own + more for own, more in zip(header.shifts, lag.shifts, strict=True)),
        bits=codec.bits,
        max_shift=plan.codec.max_shift,
        counts=header.statistics.counts,
        pieces=(codec.decode(piece) for piece in payload),
    )


class OuterStep:
    """From a sum to the next parameters, piece by piece: of a large model nothing is held but the sum."""

    def __init__(self, total: PartialSum, table: TensorTable, grid: Sequence[int], plan: Plan) -> None:
        self._total = total
        self._table = table
        self._grid = grid
        self._plan = plan
        self._maxima = [0.0] * len(table.specs)

    def pieces(self, parent: Iterable[Float32s]) -> Iterator[Float32s]:
        """The next parameters in consecutive pieces, as long as those of the parent's."""
        first = 0
        for before in parent:
            last = first + before.size
            mean = finish_part(self._total, self._table, self._grid, (first, last))
            self._note_maxima(mean.astype(np.float32), first)
            yield apply_fedavg(before, mean, self._plan.aggregation.outer_learning_rate)
            first = last

    def outcome(self) -> Outcome:
        """What the fold ends in, once all pieces have been taken."""
        counts = self._total.counts
        grid = next_grid(self._grid, self._maxima, counts[SATURATED], self._plan.codec)
        return Outcome(next_grid=grid, counts=dict(counts))

    def _note_maxima(self, mean: Float32s, first: int) -> None:
        indices = range(len(self._maxima))
        for start, stop, index in blocks_within(self._table, indices, first, first + mean.size):
            largest = float(np.abs(mean[start - first : stop - first]).max())
            self._maxima[index] = max(self._maxima[index], largest)
