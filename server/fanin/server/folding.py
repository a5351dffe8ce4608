"""From committed Updates to the next parameters: what the coordinator does and ``fanin verify`` repeats.

Every function here is a pure function of the record: the parent's parameters, the closed set, its grid, the
Plan. That is why a Version can be computed again anywhere, and why a restart ends in the same bits.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fanin.edge.codecs import codec_named
from fanin.edge.grid import block_maxima, next_grid
from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos.messages import SATURATED, UpdateHeader
from fanin.protos.plans import Plan
from fanin.server.aggregation import Contribution, PartialSum, finish
from fanin.server.outer import apply_fedavg
from fanin.server.store.rounds import RoundRecord
from fanin.server.validation import weight_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a fold ends in."""

    parameters: Float32s
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


def outcome_of(total: PartialSum, table: TensorTable, grid: Sequence[int], parent: Float32s, plan: Plan) -> Outcome:
    """The next parameters, and the grid of the Round that will start from them."""
    mean = finish(total, table, grid)
    parameters = apply_fedavg(parent, mean, plan.aggregation.outer_learning_rate)
    maxima = block_maxima(table, mean.astype(np.float32))
    return Outcome(
        parameters=parameters,
        next_grid=next_grid(grid, maxima, total.counts[SATURATED], plan.codec),
        counts=dict(total.counts),
    )
