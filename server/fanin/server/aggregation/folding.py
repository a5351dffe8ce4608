"""From committed Updates to the next parameters, for the coordinator and for ``fanin verify``.

Every function is a pure function of the record: the parent's parameters, the closed set, its grid and the Plan. So a
Version can be recomputed anywhere, and the result after a restart is bit-identical.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fanin.edge.codecs.fixed import Integers, codec_named
from fanin.edge.codecs.grid import first_grid, next_grid
from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos.messages import CodecSpec, UpdateHeader
from fanin.protos.plans import Plan
from fanin.server.aggregation.fold import Contribution, blocks_within
from fanin.server.aggregation.outer import apply_fedavg
from fanin.server.aggregation.sets import Aggregate, Submission
from fanin.server.aggregation.weights import capped_counts, weight_of
from fanin.server.storage.spool import Spool
from fanin.server.storage.sqlite.rounds import RoundRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldResult:
    """The result of a fold, besides the parameters.

    Attributes:
        next_grid: The grid of the next Round: an exponent for each block.
        counts: Sums of the statistics, by name.
    """

    next_grid: tuple[int, ...]
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """The distance between the Round that an Update was made for and the Round that folds it.

    Attributes:
        staleness: Versions between their base Versions.
        shifts: For each block, the exponent of the earlier grid minus that of the later one.
    """

    staleness: int
    shifts: tuple[int, ...]


def lag_of(made_for: RoundRecord, folded_in: RoundRecord) -> Lag:
    """Return the lag between two Rounds: all zeros if they are the same."""
    return Lag(
        staleness=folded_in.base_version - made_for.base_version,
        shifts=tuple(there - here for there, here in zip(made_for.grid, folded_in.grid, strict=True)),
    )


def contribution_of(header: UpdateHeader, payload: Iterable[memoryview], plan: Plan, lag: Lag) -> Contribution:
    """Return a committed Update, ready to be added.

    Args:
        header: The Update's header.
        payload: The encoded values, in consecutive slices.
        plan: The Run's Plan.
        lag: The lag of the Update.
    """
    codec = codec_named(header.codec)
    return Contribution(
        weight=weight_of(header, plan.aggregation.max_examples, lag.staleness),
        fresh_weight=weight_of(header, plan.aggregation.max_examples),
        shifts=tuple(own + more for own, more in zip(header.shifts, lag.shifts, strict=True)),
        bits=codec.bits,
        max_shift=plan.codec.max_shift,
        counts=capped_counts(header, plan.aggregation.max_examples),
        pieces=(codec.decode(piece) for piece in payload),
    )


def submission_of(header: UpdateHeader, device: str, spool: Spool, plan: Plan, lag: Lag) -> Submission:
    """Return a committed Update of the spool, ready to be folded. Reading it raises Corrupted if it is damaged."""
    codec = codec_named(header.codec)
    value_bytes = codec.bits // 8

    def read(first: int, last: int) -> Integers:
        size_bytes = (last - first) * value_bytes
        return codec.decode(memoryview(spool.read_part(header, device, first * value_bytes, size_bytes)))

    return Submission(update=contribution_of(header, spool.read(header, device), plan, lag), read=read)


class OuterStep:
    """The step from an aggregate to the next parameters, in slices: for a large model, only a sum is in memory."""

    def __init__(self, aggregate: Aggregate, table: TensorTable, grid: Sequence[int], plan: Plan) -> None:
        self._aggregate = aggregate
        self._table = table
        self._grid = grid
        self._plan = plan
        self._maxima = BlockMaxima(table)

    def pieces(self, parent: Iterable[Float32s]) -> Iterator[Float32s]:
        """Yield the next parameters in slices, each as long as the parent's slice."""
        first = 0
        for before in parent:
            last = first + before.size
            mean = self._aggregate.part(first, last)
            self._maxima.add(before)
            yield apply_fedavg(before, mean, self._plan.aggregation.outer_learning_rate)
            first = last

    def result(self) -> FoldResult:
        """Return the result of the fold. Call this after the last slice."""
        codec = self._plan.codec
        first = first_grid(self._maxima.largest, codec)
        grid = next_grid(self._grid, self._aggregate.reaches, first, codec)
        return FoldResult(next_grid=grid, counts=self._aggregate.counts)


def first_grid_of(table: TensorTable, parameters: Iterable[Float32s], codec: CodecSpec) -> tuple[int, ...]:
    """Return the first grid of parameters that arrive in consecutive slices."""
    maxima = BlockMaxima(table)
    for piece in parameters:
        maxima.add(piece)
    return first_grid(maxima.largest, codec)


class BlockMaxima:
    """The largest magnitude of each block of parameters, 0.0 for an empty block. Parameters arrive in slices."""

    def __init__(self, table: TensorTable) -> None:
        self.largest = [0.0] * len(table.specs)
        self._table = table
        self._num_values = 0

    def add(self, piece: Float32s) -> None:
        """Add the next slice."""
        first, last = self._num_values, self._num_values + piece.size
        for start, stop, block in blocks_within(self._table, range(len(self.largest)), first, last):
            part = piece[start - first : stop - first]
            self.largest[block] = max(self.largest[block], float(part.max()), -float(part.min()))
        self._num_values = last
