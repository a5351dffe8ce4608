"""Laws of vectors with groups: each group has its own weights and grid, and moves its own auxiliary tensor."""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.errors import raises
from support.laws import plans
from support.virtual import plan as virtual_plan

from fanin.edge.codecs.fixed import CODECS
from fanin.edge.codecs.grid import first_grid, next_grid, no_reaches
from fanin.edge.codecs.scaffold import Scaffold
from fanin.edge.codecs.stage import Stage
from fanin.edge.codecs.vector import MAIN, Group, VectorLayout, Weighting
from fanin.edge.tensors import Float32s, Float64s, TensorTable
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import InvalidPlan
from fanin.protos.messages import EXAMPLES, CodecSpec, Statistics, Telemetry, UpdateHeader
from fanin.protos.plans import BY_EXAMPLES, CODEC_BITS, HEADROOM_BITS, Plan
from fanin.server.aggregation.auxiliary import AuxiliaryStep, RangeRefresh
from fanin.server.aggregation.fold import Contribution, accept, begin
from fanin.server.aggregation.folding import Lag, OuterStep, contribution_of
from fanin.server.aggregation.outer import FedAvg, RoundStep
from fanin.server.aggregation.rules import ColumnRule, Rule, TrimmedMean, WeightedMean, num_trimmed
from fanin.server.aggregation.sets import Aggregate, SetFold
from fanin.server.aggregation.weights import weights_of

LAYOUT = VectorLayout(
    table=TensorTable.of({"first": (2, 3), "none": (0,), "second": (4,)}),
    groups=(MAIN, Group(name="control", weighting=Weighting.ONE)),
)
NUM = LAYOUT.table.num_values
BLOCKS = (0,) * 6 + (2,) * 4 + (3,) * 6 + (5,) * 4
"""The block of each value of the vector."""
LIMIT = 2**31 - 1
VALUES = st.lists(st.integers(-LIMIT, LIMIT), min_size=2 * NUM, max_size=2 * NUM)
SHIFTS = st.lists(st.integers(0, 4), min_size=6, max_size=6)
UPDATES = st.lists(st.tuples(st.integers(1, 4096), SHIFTS, VALUES), min_size=1, max_size=7)
GRIDS = st.lists(st.integers(-40, 4), min_size=6, max_size=6)
Drawn = Sequence[tuple[int, Sequence[int], Sequence[int]]]
"""Examples, shifts and values of each Update."""


def contribution(num_examples: int, shifts: Sequence[int], values: Sequence[int]) -> Contribution:
    encoded = np.array(values, np.int32)
    weights = LAYOUT.per_block({Weighting.EXAMPLES: num_examples, Weighting.ONE: 1})
    return Contribution(
        weights=weights,
        fresh_weights=weights,
        shifts=tuple(shifts),
        bits=32,
        max_shift=4,
        counts={"n": 1},
        pieces=[encoded],
        read=lambda first, last: encoded[first:last],
    )


def fold(rule: Rule | ColumnRule, drawn: Drawn, grid: Sequence[int], rng: random.Random) -> Aggregate:
    contributions = {str(index): contribution(*one) for index, one in enumerate(drawn)}
    return SetFold(rule, LAYOUT.total_table, grid, lambda device, _scale: contributions[device], 100).complete(
        rng.sample(list(contributions), len(contributions))
    )


def all_values(aggregate: Aggregate, rng: random.Random) -> list[float]:
    """Return the aggregate of all groups, read in two parts. The second part may begin in any group."""
    cut = rng.randint(0, 2 * NUM)
    return [*aggregate.part(0, cut).tolist(), *aggregate.part(cut, 2 * NUM).tolist()]


@given(UPDATES, GRIDS, st.randoms(use_true_random=False))
def test_the_mean_of_each_group_is_that_of_fractions_with_its_own_weights(
    drawn: Drawn, grid: list[int], rng: random.Random
) -> None:
    outcome = all_values(fold(WeightedMean(), drawn, grid, rng), rng)
    for position, block in enumerate(BLOCKS):
        weights = [num_examples if block < 3 else 1 for num_examples, _, _ in drawn]
        total = sum(
            w * (values[position] << shifts[block]) for w, (_, shifts, values) in zip(weights, drawn, strict=True)
        )
        # The sum is exact. Its conversion and the division are rounded once each.
        rounded = math.ldexp(float(total), grid[block]) / float(sum(weights))
        assert outcome[position] == rounded
        exact = Fraction(total, sum(weights)) * Fraction(2) ** grid[block]
        assert abs(Fraction(rounded) - exact) <= abs(exact) * Fraction(2) ** -51


@given(UPDATES, GRIDS, st.floats(0.01, 0.49), st.randoms(use_true_random=False))
def test_a_trimmed_mean_trims_each_group_for_itself(
    drawn: Drawn, grid: list[int], trim: float, rng: random.Random
) -> None:
    outcome, num_per_end = all_values(fold(TrimmedMean(trim), drawn, grid, rng), rng), num_trimmed(trim, len(drawn))
    for position, block in enumerate(BLOCKS):
        column = sorted(values[position] << shifts[block] for _, shifts, values in drawn)
        middle = column[num_per_end : len(drawn) - num_per_end]
        assert outcome[position] == math.ldexp(float(sum(middle)) / len(middle), grid[block])


STALENESS = st.integers(0, 1000)


@given(plans(), st.integers(1, 1 << 40), STALENESS, st.integers(0, 40))
def test_the_weight_of_one_never_exceeds_that_of_the_examples(
    plan: Plan, examples: int, staleness: int, scale: int
) -> None:
    """Therefore the headroom that a Plan guarantees for the parameters suffices for every group."""
    staleness = min(staleness, plan.aggregation.max_staleness)
    weights = weights_of(header(examples, b""), plan, scale=scale, staleness=staleness)
    assert 1 <= weights[Weighting.ONE] <= weights[Weighting.EXAMPLES]
    largest = (1 << (CODEC_BITS[plan.codec.name] - 1)) << plan.codec.max_shift
    assert plan.cohort.buffer * weights[Weighting.ONE] * largest <= 1 << HEADROOM_BITS


def header(examples: int, payload: bytes, shifts: tuple[int, ...] = ()) -> UpdateHeader:
    return UpdateHeader(
        format=1,
        assignment_id="a",
        run_id="run",
        round=1,
        version_sha256="",
        codec="int8",
        shifts=shifts,
        payload=artifact_of(payload),
        statistics=Statistics(counts={EXAMPLES: examples}),
        telemetry=Telemetry(),
    )


@given(plans(), st.integers(1, 1 << 40), STALENESS, st.integers(0, 40))
def test_a_committed_update_has_the_weight_of_each_group_in_its_blocks(
    plan: Plan, examples: int, staleness: int, scale: int
) -> None:
    staleness, unit = min(staleness, plan.aggregation.max_staleness), plan.weight_unit
    lag = Lag(staleness=staleness, shifts=(0,) * 6, scale=scale)
    update = contribution_of(header(examples, b"", (0,) * 6), CODECS[plan.codec.name], plan, LAYOUT, lag)
    # Halves are rounded up.
    claim = min(examples, plan.max_examples) if plan.aggregation.weights == BY_EXAMPLES else 1
    steps = max(math.floor(Fraction(claim, 1 << scale) + Fraction(1, 2)), 1)
    stale = round(unit / math.sqrt(1 + staleness))
    assert update.weights == (steps * stale,) * 3 + (stale,) * 3
    assert update.fresh_weights == (steps * unit,) * 3 + (unit,) * 3


def test_a_stale_update_is_clipped_at_the_bits_of_its_codec_also_of_one_of_another_package() -> None:
    """The Plan reserves 32 bits for a codec whose bits it does not know."""
    theirs = replace(virtual_plan(), codec=CodecSpec(name="levels", max_shift=2))
    assert theirs.codec.bits == 32
    lag = Lag(staleness=0, shifts=(20,) * 6)
    update = contribution_of(header(1, b"", (0,) * 6), CODECS["int8"], theirs, LAYOUT, lag)
    values = np.full(LAYOUT.total_table.num_values, 100, np.int8)
    total = accept(begin(LAYOUT.total_table), LAYOUT.total_table, replace(update, pieces=(values,)))
    assert set(total.values.tolist()) == {1 << (8 - 1 + 2)}


@given(UPDATES, GRIDS, st.randoms(use_true_random=False))
def test_the_grid_of_each_group_follows_its_own_values(drawn: Drawn, grid: list[int], rng: random.Random) -> None:
    spec = CodecSpec(name="fixed32", max_shift=4)
    aggregate = fold(WeightedMean(), drawn, grid, rng)
    step = OuterStep(aggregate, LAYOUT, grid, spec, RoundStep(optimizer=FedAvg(1.0), number=1))
    parameters = np.array([rng.uniform(-9, 9) for _ in range(NUM)], np.float32)
    list(step.parameters([parameters], {}))
    maxima = [float(np.abs(view).max(initial=0.0)) for view in LAYOUT.table.views(parameters).values()]
    first = first_grid(maxima, spec)
    each = [next_grid(grid[part], aggregate.reaches[part], first, spec) for part in (slice(0, 3), slice(3, 6))]
    assert step.result().next_grid == (*each[0], *each[1])


# Auxiliary tensors.

FLOATS = st.lists(st.floats(-1e6, 1e6, width=32), min_size=NUM, max_size=NUM)


def auxiliary_step(mean: Sequence[float], stage: Stage, num_updates: int = 3) -> AuxiliaryStep:
    """Return the step for an aggregate whose group ``control`` is ``mean``. NaN parameters would reveal their use."""
    values = np.array([*([np.nan] * NUM), *mean])
    aggregate = Aggregate(
        part=lambda first, last: values[first:last], reaches=no_reaches(LAYOUT.total_table), counts={}, shifts=()
    )
    return AuxiliaryStep(
        aggregate, LAYOUT, {"scaffold": stage}, num_updates, RangeRefresh(activations=(), measured=None)
    )


@given(FLOATS, FLOATS, st.integers(1, 50), st.integers(1, 50), st.lists(st.integers(0, NUM), max_size=3).map(sorted))
def test_a_control_variate_moves_by_its_groups_mean_in_any_slices(
    before: list[float], mean: list[float], num_updates: int, num_devices: int, cuts: list[int]
) -> None:
    step = auxiliary_step(mean, Scaffold(num_devices=num_devices), num_updates)
    assert step.tensors == ("control",)
    after = np.concatenate(list(step.tensor("control", np.split(np.array(before, np.float32), cuts))))
    assert after.dtype == np.float32
    share = num_updates / num_devices
    assert after.tolist() == [float(np.float32(c + share * change)) for c, change in zip(before, mean, strict=True)]


class Broken(Scaffold):
    """A stage with a fault in ``advance``."""

    def __init__(self, fault: str) -> None:
        super().__init__(4)
        self._fault = fault

    def advance(self, auxiliary: Float64s, aggregate: Float64s, num_updates: int) -> Float64s:
        after = super().advance(auxiliary, aggregate, num_updates)
        faults: Mapping[str, object] = {
            "shape": after[1:],
            "float32": after.astype(np.float32),
            "none": None,
            "infinite": after + 1e300,
            "nan": after * np.nan,
        }
        return faults[self._fault]  # type: ignore[return-value]


RETURNED = "stage scaffold: advance returned {} for the tensor 'control', expected {}; correct the stage"
BEYOND = (
    "stage scaffold: advance returned values beyond float32 for the tensor 'control'; lower training.learning_rate, or "
    "correct the stage"
)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("shape", RETURNED.format("float64 (9,)", "float64 (10,)")),
        ("float32", RETURNED.format("float32 (10,)", "float64 (10,)")),
        ("none", RETURNED.format("NoneType", "float64 (10,)")),
        ("nan", RETURNED.format("NaN", "finite values")),
        ("infinite", BEYOND),
    ],
)
def test_an_invalid_auxiliary_tensor_is_refused(fault: str, text: str) -> None:
    step = auxiliary_step([1.0] * NUM, Broken(fault))
    before: Iterable[Float32s] = [np.ones(NUM, np.float32)]
    with raises(InvalidPlan, text):
        list(step.tensor("control", before))


class Raising(Scaffold):
    """A stage whose ``advance`` raises an error."""

    def advance(self, auxiliary: Float64s, aggregate: Float64s, num_updates: int) -> Float64s:
        raise ValueError("no such device")


def test_a_stage_that_raises_is_named() -> None:
    step = auxiliary_step([1.0] * NUM, Raising(4))
    with raises(InvalidPlan, "stage scaffold: advance raised ValueError: no such device; correct the stage"):
        list(step.tensor("control", [np.ones(NUM, np.float32)]))
