"""Laws of the grid: it fits the expected Updates, uses the codec's bits, and no minority of liars moves it."""

from collections.abc import Sequence

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from support.folds import fresh

from fanin.edge.codecs.fixed import CODECS, Encoded, decoded, largest_value
from fanin.edge.codecs.grid import (
    MAX_EXPONENT,
    MAX_MOVE_BITS,
    MIN_EXPONENT,
    NO_REACH,
    NUM_REACHES,
    Reaches,
    common_column,
    first_grid,
    next_grid,
    no_reaches,
    reach_column,
    resolved_bits,
)
from fanin.edge.codecs.vector import VectorLayout
from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos.messages import CodecSpec
from fanin.server.aggregation.fold import accept, begin
from fanin.server.aggregation.folding import first_grid_of

TABLE = TensorTable.of({"a": (3,), "b": (2,), "c": (0,)})
ONE = TensorTable.of({"a": (1,)})
# Beyond 2^90 the step would be coarser than MAX_EXPONENT allows. No trainable model has such values.
VALUES = st.lists(st.floats(-(2.0**66), 2.0**66, width=32), min_size=5, max_size=5).map(
    lambda values: np.array(values, np.float32)
)
GRIDS = st.lists(st.integers(MIN_EXPONENT, MAX_EXPONENT), min_size=3, max_size=3)
SPECS = st.builds(CodecSpec, name=st.sampled_from(sorted(CODECS)), max_shift=st.integers(0, 24))
COLUMNS = st.lists(st.integers(0, NUM_REACHES - 1), min_size=1, max_size=12)
FIRST = -29


def encode(table: TensorTable, update: Float32s, grid: Sequence[int], spec: CodecSpec) -> Encoded:
    return CODECS[spec.name].encode(table, update, grid, spec.max_shift, np.random.default_rng(0))


def reaches(rows: Sequence[Sequence[int]]) -> Reaches:
    """Count the reach columns of each block's Updates."""
    return np.array([np.bincount(row, minlength=NUM_REACHES) for row in rows], np.int64).reshape(-1, NUM_REACHES)


def column_of(update: float, exponent: int, spec: CodecSpec) -> int:
    """Return the reach that the coordinator measures in an Update of one value, encoded on a grid."""
    encoded = encode(ONE, np.array([update], np.float32), (exponent,), spec)
    pieces = (decoded(CODECS[spec.name], encoded.payload, 1),)
    total = accept(begin(ONE), ONE, fresh(1, encoded.shifts, spec, pieces))
    return common_column(total.reaches[0])


@given(VALUES, SPECS)
def test_a_first_round_can_move_every_value_by_its_own_size(parameters: Float32s, spec: CodecSpec) -> None:
    grid = first_grid_of(VectorLayout(table=TABLE), (parameters,), spec)
    assert all(MIN_EXPONENT <= exponent <= MAX_EXPONENT for exponent in grid)
    for update in (parameters, -parameters, np.ones_like(parameters)):
        assert encode(TABLE, update, grid, spec).num_saturated == 0


@given(VALUES, st.lists(st.integers(0, 5), max_size=3).map(sorted), SPECS)
def test_a_first_grid_does_not_depend_on_the_pieces(parameters: Float32s, cuts: list[int], spec: CodecSpec) -> None:
    views = TABLE.views(parameters).values()
    expected = first_grid([float(np.abs(view).max(initial=0.0)) for view in views], spec)
    assert first_grid_of(VectorLayout(table=TABLE), np.split(parameters, cuts), spec) == expected


def rounded(update: float, exponent: int, spec: CodecSpec) -> float:
    """Return the value that the coordinator reads from an Update of one value, encoded on a grid."""
    encoded = encode(ONE, np.array([update], np.float32), (exponent,), spec)
    (steps,) = decoded(CODECS[spec.name], encoded.payload, 1).tolist()
    return float(np.ldexp(steps, exponent + encoded.shifts[0]))


@example(update=127 / 128, spec=CodecSpec(name="int8", max_shift=0), start=0)
@given(st.floats(2.0**-30, 2.0**30, width=32), SPECS, st.integers(-20, 20))
def test_the_grid_converges_where_an_update_twice_as_large_fits_and_uses_its_bits(
    update: float, spec: CodecSpec, start: int
) -> None:
    exponent = start
    for _ in range(100):
        row = reaches([[column_of(update, exponent, spec)] * 4])
        (exponent,) = next_grid((exponent,), row, (-100,), spec)
    power = int(np.frexp(np.float32(update))[1])
    expected = power - resolved_bits(spec)
    # An update just below a power of two may be rounded up to it. It then needs a step that is twice as large.
    is_rounded_up = any(rounded(update, each, spec) >= 2.0**power for each in (expected, expected + 1))
    assert exponent in (expected, expected + is_rounded_up)
    assert encode(ONE, np.array([update * 1.98], np.float32), (exponent,), spec).num_saturated == 0
    if spec.name == "int8":
        (q,) = CODECS["int8"].decode(memoryview(encode(ONE, np.array([update]), (exponent,), spec).payload)).tolist()
        assert 31 <= q <= largest_value(8)


@given(GRIDS, st.lists(COLUMNS, min_size=3, max_size=3), SPECS)
def test_a_block_moves_by_at_most_2_bits_a_round_and_stays_within_the_limits(
    grid: list[int], rows: list[list[int]], spec: CodecSpec
) -> None:
    after = next_grid(grid, reaches(rows), (FIRST,) * 3, spec)
    assert len(after) == len(grid)
    assert all(MIN_EXPONENT <= exponent <= MAX_EXPONENT for exponent in after)
    assert all(abs(new - old) <= MAX_MOVE_BITS for new, old in zip(after, grid, strict=True))


@st.composite
def with_liars(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Draw the reach columns of honest Updates of one block, and those of liars, which are at most a third of all."""
    honest = draw(COLUMNS)
    return honest, draw(st.lists(st.integers(0, NUM_REACHES - 1), max_size=len(honest) // 2))


@given(with_liars(), st.integers(MIN_EXPONENT, MAX_EXPONENT), SPECS)
def test_a_third_of_liars_keep_the_grid_within_the_range_of_honest_devices(
    columns: tuple[list[int], list[int]], exponent: int, spec: CodecSpec
) -> None:
    honest, liars = columns
    assert min(honest) <= common_column(reaches([honest + liars])[0]) <= max(honest)

    def after(row: list[int]) -> int:
        return next_grid((exponent,), reaches([row]), (FIRST,), spec)[0]

    attacked, honest_only = after(honest + liars), after(honest)
    assert abs(attacked - honest_only) <= 4
    if NO_REACH not in honest:
        assert after([min(honest)]) <= attacked <= after([max(honest)])
    if len(set(honest)) == 1:
        assert attacked == honest_only


@st.composite
def attacks(draw: st.DrawFn) -> tuple[list[tuple[list[float], list[float]]], CodecSpec]:
    """Draw Rounds with the changes of honest devices and of liars for a block of one value, and a codec.

    Honest changes are within a factor of 2^3, so their reaches are within 2^4. A first grid resolves all of them.
    Liars are fewer than a third, and send any values.
    """
    num_liars = draw(st.integers(1, 3))
    num_honest = draw(st.integers(2 * num_liars + 1, 10))
    scale = draw(st.integers(-20, 4))
    rounds = []
    for _ in range(draw(st.integers(1, 20))):
        scale = max(-20, min(scale + draw(st.integers(-3, 3)), 20))
        sizes = st.floats(2.0**scale, 2.0 ** (scale + 3), width=32)
        lies = st.sampled_from((0.0, 2.0**-120, 2.0**120)) | st.floats(0.0, 2.0**120, width=32)
        rounds.append(
            (
                draw(st.lists(sizes, min_size=num_honest, max_size=num_honest)),
                draw(st.lists(lies, min_size=num_liars, max_size=num_liars)),
            )
        )
    return rounds, draw(st.sampled_from((CodecSpec(name="fixed32", max_shift=0), CodecSpec(name="int8", max_shift=12))))


@given(attacks())
def test_liars_never_move_the_grid_more_than_2_to_the_4_from_that_of_the_honest_devices(
    attack: tuple[list[tuple[list[float], list[float]]], CodecSpec],
) -> None:
    rounds, spec = attack
    honest_only = attacked = first_grid((1.0,), spec)[0]
    for honest, lies in rounds:
        updates = [honest, honest + lies]
        honest_only, attacked = (
            next_grid(
                (exponent,), reaches([[column_of(update, exponent, spec) for update in changes]]), (FIRST,), spec
            )[0]
            for exponent, changes in zip((honest_only, attacked), updates, strict=True)
        )
        assert abs(attacked - honest_only) <= 4


@given(st.integers(FIRST, MAX_EXPONENT), st.integers(1, 6))
def test_a_grid_that_rounds_every_update_to_0_recovers(exponent: int, num_updates: int) -> None:
    row = no_reaches(ONE)
    row[0, reach_column(0, 0)] = num_updates
    for _ in range((MAX_EXPONENT - FIRST) // MAX_MOVE_BITS + 1):
        (exponent,) = next_grid((exponent,), row, (FIRST,), CodecSpec(name="fixed32", max_shift=0))
    assert exponent == FIRST
