"""From committed Updates to the next parameters, for the coordinator and for ``fanin verify``.

Every function is a pure function of the record: the parent's parameters, the closed set, its grid and the Plan. So a
Version can be recomputed anywhere, and the result after a restart is bit-identical.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Final

import numpy as np

from fanin.edge.codecs.fixed import AnyCodec, Integers, decoded_part, decoded_pieces
from fanin.edge.codecs.grid import Precision, first_grid, next_grid
from fanin.edge.codecs.trained import TrainedPart
from fanin.edge.codecs.vector import VectorLayout
from fanin.edge.rings import RingVector
from fanin.edge.tensors import Float32s, Float64s, TensorTable, outside
from fanin.protos.errors import Corrupted, InvalidVersion
from fanin.protos.messages import UpdateHeader
from fanin.protos.plans import Plan
from fanin.protos.roles import PARAMETER, RoleKind, TensorRole
from fanin.protos.texts import counted
from fanin.server.aggregation.checked import optimizer_part
from fanin.server.aggregation.fold import Contribution, blocks_within
from fanin.server.aggregation.methods.feddyn import FedDynStep
from fanin.server.aggregation.outer import RoundStep, State
from fanin.server.aggregation.sets import Aggregate
from fanin.server.aggregation.statistics import with_examples
from fanin.server.aggregation.weights import weights_of
from fanin.server.storage.protocols.files import Payloads
from fanin.server.storage.records import RoundRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldResult:
    """The result of a fold, besides the parameters.

    Attributes:
        next_grid: The grid of the next Round: an exponent for each block of the vector.
        counts: Sums of the statistics, by name.
        num_clamped: Values that were out of the range of their role by at most one step, and were set to its end.
    """

    next_grid: tuple[int, ...]
    counts: Mapping[str, int]
    num_clamped: int


SLICE_VALUES: Final = 1 << 16
"""Values of an outer step at a time. The half dozen float64 arrays of a slice take 3 MB, and stay in the CPU cache."""
StateSlices = Mapping[str, Iterable[Float32s]]
"""The tensors of an outer state by name, each in slices of any lengths."""
EarlierSlices = Mapping[int, Iterable[Float32s]]
"""The parameters of earlier Versions by staleness, each in slices of any lengths."""
NO_EARLIER: Final[EarlierSlices] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """The distance between the Round of an Update's Assignment and the Round that folds it, and whose Update it is.

    Attributes:
        staleness: Versions between their base Versions.
        shifts: For each block, the exponent of the earlier grid minus that of the later one.
        scale: The scale of the weights in the later Round (``weights``).
        device: The device of the Update, for weights by site.
    """

    staleness: int
    shifts: tuple[int, ...]
    scale: int = 0
    device: str = ""


def lag_of(made_for: RoundRecord, folded_in: RoundRecord, scale: int = 0) -> Lag:
    """Return the lag between two Rounds: all zeros if they are the same, except for the scale."""
    return Lag(
        scale=scale,
        staleness=folded_in.base_version - made_for.base_version,
        shifts=tuple(there - here for there, here in zip(made_for.grid, folded_in.grid, strict=True)),
    )


def contribution_of(header: UpdateHeader, codec: AnyCodec, plan: Plan, layout: VectorLayout, lag: Lag) -> Contribution:
    """Return a committed Update without its values.

    Args:
        header: The Update's header.
        codec: The Run's codec. A Plan does not know the bits of one of another package.
        plan: The Run's Plan.
        layout: The layout of the vector.
        lag: The lag of the Update.
    """
    weigh = partial(weights_of, header, plan, device=lag.device, scale=lag.scale)
    return Contribution(
        weights=layout.per_block(weigh(staleness=lag.staleness)),
        fresh_weights=layout.per_block(weigh()),
        shifts=tuple(own + more for own, more in zip(header.shifts, lag.shifts, strict=True)),
        bits=codec.bits,
        max_shift=plan.codec.max_shift,
        counts=with_examples(header.statistics.counts),
        pieces=(),
        staleness=lag.staleness,
        ranges=header.ranges,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpooledUpdates:
    """The committed Updates of a Run: their payloads are in the spool."""

    plan: Plan
    codec: AnyCodec
    layout: VectorLayout
    spool: Payloads
    vector: RingVector | None = None

    def contribution(self, header: UpdateHeader, device: str, lag: Lag) -> Contribution:
        """Return an Update, ready to be folded. Reading it raises Corrupted if it is damaged."""
        codec, spool, num_values = self.codec, self.spool, self.layout.total_table.num_values
        lag = replace(lag, device=device)
        if self.vector is not None:
            tail = np.zeros(self.vector.num_tail, np.int64)
            masked = self.vector.decode(spool.read(header, device), tail)
            return replace(contribution_of(header, codec, self.plan, self.layout, lag), pieces=masked, tail=tail)

        def read(first: int, last: int) -> Integers:
            return decoded_part(codec, partial(spool.read_part, header, device), (first, last), num_values)

        pieces = decoded_pieces(codec, spool.read(header, device), num_values)
        return replace(contribution_of(header, codec, self.plan, self.layout, lag), pieces=pieces, read=read)


class OuterStep:
    """The step from an aggregate to the next parameters, in slices: of a large model, only the sum is in memory.

    The outer optimizer sees the trained parameters alone, without gaps, and its state is zero at all other values. A
    statistic becomes the weighted mean of the devices' values: the value before, plus the mean of the changes, plus the
    distances of the earlier Versions from which stale Updates were trained, each times its share of the weights. A
    counter becomes the value before plus the same difference rounded to the nearest whole number, ties to even. A value
    out of the range of its role by at most one step is set to the end
    of the range: that is the rounding of a codec. A value further out is no value of a Version.

    The parameters and each tensor of the state need separate passes over the parent, so that each can be written while
    it is computed.

    Args:
        aggregate: The aggregate of the Round.
        layout: The layout of the vector. The parameters are its first group.
        grid: The Round's grid.
        codec: The codec of the Run.
        step: The step of the outer optimizer in the Round.
    """

    def __init__(
        self,
        aggregate: Aggregate,
        layout: VectorLayout,
        grid: Sequence[int],
        codec: Precision,
        step: RoundStep,
    ) -> None:
        self._aggregate = aggregate
        self._layout = layout
        self._grid = grid
        self._codec = codec
        if isinstance(step.optimizer, FedDynStep):
            step = replace(step, optimizer=step.optimizer.of_round(aggregate.num_updates))
        self._round_step = step
        self._rounding = optimizer_part(step.optimizer)
        self._part = TrainedPart(layout.table)
        self._shares = {
            staleness: self._part.per_block(shares, 0.0) for staleness, shares in aggregate.stale_shares.items()
        }
        self._maxima = BlockMaxima(layout.table)
        self._num_clamped = 0

    def parameters(
        self, parent: Iterable[Float32s], state: StateSlices, earlier: EarlierSlices = NO_EARLIER
    ) -> Iterator[Float32s]:
        """Yield the next parameters in slices of at most ``SLICE_VALUES``.

        Args:
            parent: The parent's parameters in slices.
            state: The state before the step, empty to begin.
            earlier: The parameters of an earlier Version for each staleness in ``Aggregate.stale_shares``.

        Raises:
            InvalidVersion: A value is out of the range of its role by more than a step.
        """
        first = 0
        for before, _, after in self._steps(parent, state, earlier):
            self._maxima.add(before)
            self._limit(first, after)
            first += after.size
            yield after

    def state(self, name: str, parent: Iterable[Float32s], state: StateSlices) -> Iterator[Float32s]:
        """Yield a tensor of the next state in slices. The arguments are those of ``parameters``, from the start."""
        return (after[name] for _, after, _ in self._steps(parent, state, NO_EARLIER))

    def _steps(
        self, parent: Iterable[Float32s], state: StateSlices, earlier: EarlierSlices
    ) -> Iterator[tuple[Float32s, Mapping[str, Float32s], Float32s]]:
        readers = {name: _Reader(slices) for name, slices in state.items()}
        bases = {staleness: _Reader(slices) for staleness, slices in sorted(earlier.items())}
        first = 0
        for before in _sliced(parent):
            last = first + before.size
            values = before.astype(np.float64)
            aggregate = self._aggregate.part(first, last)
            for staleness, reader in bases.items():
                self._add_distance(first, aggregate, staleness, reader.take(before.size) - values)
            before_step: State = {name: reader.take(before.size) for name, reader in readers.items()}
            yield before, *self._step(first, values, aggregate, before_step)
            first = last

    def _add_distance(self, first: int, aggregate: Float64s, staleness: int, distance: Float64s) -> None:
        """Add the share of an earlier Version's distance to the changes of the statistics and counters, in place."""
        for start, stop, share in blocks_within(
            self._layout.table, self._shares[staleness], first, first + distance.size
        ):
            if share:
                aggregate[start - first : stop - first] += share * distance[start - first : stop - first]

    def _step(
        self, first: int, values: Float64s, aggregate: Float64s, earlier: State
    ) -> tuple[Mapping[str, Float32s], Float32s]:
        """Return the next state and the next values of the slice that begins at ``first``."""
        names, part = self._round_step.optimizer.tensors, self._part
        trained, averaged = part.split(values, first)
        changes, mean = part.split(aggregate, first)
        after: Mapping[str, Float32s] = dict.fromkeys(names, np.empty(0, np.float32))
        moved: Float32s = np.empty(0, np.float32)
        if trained.size or not averaged.size:
            state = {name: part.split(tensor, first)[0] for name, tensor in earlier.items()}
            tensors, parameters = self._round_step.apply(state, trained, changes)
            rounded = self._rounding.rounded
            after = {name: rounded("step", f" for the tensor {name!r}", tensors[name], trained.size) for name in names}
            moved = rounded("step", " for the parameters", parameters, trained.size)
        zeros = np.zeros(averaged.size, np.float32)
        return (
            {name: part.join(tensor, zeros, first) for name, tensor in after.items()},
            part.join(moved, self._averaged(first, averaged, mean), first),
        )

    def _averaged(self, first: int, values: Float64s, mean: Float64s) -> Float32s:
        """Return the next values of the statistics and counters in the slice that begins at ``first``."""
        table, begin, mean = self._part.averaged, first - self._part.rank(first), mean.copy()
        is_counter = [spec.role.role is RoleKind.COUNTER for spec in table.specs]
        for start, stop, counts in blocks_within(table, is_counter, begin, begin + values.size):
            if counts:
                change = mean[start - begin : stop - begin]
                np.rint(change, out=change)
        # A value beyond float32 becomes infinite here, and is refused with those out of their range.
        with np.errstate(over="ignore"):
            return (values + mean).astype(np.float32)

    def _limit(self, first: int, after: Float32s) -> None:
        """Set the values of a slice that are out of their range by at most a step to its end, and count them."""
        table = self._layout.table
        blocks = range(len(table.specs))
        for start, stop, block in blocks_within(table, blocks, first, first + after.size):
            spec, values = table.specs[block], after[start - first : stop - first]
            if spec.role == PARAMETER:
                continue
            exponent = self._grid[block] + self._aggregate.shifts[block]
            result = limited(values, spec.role, math.ldexp(1.0, exponent))
            if result is None:
                raise InvalidVersion(
                    f"tensor {spec.name!r}: the next version would have {problem_of(values, spec.role)}; lower "
                    "aggregation.outer_options.learning_rate, or correct the role or range that the run declares for "
                    "the tensor",
                    code="FN-0642",
                )
            self._num_clamped += int(np.count_nonzero(result != values))
            values[:] = result

    def result(self) -> FoldResult:
        """Return the result of the fold. Call this after the last slice of the parameters."""
        first = self._layout.for_all(first_grid(self._maxima.largest, self._codec))
        # Masked values have no reach: the grid stays.
        reaches = self._aggregate.reaches
        grid = next_grid(self._grid, reaches, first, self._codec) if reaches.any() else tuple(self._grid)
        return FoldResult(
            next_grid=_with_whole_steps(self._layout, grid),
            counts=self._aggregate.counts,
            num_clamped=self._num_clamped,
        )


def limited(values: Float32s, role: TensorRole, step: float) -> Float32s | None:
    """Return values with those out of range by at most ``step`` set to the end of the range; None if one is further."""
    if not np.isfinite(values).all():
        return None
    if not role.is_bounded:
        return values
    lowest, highest = (None if end is None else np.float32(end) for end in (role.lowest, role.highest))
    result = np.clip(values, lowest, highest)
    return result if (np.abs(values.astype(np.float64) - result) <= step).all() else None


def problem_of(values: Float32s, role: TensorRole) -> str:
    """Return the text about values of which some are out of the range of their role."""
    wrong = values[outside(values, role) | ~np.isfinite(values)]
    return (
        f"{counted(wrong.size, 'value')} out of range, such as {wrong[0]:g}, expected "
        f"{role.range or 'numbers of float32'}, because it is a {role.role}"
    )


def _with_whole_steps(layout: VectorLayout, grid: Sequence[int]) -> tuple[int, ...]:
    """Return a grid whose step is 1 in each block of a counter or a sum: their changes are whole numbers."""
    whole, roles = (RoleKind.COUNTER, RoleKind.SUM), (spec.role.role for spec in layout.total_table.specs)
    return tuple(0 if role in whole else exponent for role, exponent in zip(roles, grid, strict=True))


def _sliced(slices: Iterable[Float32s]) -> Iterator[Float32s]:
    """Yield the values of slices in slices of at most ``SLICE_VALUES``."""
    for values in slices:
        yield from (values[first : first + SLICE_VALUES] for first in range(0, max(values.size, 1), SLICE_VALUES))


class _Reader:
    """Values that arrive in slices, read in slices of other lengths."""

    def __init__(self, slices: Iterable[Float32s]) -> None:
        self._slices = iter(slices)
        self._rest: Float32s = np.empty(0, np.float32)

    def take(self, num_values: int) -> Float64s:
        """Return the next values (num_values,). Raises Corrupted if there are fewer."""
        parts, missing = [self._rest[:num_values]], num_values - self._rest.size
        self._rest = self._rest[num_values:]
        while missing > 0:
            piece = next(self._slices, None)
            if piece is None:
                raise Corrupted(
                    f"outer state: ends {counted(missing, 'value')} too early; restore a backup of the folder",
                    code="FN-0523",
                )
            parts.append(piece[:missing])
            self._rest = piece[missing:]
            missing -= piece.size
        return np.concatenate(parts).astype(np.float64)


def first_grid_of(layout: VectorLayout, parameters: Iterable[Float32s], codec: Precision) -> tuple[int, ...]:
    """Return the first grid of parameters that arrive in consecutive slices: an exponent for each block of the vector.

    All groups begin on the grid of the parameters, whose range is at least 1 in each block. Values of another size,
    such as control variates, move the grid of their own blocks from Round to Round.
    """
    maxima = BlockMaxima(layout.table)
    for piece in parameters:
        maxima.add(piece)
    return _with_whole_steps(layout, layout.for_all(first_grid(maxima.largest, codec)))


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
